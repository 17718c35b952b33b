"""Chapter 2: cut the batch's rows B over the ranks, and sum the weight gradients in a ring.

    layout   x [B/X, D] on each of X data-parallel (dp) ranks; weights [L, D, 2, F] on all of them
    moves    the gradients of a layer, [D, 2, F]: all-reduce over dp, as soon as backward has them,
             on a thread of its own behind the compute that follows
    costs    2 (n-1)/n of the weights sent by each of the n ranks per step, whatever B is

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 02_data_parallel.py

What is new:  git diff --no-index 01_single_device.py 02_data_parallel.py
Papers:  Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.2, for the overlap;
         Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", for the ring
"""

import torch
import torch.distributed as dist

from common import (
    TIME_LIMIT,
    State,
    adam_update,
    begin,
    block_backward_input,
    block_backward_weight,
    block_forward,
    communicates,
    finish,
    initial_weights,
    irecv,
    isend,
    make_batch,
    parse_args,
    run,
    save,
    scratch,
    start_up,
    timed_step,
    track_activations,
)

# ------------------------------------------------------------------------------------ collectives
# @communicates writes down how long it took; on an axis of one rank it does nothing at all.


def cut(tensor, n, dim=0):
    """Return n views that follow each other along dim, sized as torch.chunk sizes them: all the
    same but the last; where there is not enough to go round, the last ones are empty."""
    parts = list(tensor.chunk(n, dim))
    return parts + [tensor.narrow(dim, 0, 0)] * (n - len(parts))


def receive_parts(chunks, axis):
    """Post the receives of scatter_round, in the order in which the chunks come by: on rank r that
    of chunk r - 2 first, then r - 3, …, its own last. Return [(chunk's number, Message)]."""
    order = [(axis.rank - 2 - hop) % axis.size for hop in range(axis.size - 1)]
    inbox = {i: scratch(f"{axis.name} {i}", chunks[i].shape, chunks[i]) for i in order}
    return [(i, irecv(inbox[i], axis.prev_rank, axis)) for i in order]


def scatter_round(chunks, axis, received):
    """Sum chunk i of all ranks into rank i's chunks[i]; what the others hold of it is used up.

    Chunk i starts at rank i + 1 and goes once round the ring to rank i, and every rank on the way
    adds its own. Each rank sends all chunks but its own: (n-1)/n of the whole, the least possible
    (Patarasuk & Yuan 2009). Return the sends: until they are done, the chunks belong to them."""
    sent = [isend(chunks[axis.prev_rank], axis.next_rank, axis)]
    for i, message in received:
        message.wait()
        chunks[i] += message.tensor
        if i != axis.rank:
            sent.append(isend(chunks[i], axis.next_rank, axis))
    return sent


def receive_sums(chunks, axis):
    """Post the receives of gather_round, in the order in which the chunks come by. Both rounds'
    may be posted at once: tag 1 keeps the second's messages apart."""
    order = [(axis.rank - 1 - hop) % axis.size for hop in range(axis.size - 1)]
    return [(i, irecv(chunks[i], axis.prev_rank, axis, tag=1)) for i in order]


def gather_round(chunks, axis, received):
    """Copy each rank's chunks[rank] to all ranks, by another round that sends as much."""
    sent = [isend(chunks[axis.rank], axis.next_rank, axis, tag=1)]
    for i, message in received:
        message.wait()
        if i != axis.next_rank:  # it began there
            sent.append(isend(chunks[i], axis.next_rank, axis, tag=1))
    return sent


def wait_all(messages):
    for message in messages:
        message.wait()


@communicates
def ring_all_reduce(tensor, axis):
    """Sum the tensor over the axis, in place: each chunk on one rank, then from there to all."""
    chunks = cut(tensor.view(-1), axis.size)
    # Receives before sends: gloo announces a receive on the connection that carries the data the
    # other way. Announced late, it queues behind a whole chunk, and the ring runs at half speed.
    # The second round can't overwrite a chunk too early: its sum comes back only after what this
    # rank adds to it has left.
    parts, sums = receive_parts(chunks, axis), receive_sums(chunks, axis)
    sent = scatter_round(chunks, axis, parts)
    wait_all(sent + gather_round(chunks, axis, sums))


@communicates
def naive_all_reduce(tensor, axis):
    """The parameter server: rank 0 receives everything, adds, and sends everybody the sum. A ring's
    ranks together send as much, 2(n-1) times the tensor; here all of it passes through rank 0."""
    if axis.rank > 0:
        isend(tensor, 0, axis).wait()
        irecv(tensor, 0, axis).wait()
        return
    others = [torch.empty_like(tensor) for _ in range(1, axis.size)]
    for message in [irecv(other, src, axis) for src, other in enumerate(others, 1)]:
        message.wait()
        tensor += message.tensor
    wait_all([isend(tensor, dst, axis) for dst in range(1, axis.size)])


