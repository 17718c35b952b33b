"""Times the scripts' own training step against the library's way of doing the same work.

    python tests/bench_wrappers.py 01
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_wrappers.py 02 05
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_wrappers.py 05 --memory

The same MLP, initial weights, batches, clipping and Adam on both sides, in one process group, step
by step in turn. Before anything is timed, both must give the same losses and gradient norms for the
first steps, in float64 too. A time is that of the slowest rank. On a link of 1 Gbit/s for each of
two ranks:

    unshare -n bash -c 'ip link set lo up
        tc qdisc add dev lo root tbf rate 2gbit burst 256kb latency 50ms
        OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_wrappers.py rings \\
            --rate 1'
"""

import argparse
import gc
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Adam

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import prepare  # noqa: E402

import common  # noqa: E402

CHECKED = 3  # steps that must agree before the race, and are its warm-up
# Largest relative difference of losses and of gradient norms. In float32 the library adds up the
# squares of a norm in float32, ours in float64: that alone is 1e-5. In float64 nothing can hide.
TOLERANCE = {"float32": (1e-5, 1e-4), "float64": (1e-10, 1e-10)}
SIZES = "layers", "d_model", "d_hidden", "batch_size", "dtype", "lr"


class Row(NamedTuple):
    """A line of the table. `ours` and `theirs` are functions of the options that return a step:
    a function of what `inputs` returns, which returns what must be the same on both sides."""

    name: str
    ours: callable
    theirs: callable
    inputs: callable  # of the options and the step's number; not timed
    many: int = 1  # times as many repetitions, for what is quick
    sent: float = 0  # bytes that every rank must send at the least: for --rate


# ------------------------------------------------------------------------------------------- ours


def ours(chapter, flags, o):
    """The step of a chapter's script, as its main would have it."""
    script, args, mesh = chapter_of(chapter, flags, o)
    state, numbers = script.init_state(args, mesh), itertools.count()

    def step(x_BD, t_BD):
        batch = [script.shard_batch(rows_BD, args, mesh) for rows_BD in (x_BD, t_BD)]
        return script.train_step(state, *batch, next(numbers), args, mesh)

    return step


def chapter_of(chapter, flags, o):
    """Return (script, args, mesh) of a chapter for the sizes in the options."""
    flags += "".join(f" --{name.replace('_', '-')} {getattr(o, name)}" for name in SIZES)
    return prepare(chapter, flags)


def batch(o, step):
    """Return the x and t [B, D] of a step: all rows, of which each side takes its own."""
    _, args, _ = chapter_of(2, "", o)
    return common.make_batch(args, step)


# ----------------------------------------------------------------------------------------- theirs


class Block(nn.Module):
    """y = x + relu(x @ w_in) @ w_out.T, of two Linear layers with the given weights [D, 2, F]."""

    def __init__(self, weights):
        super().__init__()
        D, _, F = weights.shape
        self.w_in = nn.Linear(D, F, bias=False, device="meta")
        self.w_out = nn.Linear(F, D, bias=False, device="meta")
        packed = {"memory_format": torch.contiguous_format}
        # Linear stores [out, in]. Copies, since a view would keep all layers' weights alive.
        self.w_in.weight = nn.Parameter(weights[:, 0].T.clone(**packed))
        self.w_out.weight = nn.Parameter(weights[:, 1].clone(**packed))

    def forward(self, x_BD):
        return x_BD + self.w_out(self.w_in(x_BD).relu())


def initial_blocks(o, layers=None):
    """Return the blocks of these layers, or of all, with the scripts' initial weights."""
    _, args, _ = chapter_of(2, "", o)
    weights = common.initial_weights(args)
    return nn.Sequential(*(Block(weights[l]) for l in layers or range(o.layers)))


def adam(parameters, o):
    _, args, _ = chapter_of(2, "", o)
    return Adam(parameters, args.lr, common.ADAM_BETAS, common.ADAM_EPS, fused=o.fused)


def plain_step(model, optimizer, o, clip=clip_grad_norm_, loss_of=None):
    """The training loop of every tutorial. The wrappers average gradients over the ranks, so each
    takes the mean of its own rows, which are equally many."""
    _, args, _ = chapter_of(2, "", o)
    loss_of = loss_of or (lambda x_BD, t_BD: mse_loss(model(x_BD), t_BD))
    size = dist.get_world_size()

    def step(x_BD, t_BD):
        x_BD, t_BD = (rows_BD.chunk(size)[dist.get_rank()] for rows_BD in (x_BD, t_BD))
        optimizer.zero_grad()
        loss = loss_of(x_BD, t_BD)
        loss.backward()
        norm = clip(model.parameters(), args.clip_norm)
        optimizer.step()
        loss = loss.detach()
        if size > 1:
            dist.all_reduce(loss)  # ours returns the whole batch's too
        return loss / size, norm

    return step


