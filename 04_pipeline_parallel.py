"""Chapter 4: cut the layers L into stages, and keep all stages busy with micro-batches.

    layout   weights [L/Z, D, 2, F/Y] on each of Z stages (pp); x [B/X, D] in m micro-batches
    moves    x of a micro-batch to the next stage, dx to the one before: one send and one receive
    costs    B/X D elements per border each way; and idle time, the bubble: (p-1)/m of the compute
             time for gpipe and 1f1b, (p-1)/(v m) interleaved with v chunks, (p-1)/(3 m) for zb-h1

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 04_pipeline_parallel.py

What is new:  git diff --no-index 03_tensor_parallel.py 04_pipeline_parallel.py
Papers:  Huang et al. 2019, "GPipe" (arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473),
         section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241)
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
    current,
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
def ring_reduce_scatter(chunks, axis):
    """The first round alone: the sum of chunk i is left on rank i."""
    wait_all(scatter_round(chunks, axis, receive_parts(chunks, axis)))


@communicates
def ring_all_gather(chunks, axis):
    """The second round alone: chunk i of rank i to all."""
    wait_all(gather_round(chunks, axis, receive_sums(chunks, axis)))


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


# -------------------------------------------------------------------------------------- schedules
# What stage `stage` of p does with m micro-batches, in order: a list of (F, B or W, micro-batch,
# chunk of layers), for forward, backward and, where it is split off, backward's weight half.


def gpipe(p, stage, m, chunks):
    """All forwards, then all backwards (Huang et al. 2019). All m are alive at once."""
    return [("F", i, 0) for i in range(m)] + [("B", i, 0) for i in range(m)]


def one_f_one_b(p, stage, m, chunks):
    """Each backward as soon as it can be (Narayanan et al. 2021). At most p - stage are alive."""
    actions = gpipe(p, stage, m, chunks)
    return alternate(actions[:m], actions[m:], warm_up=p - stage - 1)


def interleaved(p, stage, m, chunks):
    """1F1B with `chunks` thin stages on each rank, which a group of p micro-batches visits in turn:
    the pipeline fills in steps of a thin stage (Narayanan et al. 2021, section 2.2). Before the
    first backward come p forwards of each chunk but the last, and of the last as many as fit into
    the way to the last stage and back."""
    groups = range(0, m, p)
    order = [(g + i, c) for g in groups for c in range(chunks) for i in range(p)]
    forwards = [("F", i, c) for i, c in order]
    backwards = [("B", i, chunks - 1 - c) for i, c in order]
    return alternate(forwards, backwards, warm_up=2 * (p - stage - 1) + (chunks - 1) * p)


def zb_h1(p, stage, m, chunks):
    """1F1B with the weight halves put off, into what was bubble: no other stage waits for them
    (Qi et al. 2023). 1F1B has p - stage micro-batches alive; `stage` more makes it p on all."""
    actions = []
    for kind, i, chunk in one_f_one_b(p, stage, m, chunks):
        actions.append((kind, i, chunk))
        if kind == "B" and i >= stage:
            actions.append(("W", i - stage, chunk))
    return actions + [("W", i, 0) for i in range(max(0, m - stage), m)]


def alternate(forwards, backwards, warm_up):
    """Some forwards to warm up, then one forward and one backward in turn, then what is left."""
    warm_up = min(warm_up, len(forwards))
    steady = [action for pair in zip(forwards[warm_up:], backwards) for action in pair]
    return forwards[:warm_up] + steady + backwards[len(backwards) - warm_up :]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1}


def my_actions(args, mesh):
    """Return what this rank does in a step, and which stages it is: one, or one for each chunk."""
    chunks = args.chunks if args.schedule == "interleaved" and args.pp > 1 else 1
    actions = SCHEDULES[args.schedule](args.pp, mesh.pp.rank, args.microbatches, chunks)
    return actions, range(mesh.pp.rank, args.pp * chunks, args.pp)


def layers_of(stage, stages, args):
    """Return the layers of a stage. Where L does not divide, some stages have one more."""
    return range(args.layers * stage // stages, args.layers * (stage + 1) // stages)


# --------------------------------------------------------------------------------------- sharding


def shard_batch(rows_BD, args, mesh):
    """Return this rank's rows: B over dp, in proportion to --batch-shares if there are any."""
    shares = args.batch_shares or [1] * args.dp
    ends = [args.batch_size * sum(shares[:i]) // sum(shares) for i in range(args.dp + 1)]
    return rows_BD[ends[mesh.dp.rank] : ends[mesh.dp.rank + 1]]


def shard_layers(args, mesh):
    """Return the layers that this rank holds: L over pp."""
    _, stages = my_actions(args, mesh)
    return [l for stage in stages for l in layers_of(stage, args.pp * len(stages), args)]


def shard_weights(weights, args, mesh):
    """Return this rank's part of the weights [L, D, 2, F]: L over pp, F over tp."""
    weights = weights[shard_layers(args, mesh)]
    weights = cut(weights, args.tp, dim=3)[mesh.tp.rank]
    return weights.clone()  # a part that is a view would keep the whole alive


def init_state(args, mesh):
    """Return the State this rank keeps between steps."""
    weights = shard_weights(initial_weights(args), args, mesh)
    master = weights
    if args.dtype == "bfloat16":
        weights = weights.bfloat16()
    grads = torch.zeros_like(weights)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    return State(weights, grads, master, exp_avg, exp_avg_sq, shard_layers(args, mesh))


def my_rows(x_BD, axis, args):
    """Return the rows that are valid between two blocks: all, or with --sequence-parallel this
    rank's: B over tp."""
    return cut(x_BD, axis.size)[axis.rank] if args.sequence_parallel else x_BD


def fetch_rows(x_BD, axis, args):
    """Make all rows valid, for a block needs them all."""
    if args.sequence_parallel:
        ring_all_gather(cut(x_BD, axis.size), axis)


def sum_rows(y_BD, axis, args):
    """Turn a block's partial sums over F into full ones, in the rows that are to be valid."""
    if args.sequence_parallel:
        ring_reduce_scatter(cut(y_BD, axis.size), axis)
    else:
        all_reduce(y_BD, axis, args)


def keep_rows(x_BD, axis, args):
    """Return what to save of x: the valid rows."""
    return my_rows(x_BD, axis, args).clone() if args.sequence_parallel else x_BD


def kept_rows(x_BD, like_BD, axis, args):
    """Return x with all its rows again, for the weight half: one more all-gather. It comes after
    dx's sum, which may be under way, on the axis's thread, so neither is hidden: the price of
    keeping only some rows."""
    if not args.sequence_parallel:
        return x_BD
    full_BD = torch.empty_like(like_BD)
    my_rows(full_BD, axis, args).copy_(x_BD)
    start(fetch_rows, full_BD, axis, args)
    join(axis)
    return full_BD


# ------------------------------------------------------------------------------ forward, backward


def forward(state, x_BD, args, mesh):
    """Return y [B, D], and for backward the x [B, D] and h [B, F] of every layer."""
    saved = []
    for weights in state.weights:
        fetch_rows(x_BD, mesh.tp, args)
        y_BD, h_BF = block_forward(x_BD, *weights.unbind(1))
        # subtle: y is summed in place, which is safe only because backward needs x, h and not y.
        sum_rows(y_BD, mesh.tp, args)
        saved.append((keep_rows(x_BD, mesh.tp, args), h_BF))
        x_BD = x_BD + y_BD
    return x_BD, saved


def backward(state, saved, dy_BD, last, args, mesh, later=None):
    """Return dx [B, D], and add the gradients of every layer to state.grads.

    With a list `later`, the weight halves are not done but put there."""
    for l in reversed(range(len(state.weights))):
        x_BD, h_BF = saved.pop()
        fetch_rows(dy_BD, mesh.tp, args)
        dx_BD, dz_BF = block_backward_input(dy_BD, h_BF, *state.weights[l].unbind(1))
        start(sum_rows, dx_BD, mesh.tp, args)  # needed by the next layer, not by the weight half
        if later is None:
            backward_weight(state, l, (x_BD, h_BF, dy_BD, dz_BF), last, args, mesh)
        else:
            later.append((l, (x_BD, h_BF, dy_BD, dz_BF)))
        join(mesh.tp)
        dy_BD = dy_BD + dx_BD
    return dy_BD


def backward_weight(state, l, saved, last, args, mesh):
    """Add layer l's gradients to state.grads[l]; after the last micro-batch's, sum them over dp."""
    x_BD, h_BF, dy_BD, dz_BF = saved
    x_BD = kept_rows(x_BD, dy_BD, mesh.tp, args)
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
    loss = my_rows(diff_BD, mesh.tp, args).double().square().sum() / size
    return loss, diff_BD * (2 / size)


def train_step(state, x_BD, t_BD, step, args, mesh):
    """Train on this rank's rows; return the loss and the gradient norm of the whole batch."""
    state.grads.zero_()
    loss = torch.zeros((), dtype=torch.float64, device=x_BD.device)
    x_of, t_of = x_BD.tensor_split(args.microbatches), t_BD.tensor_split(args.microbatches)
    actions, stages = my_actions(args, mesh)
    last_stage = args.pp * len(stages) - 1
    sizes = [len(layers_of(stage, last_stage + 1, args)) for stage in stages]
    parts = [
        state._replace(weights=weights, grads=grads)
        for weights, grads in zip(state.weights.split(sizes), state.grads.split(sizes))
    ]
    saved, dy_of, later, inbox, sent = {}, {}, {}, {}, []

    def receive_ahead(kind, i, chunk):
        """Post the receive of what this action needs from another stage, if that is yet to do."""
        stage = stages[chunk]
        needed = (kind == "F" and stage > 0) or (kind == "B" and stage < last_stage)
        if needed and (kind, i, chunk) not in inbox:
            tensor = torch.empty_like(x_of[i])
            src = mesh.pp.prev_rank if kind == "F" else mesh.pp.next_rank
            rows = my_rows(tensor, mesh.tp, args)
            inbox[kind, i, chunk] = tensor, irecv(rows, src, mesh.pp, message_tag(kind, i, stage))

    def receive(action):
        tensor, message = inbox.pop(action)
        message.wait()
        return tensor

    def send(tensor, kind, i, stage):
        """Send what action (kind, i) of that stage needs. The messages are kept until all is done:
        together as large as one layer's x and dx of this rank's rows, for each of its chunks."""
        dst = mesh.pp.next_rank if kind == "F" else mesh.pp.prev_rank
        rows = my_rows(tensor, mesh.tp, args)
        sent.append(isend(rows, dst, mesh.pp, message_tag(kind, i, stage)))

    for number, action in enumerate(actions):
        for upcoming in actions[number : number + 2]:  # the next one's input may come as we compute
            receive_ahead(*upcoming)
        kind, i, chunk = action
        stage, part, last = stages[chunk], parts[chunk], i == args.microbatches - 1
        current["note"] = str(i)  # for the picture
        if kind == "F":
            x_mb = x_of[i] if stage == 0 else receive(action)
            y_BD, saved[i, chunk] = forward(part, x_mb, args, mesh)
            if stage < last_stage:
                send(y_BD, "F", i, stage + 1)
            else:
                more_loss, dy_of[i] = loss_and_gradient(y_BD, t_of[i], args, mesh)
                loss += more_loss
        elif kind == "B":
            dy_BD = dy_of.pop(i) if stage == last_stage else receive(action)
            halves = later.setdefault((i, chunk), []) if args.schedule == "zb-h1" else None
            dx_BD = backward(part, saved.pop((i, chunk)), dy_BD, last, args, mesh, halves)
            if stage > 0:
                send(dx_BD, "B", i, stage - 1)
        else:
            for l, half in later.pop((i, chunk)):
                backward_weight(part, l, half, last, args, mesh)
        track_activations(saved, later)
    wait_all(sent)  # no tensor may be freed before it has left
    norm = update(state, step, args, mesh)
    loss = sum_over(loss, mesh.tp) if args.sequence_parallel else loss
    return sum_over(loss, mesh.dp, mesh.pp), norm


def message_tag(kind, i, stage):
    """A number for the message to this action that no other of the step has."""
    return 2 * (i * 1000 + stage) + (kind == "B")


def update(state, step, args, mesh):
    """Update the weights from the gradients, and return the norm of all gradients."""
    join(mesh.dp)
    rows = torch.linalg.vector_norm(state.grads, dim=-1)  # short sums keep float32 exact
    square = rows.double().square().sum()  # squares add up
    square = sum_over(square, mesh.tp)  # over the axes that cut the gradients, and only those
    square = sum_over(square, mesh.pp)
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


def peak_of_saved(actions, x_h, dy_dz):
    """Return the most elements saved for backward at a time, and the most micro-batches alive.

    x_h and dy_dz say, by (micro-batch, chunk), what forward saves and what waits for its W."""
    split = any(kind == "W" for kind, _, _ in actions)
    elements = alive = most_elements = most_alive = 0
    for kind, i, chunk in actions:
        if kind == "F":
            elements, alive = elements + x_h[i, chunk], alive + 1
        elif kind == "B" and split:
            elements += dy_dz[i, chunk]
        else:
            elements, alive = elements - x_h[i, chunk] - split * dy_dz[i, chunk], alive - 1
        most_elements, most_alive = max(most_elements, elements), max(most_alive, alive)
    return most_elements, most_alive


def predict(args, mesh):
    """Return by formula, in elements, what this rank sends per step and axis and what it holds."""
    L, D, F = args.layers, args.d_model, args.d_hidden
    rows = shard_batch(torch.empty(args.batch_size), args, mesh)
    B = [len(x) for x in rows.tensor_split(args.microbatches)]
    F = part_sizes(F, mesh.tp)[mesh.tp.rank]
    L = len(shard_layers(args, mesh))
    weights = L * D * 2 * F
    costs = {"weights": weights, "gradients": weights, "updated": weights}

    costs["dp"] = L * all_reduce_elements(D * 2 * F, mesh.dp, args)

    costs["tp"] = L * sum(2 * all_reduce_elements(b * D, mesh.tp, args) for b in B)
    between = B  # rows of a micro-batch between two blocks
    if args.sequence_parallel:
        between = [part_sizes(b, mesh.tp)[mesh.tp.rank] for b in B]
        halves = [ring_elements(b, mesh.tp) for b in B]  # one more all-gather, for the weight half
        costs["tp"] = L * D * sum(2 * scattered + 3 * gathered for scattered, gathered in halves)

    m, p, (actions, stages) = args.microbatches, args.pp, my_actions(args, mesh)
    borders = sum((stage > 0) + (stage < p * len(stages) - 1) for stage in stages)
    costs["pp"] = borders * D * sum(between)
    layers = [len(layers_of(stage, p * len(stages), args)) for stage in stages]
    x_h = {(i, c): n * (between[i] * D + B[i] * F) for i in range(m) for c, n in enumerate(layers)}
    dy_dz = {(i, c): n * B[i] * (D + F) for i in range(m) for c, n in enumerate(layers)}
    costs["activations"], costs["microbatches"] = peak_of_saved(actions, x_h, dy_dz)
    # In parts of the compute time; a third as long where a block's F, B and W take as long as each.
    costs["bubble"] = (p - 1) / m / {"interleaved": len(stages), "zb-h1": 3}.get(args.schedule, 1)
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
