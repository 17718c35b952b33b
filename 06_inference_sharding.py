"""Chapter 6: serve the trained model. No gradients, no Adam; what to cut depends on the batch.

Generation is the forward pass again and again: prefill runs a whole batch once, then each decode
step feeds the output back in as the next input. Chapter 5 without its training half does it, in
five layouts, which differ in what stays where it is and what moves:

    layout     weights [L, D, 2, F]    x [B, D]     moves, per block and rank
    batch      on every rank           [B/X, D]     nothing
    1d         [L, D, 2, F/Y]          [B, D]       y: all-reduce of [B, D] over tp
    2d         [L, D/X, 2, F/Y]        [B, D/X]     z: all-reduce of [B, F/Y] over dp, before ReLU;
                                                    y: all-reduce of [B, D/X] over tp
    gathered   [L, D/X, 2, F]          [B/X, D]     weights: all-gather of [D, 2, F] over dp, one
                                                    block ahead
    pipeline   [L/Z, D, 2, F]          micro-batch  x to the next stage, and from the last to the
                                                    first, where it is the next token's input

    costs      1d and 2d move activations, more with every row; gathered moves weights, always as
               many: above B = F rows it moves less than 1d

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 06_inference_sharding.py

Serve what another chapter saved, at whatever layout, with --checkpoint DIR.

What is dropped, and what is new:  git diff --no-index 05_zero_sharding.py 06_inference_sharding.py
Paper:  Pope et al. 2022, "Efficiently Scaling Transformer Inference" (arXiv 2211.05102), section 3
"""

import os
from argparse import Namespace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from common import (
    AXES,
    LAYOUTS,
    State,
    as_dtensors,
    buffers,
    communicates,
    draw_timeline,
    end_if_any,
    import_pyplot,
    initial_weights,
    irecv,
    isend,
    layer_buffers,
    load,
    make_batch,
    make_mesh,
    newest_checkpoint,
    parse_args,
    print0,
    replay_report,
    run,
    save_figure,
    scratch,
    span,
    start_up,
    storage_bytes,
    trace,
    write_json,
)

# Largest relative difference of a row from one device's that rounding explains.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1e-1}

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


# --------------------------------------------------------------------------------------- sharding


def with_layout(layout, args):
    """Return args for one layout. The axis that has the ranks says what is cut: L over pp, F over
    tp, and over dp B, or D, or for gathered both."""
    n = dist.get_world_size()
    axes = {"1d": (1, 1, n), "2d": (1, args.dp, args.tp), "pipeline": (n, 1, 1)}
    pp, dp, tp = axes.get(layout, (1, n, 1))
    return Namespace(
        **vars(args)
        | dict(layout=layout, pp=pp, dp=dp, tp=tp)
        | dict(zero_stage=3 if layout in ("2d", "gathered") else 0)
        | dict(microbatches=args.microbatches if layout == "pipeline" else 1)
    )