@communicates
def torch_all_reduce(tensor, axis):
    """The library's, to compare with."""
    dist.all_reduce(tensor, group=axis.group, async_op=True).wait(TIME_LIMIT)


def all_reduce(tensor, axis, args):
    """Turn the partial sums that the ranks of the axis hold into the full sum on all, in place."""
    by_name = {"ring": ring_all_reduce, "naive": naive_all_reduce, "torch": torch_all_reduce}
    by_name[args.collectives](tensor, axis)


def start(collective, *operands):
    """Have the axis's communication thread call collective(*operands), the last two of which are
    axis and args, while this thread computes on. What it reads and writes is its own until the
    task returned here is waited for, or all are by `join`."""
    axis, args = operands[-2:]
    if axis.size == 1 or args.no_overlap:
        return collective(*operands)
    task = axis.submit(collective, *operands)
    axis.pending.append(task)
    return task


def join(axis):
    """Wait for all that was started on the axis; then this thread may use the axis itself."""
    while axis.pending:
        wait(axis.pending.pop(0))


def wait(task):
    if task is not None:  # None: it was done at once
        task.wait()


def sum_over(number, *axes):
    """Return the sum of a number over the axes. One number is all latency and no bytes, and no
    lesson: torch's all-reduce will do, and its few bytes are not counted."""
    for axis in axes:
        torch_all_reduce(number, axis)
    return number


# --------------------------------------------------------------------------------------- sharding


def shard_batch(rows_BD, args, mesh):
    """Return this rank's rows: B over dp, in proportion to --batch-shares if there are any."""
    shares = args.batch_shares or [1] * args.dp
    ends = [args.batch_size * sum(shares[:i]) // sum(shares) for i in range(args.dp + 1)]
    return rows_BD[ends[mesh.dp.rank] : ends[mesh.dp.rank + 1]]


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


def backward(state, saved, dy_BD, last, args, mesh):
    """Return dx [B, D], and add the gradients of every layer to state.grads."""
    for l in reversed(range(len(state.weights))):
        x_BD, h_BF = saved.pop()
        dx_BD, dz_BF = block_backward_input(dy_BD, h_BF, *state.weights[l].unbind(1))
        backward_weight(state, l, (x_BD, h_BF, dy_BD, dz_BF), last, args, mesh)
        dy_BD = dy_BD + dx_BD
    return dy_BD


def backward_weight(state, l, saved, last, args, mesh):
    """Add layer l's gradients to state.grads[l]; after the last micro-batch's, sum them over dp."""
    x_BD, h_BF, dy_BD, dz_BF = saved
    block_backward_weight(x_BD, h_BF, dy_BD, dz_BF, *state.grads[l].unbind(1))
    if last:
        start(all_reduce, state.grads[l], mesh.dp, args)


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
        backward(state, saved, dy_BD, i == args.microbatches - 1, args, mesh)
    norm = update(state, step, args, mesh)
    return sum_over(loss, mesh.dp), norm


def update(state, step, args, mesh):
    """Update the weights from the gradients, and return the norm of all gradients."""
    join(mesh.dp)
    rows = torch.linalg.vector_norm(state.grads, dim=-1)  # short sums keep float32 exact
    square = rows.double().square().sum()  # squares add up
    norm = square.sqrt()
    scale = (args.clip_norm / (norm + 1e-6)).clamp(max=1).item()
    adam_update(state, state.grads, scale, step, args)
    state.weights.copy_(state.master)  # rounded for bfloat16; else they are the same tensor
    return norm


# ------------------------------------------------------------------------------------------ costs


def part_sizes(size, axis):
    return [len(part) for part in cut(torch.empty(size, device="meta"), axis.size)]


def ring_elements(size, axis):
    """Return the elements a rank sends in reduce-scatter and in all-gather: all chunks but its own,
    and all but its next neighbour's. Where n divides the size, both are (n-1)/n of it."""
    sizes = part_sizes(size, axis)
    return size - sizes[axis.rank], size - sizes[(axis.rank + 1) % axis.size]


def all_reduce_elements(size, axis, args):
    """Return the elements a rank sends to all-reduce `size` of them: 2 (n-1)/n in a ring."""
    if args.collectives == "naive":
        return size if axis.rank > 0 else (axis.size - 1) * size
    return sum(ring_elements(size, axis))


def predict(args, mesh):
    """Return by formula, in elements, what this rank sends per step and axis and what it holds."""
    L, D, F = args.layers, args.d_model, args.d_hidden
    rows = shard_batch(torch.empty(args.batch_size), args, mesh)
    B = [len(x) for x in rows.tensor_split(args.microbatches)]
    weights = L * D * 2 * F
    costs = {"weights": weights, "gradients": weights, "updated": weights}
    costs["activations"] = L * max(b * (D + F) for b in B)

    costs["dp"] = L * all_reduce_elements(D * 2 * F, mesh.dp, args)
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