def autograd(o):
    model = initial_blocks(o)
    return plain_step(model, adam(model.parameters(), o), o)


def compiled(o):
    model = initial_blocks(o)
    loss_of = torch.compile(lambda x_BD, t_BD: mse_loss(model(x_BD), t_BD))
    return plain_step(model, adam(model.parameters(), o), o, loss_of=loss_of)


def data_parallel(bucket_mb, o):
    model = initial_blocks(o)
    model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    return plain_step(model, adam(model.parameters(), o), o)


def zero_redundancy(o, **how):
    """DDP sums the gradients, ZeroRedundancyOptimizer cuts Adam's state by whole parameters."""
    _, args, _ = chapter_of(2, "", o)
    model = DistributedDataParallel(initial_blocks(o), gradient_as_bucket_view=True)
    settings = dict(lr=args.lr, betas=common.ADAM_BETAS, eps=common.ADAM_EPS, fused=o.fused)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, **how, **settings)
    return plain_step(model, optimizer, o)


def clip_dtensors(parameters, max_norm):
    """clip_grad_norm_ where each rank has a part of every gradient. By itself it would leave the
    norm as parts, which every multiplication by it sums again."""
    parameters = list(parameters)
    norm = get_total_norm([parameter.grad for parameter in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def fully_sharded(reshard, o):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = initial_blocks(o)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adam(model.parameters(), o), o, clip_dtensors)


def tensor_parallel(o):
    _, args, _ = chapter_of(2, "", o)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = initial_blocks(o)
    for block in model:
        parallelize_module(block, mesh, {"w_in": ColwiseParallel(), "w_out": RowwiseParallel()})
    optimizer = adam(model.parameters(), o)

    def step(x_BD, t_BD):
        optimizer.zero_grad()
        loss = mse_loss(model(x_BD), t_BD)
        loss.backward()
        norm = clip_dtensors(model.parameters(), args.clip_norm)
        optimizer.step()
        return loss.detach(), norm

    return step


def pipeline(schedule, stages_of, o):
    """stages_of(p, rank) says which thin stages a rank holds: one or two."""
    _, args, _ = chapter_of(2, "", o)
    p, rank = dist.get_world_size(), dist.get_rank()
    mine = stages_of(p, rank)
    last = p * len(mine) - 1
    cuts = [o.layers * i // (last + 1) for i in range(last + 2)]
    models = [initial_blocks(o, range(cuts[i], cuts[i + 1])) for i in mine]
    stages = [
        PipelineStage(model, i, last + 1, torch.device("cpu")) for i, model in zip(mine, models)
    ]
    # Each micro-batch's loss is a mean, and the schedule divides the gradients by their number.
    runner = schedule(stages if len(stages) > 1 else stages[0], o.microbatches, mse_loss)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = adam(parameters, o)

    def step(x_BD, t_BD):
        optimizer.zero_grad()
        losses = []
        given = [x_BD] if 0 in mine else []
        wanted = dict(target=t_BD, losses=losses) if last in mine else {}
        runner.step(*given, **wanted, return_outputs=False)
        norm = get_total_norm([parameter.grad for parameter in parameters])
        # The losses are on the last stage, and each rank has its layers' gradients: sum both.
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=x_BD.dtype)
        sums = torch.stack([loss, norm.square()])
        dist.all_reduce(sums)
        norm = sums[1].sqrt()
        clip_grads_with_norm_(parameters, args.clip_norm, norm)
        optimizer.step()
        return sums[0], norm

    return step


def one_stage(p, rank):
    return [rank]


def loop(p, rank):
    return [rank, rank + p]


def v_shape(p, rank):
    return [rank, 2 * p - 1 - rank]


# ------------------------------------------------------------------------------- Adam, collectives


def our_adam(o):
    _, args, _ = chapter_of(1, "", o)
    # From zero, so that the weights are nothing but the updates.
    weights = torch.zeros_like(common.initial_weights(args))
    moments = torch.zeros_like(weights), torch.zeros_like(weights)
    grads, numbers = adam_gradients(o), itertools.count()
    state = common.State(weights, grads, weights, *moments, range(o.layers))

    def step():
        common.adam_update(state, grads, 1.0, next(numbers), args)
        return (weights.view(-1)[::997],)

    return step


def their_adam(o, **how):
    _, args, _ = chapter_of(1, "", o)
    grads = adam_gradients(o)
    weights = torch.zeros_like(grads)
    parameters = [nn.Parameter(w) for w in weights]  # views of one tensor, one for each layer
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    optimizer = Adam(parameters, args.lr, common.ADAM_BETAS, common.ADAM_EPS, **how)

    def step():
        optimizer.step()
        return (weights.view(-1)[::997],)

    return step


def adam_gradients(o):
    _, args, _ = chapter_of(1, "", o)
    return common.initial_weights(args)  # as good as any


def nothing(o, step):
    return ()


def our_ring(name, o):
    script, args, mesh = chapter_of(5, "", o)
    axis = mesh.dp

    def step(tensor):
        if name == "all_reduce":
            script.ring_all_reduce(tensor, axis)
            return (tensor,)
        chunks = script.cut(tensor, axis.size)
        if name == "reduce_scatter":
            script.ring_reduce_scatter(chunks, axis)
            return (chunks[axis.rank],)
        script.ring_all_gather(chunks, axis)
        return (tensor,)

    return step


def their_collective(name, mb, o):
    size, rank = dist.get_world_size(), dist.get_rank()
    part = numbers_to_send(mb, o, 0)[0].chunk(size)[rank].clone()

    def step(tensor):
        if name == "all_reduce":
            dist.all_reduce(tensor)
            return (tensor,)
        if name == "reduce_scatter":
            dist.reduce_scatter_tensor(part, tensor)
            return (part,)
        dist.all_gather_into_tensor(tensor, tensor.chunk(size)[rank])
        return (tensor,)

    return step


def numbers_to_send(mb, o, step):
    """Return a tensor of so many MB, with numbers that differ from rank to rank."""
    size = dist.get_world_size()
    dtype = getattr(torch, o.dtype)
    elements = mb * 2**20 // dtype.itemsize // size * size
    return (torch.arange(elements, dtype=dtype).sin_().add_(dist.get_rank()),)


# -------------------------------------------------------------------------------------- the table


def rows_01(o):
    return [
        Row("01 autograd", partial(ours, 1, ""), autograd, batch),
        Row("01 the same, torch.compile", partial(ours, 1, ""), compiled, batch),
        Row("Adam alone: default", our_adam, their_adam, nothing),
        Row("Adam alone: foreach", our_adam, partial(their_adam, foreach=True), nothing),
        Row("Adam alone: fused", our_adam, partial(their_adam, fused=True), nothing),
    ]


def rows_02(o):
    layer = o.d_model * 2 * o.d_hidden * (8 if o.dtype == "float64" else 4) / 2**20
    buckets = {"25 MB buckets (default)": 25, "1 MB": 1, "4 MB": 4, "one layer": layer}
    buckets["all layers"] = layer * o.layers
    return [
        Row(f"02 DDP, {name}", partial(ours, 2, ""), partial(data_parallel, mb), batch)
        for name, mb in buckets.items()
    ]


def rows_03(o):
    return [Row("03 DTensor, col- and rowwise", partial(ours, 3, ""), tensor_parallel, batch)]


def rows_04(o):
    def our(schedule):
        return partial(ours, 4, f"--schedule {schedule} --microbatches {o.microbatches}")

    def their(schedule, stages_of=one_stage):
        return partial(pipeline, schedule, stages_of)

    rows = [
        ("GPipe", "gpipe", their(ScheduleGPipe)),
        ("1F1B", "1f1b", their(Schedule1F1B)),
        ("Interleaved1F1B", "interleaved", their(ScheduleInterleaved1F1B, loop)),
        ("InterleavedZeroBubble", "zb-h1", their(ScheduleInterleavedZeroBubble, loop)),
        ("ZBVZeroBubble", "zb-h1", their(ScheduleZBVZeroBubble, v_shape)),
        ("our 1f1b", "zb-h1", our("1f1b")),
    ]
    return [
        Row(f"04 {schedule} / {name}", our(schedule), theirs, batch)
        for name, schedule, theirs in rows
    ]


def rows_05(o):
    def stage(n):
        return partial(ours, 5, f"--zero-stage {n}")

    as_views = partial(zero_redundancy, parameters_as_bucket_view=True)
    return [
        Row("05 stage 1 / ZeroRedundancyOpt.", stage(1), zero_redundancy, batch),
        Row("05 stage 1 / with bucket view", stage(1), as_views, batch),
        Row("05 stage 2 / FSDP2, no reshard", stage(2), partial(fully_sharded, False), batch),
        Row("05 stage 3 / FSDP2", stage(3), partial(fully_sharded, True), batch),
    ]


def rows_rings(o):
    n = dist.get_world_size()
    rows = []
    for name, rounds in ("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1):
        for mb, many in (1, 10), (8, 4), (64, 1):
            both = partial(our_ring, name), partial(their_collective, name, mb)
            inputs = partial(numbers_to_send, mb)
            sent = rounds * (n - 1) / n * mb * 2**20
            rows.append(Row(f"{name} {mb} MB", *both, inputs, many, sent))
    return rows


CASES = {
    "01": rows_01,
    "02": rows_02,
    "03": rows_03,
    "04": rows_04,
    "05": rows_05,
    "rings": rows_rings,
}


# --------------------------------------------------------------------------------------- the race


def largest_of_all(number):
    """Return the largest that any rank has."""
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def difference(row, sides, o):
    """Run both sides from the start; return a line if on any rank they don't do the same."""
    largest = [0.0, 0.0]
    for number in range(CHECKED):
        results = [side(*row.inputs(o, number)) for side in sides]
        common.trace.clear()
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            a, b = (torch.as_tensor(value).detach().double() for value in (a, b))
            relative = ((a - b).norm() / b.norm()).nan_to_num(nan=torch.inf).item()
            largest[i] = max(largest[i], relative)
    largest = [largest_of_all(relative) for relative in largest]
    if any(relative > limit for relative, limit in zip(largest, TOLERANCE[o.dtype])):
        found = " and ".join(f"{relative:.1e}" for relative in largest)
        return f"NOT TIMED: {o.dtype} differs by {found}"


def race(row, sides, o):
    """Return [(seconds of the first side, of the second)], a pair for each repetition."""
    pairs = []
    for repetition in range(o.repetitions * row.many):
        took = {}
        # What ran before may have left the cores slow or the caches warm: in turn.
        for side in (0, 1) if repetition % 2 else (1, 0):
            inputs = row.inputs(o, CHECKED + repetition)
            dist.barrier()
            start = perf_counter()
            sides[side](*inputs)
            took[side] = largest_of_all(perf_counter() - start)
            common.trace.clear()
        pairs.append((took[0], took[1]))
    return pairs


def compare(row, o):
    """Check that both sides do the same; time them in turn and print the row."""
    for dtype in "float64", o.dtype:
        sides = None  # before there are others: room for one pair is enough
        common.buffers.clear()
        exact = argparse.Namespace(**vars(o) | {"dtype": dtype})
        try:
            sides = row.ours(exact), row.theirs(exact)
            problem = difference(row, sides, exact)
        except torch._dynamo.exc.TorchDynamoException as error:  # on one rank: nobody waits for us
            problem = f"does not run: {str(error).splitlines()[0]}"
        if problem:
            return common.print0(f"{row.name:33} {problem}"[:80])
    pairs = race(row, sides, o)
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs))
    low, _, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    line = f"{row.name:33}{1e3 * ours_s:8.1f} {1e3 * theirs_s:8.1f}   {ours_s / theirs_s:5.2f}"
    line += f"  {low:.2f}-{high:.2f}"
    if o.rate and row.sent:
        bound = row.sent / (o.rate * 1e9 / 8)
        line += f"  {bound / ours_s:.3f}"
    common.print0(line)