def layers_of(stage, stages, args):
    """Return the layers of a stage. Where L does not divide, some stages have one more."""
    return range(args.layers * stage // stages, args.layers * (stage + 1) // stages)


def shard_batch(rows_BD, args, mesh):
    """Return this rank's part of the rows: B over dp, or for 2d D over dp."""
    if args.layout == "2d":
        return cut(rows_BD, args.dp, dim=1)[mesh.dp.rank]
    return rows_BD.tensor_split(args.dp)[mesh.dp.rank]


def shard_layers(args, mesh):
    """Return the layers that this rank holds: L over pp."""
    return list(layers_of(mesh.pp.rank, args.pp, args))


def shard_weights(weights, args, mesh):
    """Return this rank's part of the weights [L, D, 2, F]: L over pp, F over tp, and for 2d and
    gathered, which are cut like chapter 5's stage 3, D over dp."""
    weights = weights[shard_layers(args, mesh)]
    weights = cut(weights, args.tp, dim=3)[mesh.tp.rank]
    if args.zero_stage == 3:
        weights = my_part_of_D(weights, mesh)
    return weights.clone()  # a part that is a view would keep the whole alive


def my_part_of_D(weights, mesh):
    """Return this rank's rows of D of the weights [L, D, 2, F]: D over dp."""
    return cut(weights, mesh.dp.size, dim=1)[mesh.dp.rank]


def init_state(args, mesh):
    """Return a State that has weights and nothing else: those of the checkpoint, if there is one.

    The DTensors say which part of the saved tensors this rank wants, however they were cut."""
    weights = shard_weights(initial_weights(args), args, mesh)
    state = State(None, None, weights, None, None, shard_layers(args, mesh))
    if args.checkpoint:
        parts = as_dtensors({"": weights}, state.layers, args.zero_stage == 3, args, mesh)
        load(parts, newest_checkpoint(args.checkpoint), args)
    return state._replace(weights=weights.to(getattr(torch, args.dtype)), master=None)


def gather(mine, full, axis, args):
    """Bring a layer's weights [D, 2, F] together: mine are this rank's rows of D."""
    chunks = cut(full, axis.size)
    chunks[axis.rank].copy_(mine)
    ring_all_gather(chunks, axis)


def full_weights(layers, state, args, mesh):
    """Yield (l, weights [D, 2, F]) of one layer after the other. With layout gathered each is
    fetched while the one before is in use: never more than two layers are whole."""
    if args.layout != "gathered":
        yield from ((l, state.weights[l]) for l in layers)
        return
    coming = [start_gather(l, state, args, mesh) for l in layers[:1]]
    for l, next_l in zip(layers, [*layers[1:], None]):
        full, task = coming.pop()
        wait(task)
        if next_l is not None:
            coming.append(start_gather(next_l, state, args, mesh))
        yield l, full


def start_gather(l, state, args, mesh):
    full = layer_buffer(f"weights {l % 2}", state, args)
    return full, start(gather, state.weights[l], full, mesh.dp, args)


def layer_buffer(name, state, args):
    return scratch(f"layer's {name}", (args.d_model, *state.weights.shape[2:]), state.weights)


# ---------------------------------------------------------------------------- forward, generation


def forward(state, x_BD, args, mesh):
    """Return y [B, D]. Nothing is kept for backward."""
    for _, weights in full_weights(range(len(state.weights)), state, args, mesh):
        w_in_DF, w_out_DF = weights.unbind(1)
        with span("forward", flops=2 * len(x_BD) * w_in_DF.numel()):
            z_BF = x_BD @ w_in_DF
        if args.layout == "2d":
            # Partial over D. The ReLU of a sum is not the sum of the ReLUs, so this can't be left
            # to the second all-reduce.
            ring_all_reduce(z_BF, mesh.dp)
        with span("forward", flops=2 * len(x_BD) * w_in_DF.numel()):
            y_BD = z_BF.relu_() @ w_out_DF.T
        ring_all_reduce(y_BD, mesh.tp)  # partial over F
        x_BD = x_BD + y_BD
    return x_BD


def generate(state, x_BD, args, mesh):
    """Return {(token, micro-batch): y [B, D] of this rank's layers} and when each token was done.
    Token 0 is prefill's; each is the input of the next one.

    In a pipeline a micro-batch goes round the stages as in a ring. Every stage takes tokens, and in
    a token micro-batches, in the same order, so what one waits for never waits for it; with no
    fewer micro-batches than stages each stage has one to work on while the others go round."""
    p, stage, m = args.pp, mesh.pp.rank, args.microbatches
    x_of = list(x_BD.tensor_split(m))
    actions = [(token, i) for token in range(args.tokens + 1) for i in range(m)]
    outputs, sent, done = {}, {}, [perf_counter()]

    def receive_ahead(token, i):
        """Post the receive of an action's input, if another stage has it."""
        if p == 1 or (stage == 0 and token == 0):
            return None
        x_of[i] = torch.empty_like(x_of[i])
        return irecv(x_of[i], mesh.pp.prev_rank, mesh.pp)

    coming = [receive_ahead(*action) for action in actions[:1]]
    for (token, i), next_action in zip(actions, [*actions[1:], None]):
        message, x_mb = coming.pop(), x_of[i]
        if message is not None:
            message.wait()
        if next_action is not None:  # its input may come as we compute
            coming.append(receive_ahead(*next_action))
        outputs[token, i] = forward(state, x_mb, args, mesh)
        if p == 1:
            x_of[i] = outputs[token, i]
        elif stage < p - 1 or token < args.tokens:
            if i in sent:
                sent.pop(i).wait()  # it has been round since, so it left long ago
            sent[i] = isend(outputs[token, i], mesh.pp.next_rank, mesh.pp)
        if i == m - 1:
            if args.device == "cuda":
                torch.cuda.synchronize()
            done.append(perf_counter())
    wait_all(sent.values())
    join(mesh.dp)
    return outputs, done


# ------------------------------------------------------------------------------------------ costs


def part_sizes(size, axis):
    return [len(part) for part in cut(torch.empty(size, device="meta"), axis.size)]


def ring_elements(size, axis):
    """Return the elements a rank sends in reduce-scatter and in all-gather: all chunks but its own,
    and all but its next neighbour's. Where n divides the size, both are (n-1)/n of it."""
    sizes = part_sizes(size, axis)
    return size - sizes[axis.rank], size - sizes[(axis.rank + 1) % axis.size]


def predict(x_BD, args, mesh):
    """Return by formula, in elements, what this rank sends per axis to generate from the rows x, of
    which it has a part, and what it holds of the weights."""
    (B, D), L = shard_batch(x_BD, args, mesh).shape, len(shard_layers(args, mesh))
    forwards = args.tokens + 1
    F = part_sizes(args.d_hidden, mesh.tp)[mesh.tp.rank]
    costs = {"dp": 0, "tp": forwards * L * sum(ring_elements(B * D, mesh.tp))}
    costs["pp"] = B * D * (forwards - (mesh.pp.rank == args.pp - 1)) if args.pp > 1 else 0
    if args.layout == "2d":
        costs["dp"] = forwards * L * sum(ring_elements(B * F, mesh.dp))
    weights = L * D * 2 * F
    if args.layout == "gathered":
        costs["dp"] = forwards * L * 2 * F * ring_elements(D, mesh.dp)[1]
        weights = L * 2 * F * part_sizes(D, mesh.dp)[mesh.dp.rank] + min(L, 2) * D * 2 * F
    return costs | {"weights": weights}


def cost_model(layout, B, L, D, F, X, Y, beta=float("inf")):
    """Return the cost of a token per layer, in the time it takes to send an element: what a rank
    sends, and what it reads of the weights, where memory is beta times as fast as the link.

    Left out are computing, since all layouts compute the same, and the latency of a message. (Pope
    et al. also leave out the factors (n-1)/n, which are near one for many ranks.)"""
    n = X * Y
    sent = {
        "batch": 0,
        "1d": 2 * (n - 1) / n * B * D,
        "2d": 2 * B * ((X - 1) / X * F / Y + (Y - 1) / Y * D / X),
        "gathered": 2 * (n - 1) / n * D * F,
        "pipeline": max(B, n) * D / L,
    }
    read = 2 * D * F / (n if layout in ("1d", "2d") else 1)
    return sent[layout] + read / beta


BETA = 8  # bytes/s of memory over bytes/s of the link: about what the scaling book has for TPUs


# -------------------------------------------------------------------------- the check, the report


def reference_outputs(x_BD, args):
    """Return [T + 1, L + 1, B, D], for each token its input and what each layer makes of it: the
    same generation on one device, from a plain load, with nothing cut and nothing sent."""
    weights, outputs = initial_weights(args), []
    if args.checkpoint:
        names = [(l, i, n) for l in range(args.layers) for i, n in enumerate(("w_in", "w_out"))]
        saved = {f"layers.{l}.{name}": weights[l, :, i] for l, i, name in names}
        load(saved, newest_checkpoint(args.checkpoint), args)
    weights = weights.to(x_BD.dtype)
    for _ in range(args.tokens + 1):
        after = [x_BD]
        for layer in weights:
            w_in_DF, w_out_DF = layer.unbind(1)
            after.append(after[-1] + torch.relu(after[-1] @ w_in_DF) @ w_out_DF.T)
        outputs.append(torch.stack(after))
        x_BD = after[-1]
    return torch.stack(outputs)


def largest_error(outputs, expected, args, mesh):
    """Return the largest difference of this rank's outputs from one device's, as part of a row."""
    layer, errors = layers_of(mesh.pp.rank, args.pp, args).stop, [0.0]
    for token, wanted_BD in enumerate(expected[:, layer].double()):
        ours_BD = torch.cat([outputs[token, i] for i in range(args.microbatches)])
        size_BD = wanted_BD.norm(dim=1, keepdim=True).expand_as(wanted_BD)
        wanted_BD, size_BD = (shard_batch(rows_BD, args, mesh) for rows_BD in (wanted_BD, size_BD))
        error_B = ((ours_BD - wanted_BD) / size_BD).norm(dim=1)
        errors += error_B.nan_to_num(nan=torch.inf).tolist()
    return max(errors)


def timed_generation(state, x_BD, expected, args, mesh):
    """Generate from these rows; return what it cost this rank, and what it should have."""
    dist.barrier()
    trace.clear()
    began = perf_counter()
    expected = None if expected is None else expected[:, :, : len(x_BD)]
    outputs, done = generate(state, shard_batch(x_BD, args, mesh), args, mesh)
    seconds = [end - start for start, end in zip(done, done[1:])]
    predicted = {what: n * state.weights.itemsize for what, n in predict(x_BD, args, mesh).items()}
    spans = [s._replace(start=s.start - began, end=s.end - began) for s in trace]
    return {
        "trace": spans if len(x_BD) == args.batch_size else [],
        "prefill_seconds": seconds[0],
        "prefill_end": done[1] - began,
        "token_seconds": median(seconds[1:]),
        "elements": sum(y_BD.numel() for y_BD in outputs.values()),
        "error": 0.0 if expected is None else largest_error(outputs, expected, args, mesh),
        "bytes_sent": {axis: sum(s.bytes for s in trace if s.axis == axis) for axis in AXES},
        "bytes_predicted": {axis: predicted[axis] for axis in AXES},
        "memory_bytes": storage_bytes(state.weights, *layer_buffers()),
        "memory_predicted": predicted["weights"],
    }


def serve(layout, x_BD, expected, args):
    """Generate in one layout, from 1 row, from 4, from 16, … and from all. Return of each a dict:
    times of the slowest rank, and of what is not a time, a list with every rank's."""
    args, runs = with_layout(layout, args), []
    mesh = make_mesh(args)
    buffers.clear()
    state = init_state(args, mesh)
    for rows in batch_sizes(args):
        mine = timed_generation(state, x_BD[:rows], expected, args, mesh)
        every_rank = [None] * dist.get_world_size()
        dist.all_gather_object(every_rank, mine)
        costs = {key: [theirs[key] for theirs in every_rank] for key in mine}
        costs |= {key: max(costs[key]) for key in ("prefill_seconds", "token_seconds")}
        complaints = [] if args.no_check else complaints_about(costs, rows, args)
        costs |= {"rows": rows, "rows_per_second": rows / costs["token_seconds"]}
        costs["check"] = {"max_rel_diff": max(costs["error"]), "complaints": complaints}
        runs.append(costs)
    return runs


def batch_sizes(args):
    return [*(4**i for i in range(20) if 4**i < args.batch_size), args.batch_size]


def complaints_about(costs, rows, args):
    """Return a line for each thing that is not as it should be, of wrong outputs the worst."""
    lines, error, limit = [], max(costs["error"]), TOLERANCE[args.dtype]
    if sum(costs["elements"]) != rows * args.d_model * args.tp * args.pp * (args.tokens + 1):
        lines.append("the ranks together did not generate all rows")
    if error > limit:
        rank = costs["error"].index(error)
        lines.append(f"rank {rank} is {error:.1e} off one device, more than {limit:.0e}")
    for rank, (sent, expected) in enumerate(zip(costs["bytes_sent"], costs["bytes_predicted"])):
        for axis in AXES:
            if sent[axis] != expected[axis]:
                wrong = f"{sent[axis]:,} B over {axis}, not {expected[axis]:,}"
                lines.append(f"rank {rank} sent {wrong}")
    for rank, (held, expected) in enumerate(zip(costs["memory_bytes"], costs["memory_predicted"])):
        if held != expected:
            lines.append(f"rank {rank} held {held:,} B of weights, not {expected:,}")
    return [f"{args.layout}, {rows} rows: {line}" for line in lines]


def report_layout(layout, costs, args):
    """Print a layout's line: times of the slowest rank, bytes of rank 0 per token."""
    args = with_layout(layout, args)
    sent, expected = (
        sum(costs[key][0].values()) // (args.tokens + 1)
        for key in ("bytes_sent", "bytes_predicted")
    )
    print0(
        f"{layout:9}{f'{args.pp}x{args.dp}x{args.tp}':>6}{1e3 * costs['prefill_seconds']:9.2f}"
        f"{1e3 * costs['token_seconds']:9.2f}{costs['rows_per_second']:9,.0f}"
        f"{sent:11,}{f'({expected:,})':>13}{costs['memory_bytes'][0]:12,}"
    )


def report_batches(results, args):
    """Print how long a token takes for few rows and for many, and what the model would choose."""
    model = args.layers, args.d_model, args.d_hidden, args.dp, args.tp
    print0("\nms per token; which layout was the fastest, and which the cost model chooses")
    print0(f"{'rows':>6}" + "".join(f"{layout:>9}" for layout in LAYOUTS) + "  fastest   model")
    for every_layout in zip(*results.values()):
        rows, took = every_layout[0]["rows"], [costs["token_seconds"] for costs in every_layout]
        cheapest = min(LAYOUTS, key=lambda layout: cost_model(layout, rows, *model, BETA))
        fastest = LAYOUTS[took.index(min(took))]
        times = "".join(f"{1e3 * seconds:9.2f}" for seconds in took)
        print0(f"{rows:6}{times}  {fastest:9} {cheapest}")
    for layout in ("1d", "2d") if args.dp * args.tp > 1 else ():
        rows = cost_model("gathered", 1, *model) / cost_model(layout, 1, *model)
        pairs = zip(results["gathered"], results[layout])
        faster = [str(a["rows"]) for a, b in pairs if a["token_seconds"] < b["token_seconds"]]
        print0(
            f"gathered sends less than {layout} above {rows:.0f} rows;"
            f" faster at {', '.join(faster) or 'none'}"
        )


def report_replay(results, args):
    """Print what --replay says of each layout, for prefill and all tokens of the largest batch.
    Return {layout: its numbers}."""
    replayed = {}
    for layout, runs in results.items():
        seconds = runs[-1]["prefill_seconds"] + args.tokens * runs[-1]["token_seconds"]
        lines, replayed[layout], _ = replay_report(
            runs[-1]["trace"], seconds, with_layout(layout, args)
        )
        print0("\n".join([layout, *lines]))
    return replayed


def write_metrics(results, complaints, replayed, args):
    """Write --metrics: one JSON object. Bytes are of a whole generation: prefill and T tokens."""
    if not args.metrics:
        return
    layouts = {}
    for layout, runs in results.items():
        axes = {axis: getattr(with_layout(layout, args), axis) for axis in AXES}
        *batches, largest = [
            {key: value for key, value in costs.items() if key != "trace"} for costs in runs
        ]
        layouts[layout] = {"axes": axes, **largest, "batches": batches}
        layouts[layout] |= {"replay": replayed[layout]} if replayed else {}
    result = {
        "script": args.script,
        "config": {key: value for key, value in vars(args).items() if key != "script"},
        "axes": {axis: getattr(args, axis) for axis in AXES},
        "layouts": layouts,
        "check": {"passed": None if args.no_check else not complaints},
    }
    write_json(args.metrics, result)


COLOURS = dict(zip(LAYOUTS, ("#3b7dd8", "#e08a1e", "#8e5bc0", "#c0392b", "#2f9e5b")))


def prefill(costs):
    """Return rank 0's spans of prefill alone."""
    return [s for s in costs["trace"][0] if s.end <= costs["prefill_end"][0]]


def draw(results, args):
    """Draw --plot: latency against throughput, a line per layout, a point per number of rows; and
    below what rank 0 does in the prefill of the largest batch."""
    pyplot = import_pyplot() if args.plot != "none" else None
    if pyplot is None:
        return
    figure, (axes, timeline) = pyplot.subplots(2, 1, figsize=(9, 9), height_ratios=[2, 1])
    draw_timeline(timeline, {layout: prefill(runs[-1]) for layout, runs in results.items()})
    for layout, runs in results.items():
        points = [(1e3 * costs["token_seconds"], costs["rows_per_second"]) for costs in runs]
        axes.loglog(*zip(*points), "o-", color=COLOURS[layout], lw=2, label=layout)
        for costs, point in (runs[0], points[0]), (runs[-1], points[-1]):
            place = {"xytext": (6, -12), "textcoords": "offset points"}
            axes.annotate(costs["rows"], point, color=COLOURS[layout], fontsize=11, **place)
    axes.set_xlabel("ms per token", fontsize=12)
    axes.set_ylabel("rows per second", fontsize=12)
    axes.legend(frameon=False, fontsize=12)
    axes.grid(alpha=0.3)
    axes.margins(0.08)
    title = f"{args.script}: latency against throughput, {dist.get_world_size()} ranks"
    axes.set_title(f"{title}\na point for each batch of {batch_sizes(args)} rows", fontsize=12)
    save_figure(figure, args.plot)


def main():
    args = parse_args(__file__, __doc__)
    start_up(args)
    sizes = f"L {args.layers} D {args.d_model} F {args.d_hidden} B {args.batch_size}"
    weights = newest_checkpoint(args.checkpoint) if args.checkpoint else "random weights"
    print0(f"{args.script}   ranks {dist.get_world_size()} | {sizes} | {args.dtype} {args.device}")
    if "RANK" not in os.environ:
        print0(f"more ranks:  torchrun --standalone --nproc-per-node 4 {args.script}.py")
    print0(f"{args.tokens} tokens with {weights}")
    print0("layout   ZxXxY  prefill ms/token   rows/s B sent/token  (predicted)   B weights")
    x_BD, _ = make_batch(args, 1_000_000)  # a step that no training gets to
    expected = None if args.no_check else reference_outputs(x_BD, args)
    results = {}
    for layout in LAYOUTS if args.layout == "all" else [args.layout]:
        results[layout] = serve(layout, x_BD, expected, args)
        report_layout(layout, results[layout][-1], args)
    runs = sum(results.values(), [])
    complaints = [line for costs in runs for line in costs["check"]["complaints"]]
    if args.layout == "all":
        report_batches(results, args)
    if not args.no_check and not complaints:
        error = max(costs["check"]["max_rel_diff"] for costs in runs)
        print0(f"same as one device: all tokens, layouts and batches within {error:.0e}   OK")
    replayed = report_replay(results, args) if args.replay and dist.get_rank() == 0 else {}
    for line in complaints[:9]:  # the rest is in --metrics
        print0(f"FAILED: {line}")
    problem = None
    if dist.get_rank() == 0:
        try:
            write_metrics(results, complaints, replayed, args)
            draw(results, args)
        except OSError as error:
            problem = f"cannot write {args.metrics or ''} {args.plot}: {error}"
    end_if_any(problem, args)
    dist.barrier()  # without it the first to leave may tear the connection from under the last
    dist.destroy_process_group()
    return 1 if complaints else 0


if __name__ == "__main__":
    run(main)
