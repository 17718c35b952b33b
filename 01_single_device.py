"""Chapter 1: train a stack of MLP blocks on one device, with backward written out.

The block's halves and Adam are in common.py, the rest is here, and the run ends by comparing itself
with torch's autograd and torch.optim.Adam. Every later chapter is this file and some lines more, so
the functions that they fill are here already: one device is the trivial way to shard a batch and
the weights. `args` is the command line; `mesh` says where this rank is among others: here, alone.

    layout   x [B, D], weights [L, D, 2, F]: everything on one device
    moves    nothing
    costs    per layer 4BDF FLOPs forward and 8BDF backward; per weight 4 bytes, 4 for its gradient
             and 8 for Adam (2, 2 and 12 in bfloat16)

    python 01_single_device.py
"""

import torch

from common import (
    State,
    adam_update,
    begin,
    block_backward_input,
    block_backward_weight,
    block_forward,
    finish,
    initial_weights,
    make_batch,
    parse_args,
    run,
    save,
    start_up,
    timed_step,
    track_activations,
)

# --------------------------------------------------------------------------------------- sharding


def shard_batch(rows_BD, args, mesh):
    """Return this rank's rows: all."""
    return rows_BD


def shard_weights(weights, args, mesh):
    """Return this rank's part of the weights [L, D, 2, F]: all."""
    return weights


def init_state(args, mesh):
    """Return the State this rank keeps between steps."""
    weights = shard_weights(initial_weights(args), args, mesh)
    master = weights
    if args.dtype == "bfloat16":
        weights = weights.bfloat16()
    grads = torch.zeros_like(weights)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    return State(weights, grads, master, exp_avg, exp_avg_sq, range(args.layers))


# ------------------------------------------------------------------------------ forward, backward


def forward(state, x_BD, args, mesh):
    """Return y [B, D], and for backward the x [B, D] and h [B, F] of every layer."""
    saved = []
    for weights in state.weights:
        y_BD, h_BF = block_forward(x_BD, *weights.unbind(1))
        saved.append((x_BD, h_BF))
        x_BD = x_BD + y_BD
    return x_BD, saved


def backward(state, saved, dy_BD, args, mesh):
    """Return dx [B, D], and add the gradients of every layer to state.grads."""
    for l in reversed(range(len(state.weights))):
        x_BD, h_BF = saved.pop()
        dx_BD, dz_BF = block_backward_input(dy_BD, h_BF, *state.weights[l].unbind(1))
        backward_weight(state, l, (x_BD, h_BF, dy_BD, dz_BF), args, mesh)
        dy_BD = dy_BD + dx_BD
    return dy_BD


def backward_weight(state, l, saved, args, mesh):
    """Add layer l's gradients to state.grads[l]."""
    x_BD, h_BF, dy_BD, dz_BF = saved
    block_backward_weight(x_BD, h_BF, dy_BD, dz_BF, *state.grads[l].unbind(1))


# --------------------------------------------------------------------------------------- training


def loss_and_gradient(y_BD, t_BD, args, mesh):
    """Return this rank's part of the mean square error, and its gradient dy [B, D].

    Divided by the size of the whole batch, not of a part of it: so losses and gradients of all
    parts, on whatever ranks and of whatever size, simply add up to those of the batch."""
    size = args.batch_size * args.d_model
    diff_BD = y_BD - t_BD
    loss = diff_BD.double().square().sum() / size
    return loss, diff_BD * (2 / size)


def train_step(state, x_BD, t_BD, step, args, mesh):
    """Train on this rank's rows; return the loss and the gradient norm of the whole batch."""
    state.grads.zero_()
    loss = torch.zeros((), dtype=torch.float64, device=x_BD.device)
    x_of, t_of = x_BD.tensor_split(args.microbatches), t_BD.tensor_split(args.microbatches)
    for i in range(args.microbatches):
        y_BD, saved = forward(state, x_of[i], args, mesh)
        track_activations({i: saved})
        more_loss, dy_BD = loss_and_gradient(y_BD, t_of[i], args, mesh)
        loss += more_loss
        backward(state, saved, dy_BD, args, mesh)
    norm = update(state, step, args, mesh)
    return loss, norm


def update(state, step, args, mesh):
    """Update the weights from the gradients, and return the norm of all gradients."""
    rows = torch.linalg.vector_norm(state.grads, dim=-1)  # short sums keep float32 exact
    square = rows.double().square().sum()  # squares add up
    norm = square.sqrt()
    scale = (args.clip_norm / (norm + 1e-6)).clamp(max=1).item()
    adam_update(state, state.grads, scale, step, args)
    state.weights.copy_(state.master)  # rounded for bfloat16; else they are the same tensor
    return norm


# ------------------------------------------------------------------------------------------ costs


def predict(args, mesh):
    """Return by formula, in elements, what this rank sends per step and axis and what it holds."""
    L, D, F = args.layers, args.d_model, args.d_hidden
    rows = shard_batch(torch.empty(args.batch_size), args, mesh)
    B = [len(x) for x in rows.tensor_split(args.microbatches)]
    weights = L * D * 2 * F
    costs = {"weights": weights, "gradients": weights, "updated": weights}
    costs["activations"] = L * max(b * (D + F) for b in B)
    return costs


def main():
    args = parse_args(__file__, __doc__)
    mesh = start_up(args)
    state = init_state(args, mesh)
    history = []
    for step in range(begin(state, args, mesh), args.steps):
        batch = [shard_batch(rows_BD, args, mesh) for rows_BD in make_batch(args, step)]
        history.append(timed_step(train_step, state, *batch, step, args, mesh))
        save(state, step + 1, args, mesh)
    return finish(state, history, predict(args, mesh), args, mesh)


if __name__ == "__main__":
    run(main)