# ----------------------------------------------------------------------------------------- memory


def compare_memory(case, index, row, o):
    """Print the peak bytes in tensors and the peak resident bytes of both sides, the largest of any
    rank's. Each number has processes of its own: nothing that ran before can be in it."""
    peaks = [
        largest_of_all(in_new_process(case, index, side, measure, o))
        for measure in ("tensors", "resident")
        for side in ("ours", "theirs")
    ]
    ours_t, theirs_t, ours_r, theirs_r = (peak / 2**20 for peak in peaks)
    common.print0(
        f"{row.name:33}{ours_t:7.0f} {theirs_t:7.0f} {ours_t / theirs_t:5.2f}"
        f"  {ours_r:7.0f} {theirs_r:7.0f} {ours_r / theirs_r:5.2f}"
    )


def in_new_process(case, index, side, measure, o):
    """Every rank calls this: their new processes form a group of their own."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = sender, folder[0], case, index, side, measure, o
    child = context.Process(target=measure_memory, args=arguments)
    child.start()
    sender.close()
    peak = receiver.recv()  # EOFError if it died: its own message is on the screen
    child.join()
    return peak


def measure_memory(sender, folder, case, index, side, measure, o):
    quiet()
    rank, size = (common.environment(name, 0) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    start_up(o)
    row = CASES[case](o)[index]
    peak_of = {"tensors": peak_tensor_bytes, "resident": peak_resident_bytes}[measure]
    sender.send(peak_of(getattr(row, side), row.inputs, o))
    leave()


def peak_tensor_bytes(build, inputs, o):
    """Return the most bytes that lived in tensors during a step.

    What making the initial weights takes, in float64, is no part of a step. The profiler sees the
    main thread alone, but our communication threads allocate receive buffers: so those of
    common.buffers, which are never freed, are made by a first state and added."""
    build(o)(*inputs(o, 0))
    gc.collect()
    unseen = common.storage_bytes(*common.buffers.values())
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        step = build(o)
        gc.collect()
        with torch.profiler.record_function("the steps"):
            for number in range(CHECKED):
                step(*inputs(o, number))
        del step
        gc.collect()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    begin = next(e.start_ns() for e in events if e.name() == "the steps")
    live = most = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live) if event.start_ns() >= begin else 0
    if abs(live) > most / 100:  # not freed with the step, or where the profiler doesn't see it
        common.print0(f"  of {most:,} B, {live:,} B are not seen to be freed at the end:")
    return most + unseen


def peak_resident_bytes(build, inputs, o):
    """Return by how much the steps' high-water mark is above what was resident before the model."""
    before = resident("VmRSS")
    step = build(o)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew (man proc)
    for number in range(CHECKED):
        step(*inputs(o, number))
        common.trace.clear()
    return resident("VmHWM") - before


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


# ------------------------------------------------------------------------------------------- main


def quiet():
    """Silence what is harmless, by its text: the new names do the same."""
    old = r"`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)


def start_up(o):
    """Join the other ranks, as the scripts do: the same number of threads on both sides."""
    sys.argv = ["02_data_parallel.py"]
    common.start_up(common.parse_args("02_data_parallel.py", ""))


def leave():
    dist.barrier()
    dist.destroy_process_group()


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {' '.join(CASES)}")
    parser.add_argument("--memory", action="store_true", help="peak memory, of 02 and 05")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--d-hidden", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8, help="of 04")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--lr", type=float, default=1e-4, help="1e-3 is too much for these sizes")
    parser.add_argument("--fused", action="store_true", help="theirs with torch's fused Adam")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--rate", type=float, help="Gbit/s a rank can send: rings' share of it")
    o = parser.parse_args()
    alone = common.environment("WORLD_SIZE", 1) == 1
    o.cases = o.cases or (["01"] if alone else [case for case in CASES if case != "01"])
    for case in o.cases:
        if case not in CASES:
            parser.error(f"no case {case}: {' '.join(CASES)}")
        if alone != (case == "01"):
            parser.error("01 runs on one rank, the others on several")
    if o.batch_size % (common.environment("WORLD_SIZE", 1) * o.microbatches):
        parser.error("--batch-size must be a multiple of ranks x --microbatches")
    return o


def main():
    o = options()
    quiet()
    start_up(o)
    common.print0(
        f"{common.usable_cores()} cores, torch {torch.__version__}, {dist.get_world_size()} ranks,"
        f" L {o.layers} D {o.d_model} F {o.d_hidden} B {o.batch_size}"
        f" m {o.microbatches} {o.dtype}{' fused Adam' if o.fused else ''}"
    )
    if o.memory:
        common.print0(f"{'':33}{'tensors, MB':^21}  {'resident, MB':^21}")
        common.print0(f"{'':33}" + 2 * f"{'ours':>7} {'theirs':>7} ratio  ")
    else:
        common.print0(f"{'':33}{'ours ms':>8}{'theirs ms':>9}{'ratio':>8}  quartiles")
    for case in o.cases:
        for index, row in enumerate(CASES[case](o)):
            if not o.memory:
                compare(row, o)
            elif case == "05" or (case == "02" and index == 0):
                compare_memory(case, index, row, o)
            gc.collect()
    leave()


if __name__ == "__main__":
    main()
