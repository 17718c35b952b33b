"""What is the same in all six scripts: the MLP, the data, start-up, timing and the final check.

There is no lesson in here. Nothing in this file cuts a tensor or calls a collective on one, so you
can read the scripts first and look up a name when you meet it. What the scripts call while they
work is above the line "From here on"; below it is what surrounds them.

The letters in a tensor's name are its logical dimensions:

    B  rows of the global batch ("tokens")        D  features of a row (d_model)
    L  layers                                     F  hidden features of a block (d_hidden)

A suffix names the dimensions of the whole tensor even where a rank holds only a part of it, so the
algebra can be read off the names: x_BD.T @ dz_BF has the dimensions D and F.

    block l:   h = relu(x @ w_in[l])      [B, F]
               y = x + h @ w_out[l].T     [B, D]

Both matrices are stored with D first, so one tensor `weights` of [L, D, 2, F] holds the whole
model: for every layer and feature a row of w_in, then a row of w_out. Each cut falls on the same
dimension of both, and a cut of L or D is one piece of memory, as a message must be.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import traceback
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import ceil, inf, isfinite, log2, prod
from pathlib import Path
from threading import current_thread
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

AXES = ("pp", "dp", "tp")
TIME_LIMIT = timedelta(seconds=60)  # of every wait for another rank; the default is 30 minutes
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
ADAM_BYTES = {"float64": 16, "float32": 8, "bfloat16": 12}  # a weight's; 12 with a float32 copy
# Largest relative difference from one device that rounding explains. Sums made in another order
# differ in their last digit. In float32 that is 1e-7, until it puts a hidden value that is nearly
# zero on the other side of the ReLU: one such flip changes a gradient norm by up to 1e-3.
TOLERANCE = {"float64": 1e-10, "float32": 5e-3, "bfloat16": 1e-1}


# ---------------------------------------------------------------------------------------- the MLP


class State(NamedTuple):
    """What a rank keeps between two steps. All tensors are parts of [L, D, 2, F]."""

    weights: torch.Tensor  # what the matmuls read, in --dtype
    grads: torch.Tensor  # in --dtype, summed over the micro-batches
    master: torch.Tensor  # what Adam updates: float32 for bfloat16, else `weights` itself
    exp_avg: torch.Tensor  # Adam's running mean of the gradient, as master
    exp_avg_sq: torch.Tensor  # and of its square
    layers: list  # which of the L layers they are


def initial_weights(args):
    """Return [L, D, 2, F] float32 (float64 if --dtype is). Every rank makes the whole model from
    the same seed and keeps its part: a seed per rank would train a model nobody can reproduce."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = args.layers, args.d_model, 2, args.d_hidden
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights[:, :, 0] /= args.d_model**0.5
    weights[:, :, 1] /= (args.d_hidden * args.layers) ** 0.5  # the sum over L blocks stays near one
    return weights.to(args.device, torch.float64 if args.dtype == "float64" else torch.float32)


def block_forward(x_BD, w_in_DF, w_out_DF):
    """Return the block's output without the residual, y [B, D], and h [B, F] for backward."""
    with span("forward", flops=4 * len(x_BD) * w_in_DF.numel()):
        h_BF = (x_BD @ w_in_DF).relu_()
        return h_BF @ w_out_DF.T, h_BF


def block_backward_input(dy_BD, h_BF, w_in_DF, w_out_DF):
    """The input half of backward: return dx [B, D], without the residual, and dz [B, F]."""
    with span("backward input", flops=4 * len(dy_BD) * w_in_DF.numel()):
        dz_BF = (dy_BD @ w_out_DF).mul_(h_BF.sign())  # the ReLU's slope: 1, or 0 where h is 0
        return dz_BF @ w_in_DF.T, dz_BF


def block_backward_weight(x_BD, h_BF, dy_BD, dz_BF, dw_in_DF, dw_out_DF):
    """The weight half of backward: add this micro-batch's gradients to dw_in and dw_out [D, F]."""
    with span("backward weight", flops=4 * len(x_BD) * dw_in_DF.numel()):
        dw_in_DF.addmm_(x_BD.T, dz_BF)
        dw_out_DF.addmm_(dy_BD.T, h_BF)


def adam_update(state, grads, scale, step, args):
    """Adam (Kingma & Ba 2015, section 2) on state.master, by `scale` times grads.

    Elementwise, so any part of the weights can be updated by whoever holds its gradient. The bias
    corrections are put into the step size, as the paper says at the section's end: fewer passes."""
    beta1, beta2 = ADAM_BETAS
    bias1, bias2 = 1 - beta1 ** (step + 1), (1 - beta2 ** (step + 1)) ** 0.5
    tensors = state.master, grads, state.exp_avg, state.exp_avg_sq
    with span("adam"):
        for layer in zip(*tensors):
            # Pieces that stay in the cache: each is read and written several times.
            for w, g, m, v in zip(*(tensor.view(-1).split(131072) for tensor in layer)):
                g = g.to(w.dtype)
                m.mul_(beta1).add_(g, alpha=(1 - beta1) * scale)
                v.mul_(beta2).addcmul_(g, g, value=(1 - beta2) * scale**2)
                w.addcdiv_(m, v.sqrt().add_(ADAM_EPS * bias2), value=-args.lr * bias2 / bias1)


# ------------------------------------------------------------------------------- the synthetic data


def next_state(x_BD):
    """One step of a dynamical system: D cells in a circle, each pulled by its two neighbours."""
    return torch.tanh(x_BD + (x_BD.roll(1, -1) - x_BD.roll(-1, -1)) / 2)


def make_batch(args, step):
    """Return x and t [B, D] in --dtype: B states of the system and their successors.

    The batch depends on the seed and the step alone, never on the rank: whatever the layout, all
    ranks together see the same rows."""
    generator = torch.Generator().manual_seed(args.seed + 1_000_003 * (step + 1))
    noise_BD = torch.randn(args.batch_size, args.d_model, generator=generator, dtype=torch.float64)
    x_BD = next_state(noise_BD)
    dtype = getattr(torch, args.dtype)
    return x_BD.to(args.device, dtype), next_state(x_BD).to(args.device, dtype)


# ----------------------------------------------------------------------- trace: who did what, when


class Span(NamedTuple):
    name: str  # "forward", "send", "receive", …
    start: float  # seconds
    end: float
    thread: str  # "main", or the axis whose communication thread it is
    axis: str | None
    flops: int
    bytes: int  # sent
    needs: tuple | None  # what it waits for: a message's key, or a task's number
    gives: tuple | None  # what others may wait for
    note: str  # chapter 4's micro-batch number, for the picture


trace = []  # the spans of the current step
numbers = Counter()  # how many messages, tasks and the like there have been, by key
peak = {"activations": 0, "microbatches": 0}  # most bytes saved for backward, and of how many
current = {"note": ""}


class span:  # as a function in a with statement; a class is quicker than @contextmanager
    """Write down what the body does and how long it takes."""

    __slots__ = ("name", "what", "start")

    def __init__(self, name, axis=None, flops=0, bytes=0, needs=None, gives=None):
        self.name, self.what = name, (axis, flops, bytes, needs, gives)

    def __enter__(self):
        self.start = perf_counter()

    def __exit__(self, *_):
        end = perf_counter()
        thread = current_thread().name.split("_")[0]  # "MainThread", or the axis's name
        times = self.start, end, THREADS.get(thread, thread)
        trace.append(Span(self.name, *times, *self.what, current["note"]))


THREADS = {"MainThread": "main"}


def number(*key):
    """Return the key with the number of times that it has been asked for."""
    numbers[key] += 1
    return *key, numbers[key]


def communicates(collective):
    """Decorator for collective(operand, axis, ...): record a span around it. On an axis of one rank
    there is nobody to talk to, and nothing is done."""

    @wraps(collective)
    def wrapper(operand, axis, *more):
        if axis.size > 1:
            meeting = number("meeting", axis.name, *axis.ranks)
            with span(collective.__name__, axis.name, needs=meeting):
                collective(operand, axis, *more)

    return wrapper


@dataclass
class Axis:
    """One axis of the mesh, as one rank sees it."""

    name: str  # "dp", "tp" or "pp"
    group: dist.ProcessGroup
    rank: int  # of this process on the axis
    size: int
    pending: list = field(default_factory=list)  # tasks that nobody has waited for yet

    def __post_init__(self):
        self.ranks = dist.get_process_group_ranks(self.group)
        self.prev_rank, self.next_rank = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        # Messages of a group match in the order they are posted, so two threads on one group would
        # mix up each other's. This is the one thread that may talk while the main thread computes.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)

    def submit(self, collective, *operands):
        """Have the communication thread call collective(*operands); return the Task."""
        key = number("task", dist.get_rank(), self.name)

        def task():
            with span("begin", self.name, needs=key):
                pass
            collective(*operands)
            with span("end", self.name, gives=("done", *key)):
                pass

        with span("submit", self.name, gives=key):
            return Task(self.thread.submit(task), self, key)


@dataclass
class Mesh:
    """The ranks as a grid [pp, dp, tp]; the axes that a chapter does not know yet have size 1."""

    devices: dist.device_mesh.DeviceMesh
    pp: Axis
    dp: Axis
    tp: Axis


class Task(NamedTuple):
    """A collective that the axis's communication thread has been given to do."""

    future: Future
    axis: Axis
    key: tuple

    def wait(self):
        with span("wait", self.axis.name, needs=("done", *self.key)):
            self.future.result()


class Message(NamedTuple):
    """A send or receive under way. Holds on to the tensor: freed or overwritten before the message
    has left, it would be the wrong numbers that arrive."""

    work: dist.Work
    tensor: torch.Tensor
    axis: Axis
    name: str  # of the wait
    needs: tuple

    def wait(self):
        with span(self.name, self.axis.name, needs=self.needs):
            self.work.wait(TIME_LIMIT)  # a group made for a mesh has a limit of 30 minutes


def isend(tensor, dst, axis, tag=0):
    """As torch.distributed.isend, to rank dst of the axis; the bytes are counted."""
    key = number(axis.name, axis.ranks[axis.rank], axis.ranks[dst], tag)
    with span("send", axis.name, bytes=tensor.nbytes, gives=key):
        work = dist.isend(tensor, group=axis.group, group_dst=dst, tag=tag)
    return Message(work, tensor, axis, "sent", ("left", *key))


def irecv(tensor, src, axis, tag=0):
    """As torch.distributed.irecv, from rank src of the axis."""
    key = number(axis.name, axis.ranks[src], axis.ranks[axis.rank], tag)
    work = dist.irecv(tensor, group=axis.group, group_src=src, tag=tag)
    return Message(work, tensor, axis, "receive", key)


buffers = {}


def scratch(name, shape, like):
    """Return the buffer of this name: allocating it anew in each step can cost more than adding."""
    key = name, shape, like.dtype
    if key not in buffers:
        buffers[key] = like.new_empty(shape)
    return buffers[key]


def track_activations(*groups):
    """Note the peak of what is kept for backward: {micro-batch: a list with tensors, per layer}."""
    microbatches = [saved for group in groups for saved in group.values()]
    tensors = [leaf for leaf in tree_leaves(microbatches) if isinstance(leaf, torch.Tensor)]
    peak["activations"] = max(peak["activations"], sum(tensor.nbytes for tensor in tensors))
    peak["microbatches"] = max(peak["microbatches"], len(microbatches))


class Step(NamedTuple):
    """What is kept of a training step."""

    loss: float
    norm: float
    seconds: float
    trace: list


def timed_step(train_step, state, x_BD, t_BD, step, args, mesh):
    """Run one training step on all ranks at once, print its line and return its Step."""
    dist.barrier()
    trace.clear()
    start = perf_counter()
    loss, norm = train_step(state, x_BD, t_BD, step, args, mesh)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    current["note"] = ""
    loss, norm = float(loss), float(norm)
    if not isfinite(loss + norm):  # all ranks have the same: they end together
        raise Diverged(f"step {step}: loss {loss}, grad norm {norm}; a smaller --lr may help")
    if step < 5 or step % 10 == 9 or step == args.steps - 1:
        print0(f"step {step:3d}  loss {loss:.6f}  grad norm {norm:.5f}  {1e3 * seconds:6.1f} ms")
    spans = [s._replace(start=s.start - start, end=s.end - start) for s in trace]
    return Step(loss, norm, seconds, spans)


# From here on: flags, start-up, checkpoints, the check, the report, pictures and the replay. To
# follow the chapters you need none of it.

# ------------------------------------------------------------------- the command line, start, end


class BadInput(Exception):
    """Something the user can mend: ends as one line on standard error and exit code 2."""


class Diverged(Exception):
    """Training can't go on: one line and exit code 1. What was saved before is good."""


def number_type(name, kind, fits):
    """Return a type for argparse, which says "invalid <name> value" where a number does not fit."""

    def parse(text):
        if not fits(kind(text)):
            raise ValueError
        return kind(text)

    parse.__name__ = name
    return parse


positive = number_type("positive", int, lambda n: 0 < n < 2**62)  # torch's integers have 64 bits
not_negative = number_type("not negative", int, lambda n: 0 <= n < 2**62)
above_zero = number_type("above zero", float, lambda x: 0 < x < inf)
zero_or_more = number_type("zero or more", float, lambda x: 0 <= x < inf)


def shares(text):
    return [positive(share) for share in text.split(",")]


class Hardware(NamedTuple):
    """What --replay models."""

    flops: float  # C, per second, of a rank
    bandwidth: float  # W, bytes per second that a rank can send, and as many that it can receive
    latency: float = 0.0  # seconds from a byte's leaving to its arrival
    between: float = 0.0  # W of a rank between nodes, where it is another
    other: float = 0.0  # how much of what took time here and is not in the model: Adam, Python, …


HARDWARE = {
    # 8 float32 units, 2 FLOPs each, twice a cycle, at 3 GHz, on 4 cores; copies through memory
    "laptop": Hardware(4 * 8 * 2 * 2 * 3e9, 10e9, 20e-6),
    # the same with home ethernet, and a round trip of 0.2 ms
    "ethernet-1g": Hardware(4 * 8 * 2 * 2 * 3e9, 1e9 / 8, 100e-6),
    # NVIDIA's data sheets: dense bfloat16, NVLink in one direction, a 200 or 400 Gbit/s card each
    "a100": Hardware(312e12, 300e9, 2e-6, 200e9 / 8),
    "h100": Hardware(990e12, 450e9, 2e-6, 400e9 / 8),
    # the scaling book, "TPUs": W is both directions of one axis
    "tpu-v5p": Hardware(4.6e14, 1.8e11, 1e-6),
}
REPLAY_HELP = f"{' '.join(HARDWARE)}, here, or flops=…,bandwidth=…,latency=… of a rank"


def hardware(text):
    """Parse --replay: a name, or a Hardware's fields. What "here" can do, the run must show."""
    if text in HARDWARE or text == "here":
        return HARDWARE.get(text, text)
    chosen = Hardware(**assignments(text, zero_or_more, Hardware._fields))
    above_zero(chosen.flops), above_zero(chosen.bandwidth)
    return chosen


def sizes(text):
    return assignments(text, positive, "BDF")


def assignments(text, kind, names):
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(name in names for name, _ in pairs) or len(dict(pairs)) < len(pairs):
        raise ValueError
    return {name: kind(value) for name, value in pairs}


LAYOUTS = ("batch", "1d", "2d", "gathered", "pipeline")

# (the first chapter that knows it, and the last: chapter 6 does not train; …)
FLAGS = [
    (1, 6, "--layers", dict(type=positive, default=8, help="L, blocks in the stack")),
    (1, 6, "--d-model", dict(type=positive, default=64, help="D, features of a row")),
    (1, 6, "--d-hidden", dict(type=positive, default=256, help="F, hidden features of a block")),
    (1, 6, "--batch-size", dict(type=positive, help="B, rows of all ranks: 256; 6: 1024")),
    (1, 6, "--microbatches", dict(type=positive, help="pieces of the rows: 1; 4: 8; 6: stages")),
    (1, 5, "--steps", dict(type=not_negative, default=60)),
    (1, 5, "--lr", dict(type=above_zero, default=1e-3, help="Adam's learning rate")),
    (1, 5, "--clip-norm", dict(type=above_zero, default=1.0, help="largest global gradient norm")),
    (1, 6, "--seed", dict(type=not_negative, default=0)),
    (1, 6, "--dtype", dict(choices=list(TOLERANCE), default="float32", help="of the matmuls")),
    (1, 6, "--device", dict(choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank")),
    (1, 6, "--plot", dict(metavar="FILE", help="default: plots/<script>.png; none draws nothing")),
    (1, 6, "--metrics", dict(metavar="FILE", help="write what was measured and predicted as JSON")),
    (1, 6, "--replay", dict(type=hardware, metavar="HARDWARE", help=REPLAY_HELP)),
    (1, 6, "--ranks-per-node", dict(type=positive, metavar="N", help="replay: ranks in a machine")),
    (1, 6, "--scale-to", dict(type=sizes, metavar="D=…,F=…,B=…", help="replay: a larger model")),
    (1, 6, "--no-check", dict(action="store_true", help="skip the comparison with one device")),
    (1, 6, "--checkpoint", dict(metavar="DIR", help="save at the end; resume from what is there")),
    (1, 5, "--save-every", dict(type=positive, metavar="N", help="save every N steps as well")),
    (2, 5, "--collectives", dict(choices=["ring", "naive", "torch"], default="ring")),
    (2, 6, "--no-overlap", dict(action="store_true", help="wait for each collective at once")),
    (2, 5, "--batch-shares", dict(type=shares, metavar="3,1", help="rows per dp rank, as a ratio")),
    (3, 6, "--tp", dict(type=positive, help="ranks that share F")),
    (3, 5, "--sequence-parallel", dict(action="store_true", help="cut rows between the blocks")),
    (4, 5, "--pp", dict(type=positive, help="pipeline stages that share L")),
    (4, 5, "--schedule", dict(choices=["gpipe", "1f1b", "interleaved", "zb-h1"], default="1f1b")),
    (4, 5, "--chunks", dict(type=positive, default=2, help="interleaved: chunks per rank")),
    (5, 5, "--zero-stage", dict(type=int, choices=[0, 1, 2, 3], default=3)),
    (6, 6, "--layout", dict(choices=[*LAYOUTS, "all"], default="all", help="what is cut")),
    (6, 6, "--tokens", dict(type=positive, default=8, metavar="T", help="decode steps")),
]


def environment(name, default):
    return int(os.environ.get(name, default))


def parse_args(file, doc):
    """Parse the flags of this chapter and all before it.

    Raises BadInput later, in start_up, so that all ranks end in the same way."""
    name, n = Path(file).stem, environment("WORLD_SIZE", 1)
    chapter = int(name[:2])
    parser = argparse.ArgumentParser(
        f"{name}.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    for first, last, flag, options in FLAGS:
        if first <= chapter <= last:
            parser.add_argument(flag, **options)
        else:  # as if it were there, and off
            off = options.get("default") if first < 5 else 0
            parser.set_defaults(**{flag[2:].replace("-", "_"): off})
    if environment("RANK", 0) > 0 and {"-h", "--help"} & set(sys.argv):
        sys.exit()  # rank 0 alone prints the help
    try:
        args = parser.parse_args()
        args.batch_size = args.batch_size or (1024 if chapter == 6 else 256)
        args.microbatches = args.microbatches or {4: 8, 6: n}.get(chapter, 1)
        # A chapter gives all ranks to its own axis; 6 makes its grid as square as can be.
        args.tp = args.tp or {3: n, 6: square(n)}.get(chapter, 1)
        args.pp = args.pp or (max(1, n // args.tp) if chapter == 4 else 1)
        args.dp = n // (args.tp * args.pp)
        if chapter == 6 and args.checkpoint:
            args.layers, args.d_model, args.d_hidden = saved_sizes(args.checkpoint)
        refuse_what_cannot_work(args, chapter, n)
    except BadInput as error:
        args = argparse.Namespace(device="cpu", problem=str(error))
    args.script, args.plot = name, getattr(args, "plot", None) or f"plots/{name}.png"
    return args


def square(n):
    """Return the smallest divisor of n that is no less than its square root."""
    return next(y for y in range(1, n + 1) if y * y >= n and n % y == 0)


def fail(message):
    raise BadInput(message)


def refuse_what_cannot_work(args, chapter, world_size):
    if chapter == 1 and world_size > 1:
        fail(f"one device, so one rank, not {world_size}: chapter 2 is the first to use more")
    if args.tp * args.pp * args.dp != world_size:
        fail(f"--tp {args.tp} x --pp {args.pp} does not divide the {world_size} ranks")
    if args.schedule == "interleaved" and args.microbatches % args.pp:
        fail("--schedule interleaved needs --microbatches to be a multiple of --pp")
    if args.collectives != "ring" and (args.sequence_parallel or args.zero_stage):
        fail("--sequence-parallel and --zero-stage 1 to 3 need --collectives ring: its halves")
    if args.replay and args.collectives == "torch":
        fail("--replay needs --collectives ring: what torch's send can't be seen")
    if len(args.batch_shares or [1] * args.dp) != args.dp:
        fail(f"--batch-shares needs {args.dp} numbers, one for each data-parallel rank")
    if args.save_every and not args.checkpoint:
        fail("--save-every needs --checkpoint DIR")
    if (args.scale_to or args.ranks_per_node) and not args.replay:
        fail("--scale-to and --ranks-per-node need --replay")
    refuse_too_large(args)
    if "" in (args.checkpoint, args.metrics, args.plot):
        fail("--checkpoint, --metrics and --plot need a name")
    if args.checkpoint and chapter < 6:  # chapter 6 only reads it
        refuse_unwritable(Path(args.checkpoint) / "unfinished")
        refuse_unfit(args)
    if args.metrics:
        refuse_unwritable(args.metrics)
    if args.plot and args.plot != "none":
        if args.plot == args.metrics:
            fail(f"--plot and --metrics are both {args.plot}")
        if Path(args.plot).suffix not in PICTURES:
            fail(f"cannot draw {args.plot}: its name must end in {' or '.join(PICTURES)}")
        refuse_unwritable(args.plot)
    gpus, ranks = torch.cuda.device_count(), environment("LOCAL_WORLD_SIZE", 1)
    if args.device == "cuda" and gpus < ranks:
        fail(f"--device cuda: {ranks} ranks on this machine, but {gpus} GPUs")
    if args.device == "cuda" and ranks > 1 and (args.collectives != "torch" or args.pp > 1):
        # The rings post a receive before a send, for gloo; NCCL would wait for ever.
        fail("--device cuda with several ranks needs --collectives torch, and no --pp")


PICTURES = ".png", ".svg", ".pdf"


def refuse_too_large(args):
    """Each rank draws the whole model and batch in float64, and lists all micro-batches."""
    pieces = args.microbatches * (args.chunks if args.schedule == "interleaved" else 1)
    needs = {
        "--layers, --d-model and --d-hidden": 16 * args.layers * args.d_model * args.d_hidden,
        "--batch-size and --d-model": 8 * args.batch_size * args.d_model,
        "--microbatches": 1000 * pieces,
    }
    flags = max(needs, key=needs.get)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needs[flags] > memory:
        fail(f"{flags} need {needs[flags]:.0e} B of memory, and there are {memory:.0e}")


def refuse_unfit(args):
    """Refuse a checkpoint that this run can't go on from."""
    steps, mine = saved_steps(args.checkpoint), (args.layers, args.d_model, args.d_hidden)
    newest = newest_checkpoint(args.checkpoint) if steps else None
    if steps and saved_sizes(args.checkpoint) != mine:
        fail(f"{newest} has L, D, F {saved_sizes(args.checkpoint)}, this run {mine}")
    if steps and steps[-1] > args.steps:
        fail(f"{newest} is past --steps {args.steps}")


def refuse_unwritable(path):
    path = Path(path).absolute()
    try:
        folder = next(above for above in path.parents if above.exists() or above.is_symlink())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # a full disk takes the name but not the bytes
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(0, "it is a link to nothing")
    except OSError as error:
        fail(f"cannot write to {path}: {error.strerror}")


def usable_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def start_up(args):
    """Join the other ranks, agree with them that work can begin, and return the Mesh."""
    if args.device == "cuda":
        torch.cuda.set_device(environment("LOCAL_RANK", 0))
    else:  # share the cores: more threads than cores only wait for each other
        torch.set_num_threads(max(1, usable_cores() // environment("LOCAL_WORLD_SIZE", 1)))
    if not dist.is_initialized():
        backend = "nccl" if args.device == "cuda" else "gloo"
        store, rank, world_size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            try:
                store, rank, world_size = next(dist.rendezvous("env://", timeout=TIME_LIMIT))
            except dist.DistNetworkError as error:  # the ranks have not met: each ends by itself
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                write_error(f"{args.script}.py: cannot meet at {where}: {reason(error)}")
                os._exit(2)
            # torchrun keeps the store when it restarts the ranks, and with it the addresses of
            # those that are gone. (On several machines the count may differ: see the README.)
            if environment("GROUP_WORLD_SIZE", 1) == 1:
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        where = dict(store=store, rank=rank, world_size=world_size)
        dist.init_process_group(backend, timeout=TIME_LIMIT, **where)
    end_if_any(getattr(args, "problem", None), args)
    end_if_any(other_settings(args), args)
    return make_mesh(args)


def end_if_any(problem, args):
    """End all ranks with one line and exit code 2 if any of them has a problem."""
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        # Together, or the launcher would end the others before they could set their exit code.
        write_error(f"{args.script}.py: {next(filter(None, problems))}")
        dist.barrier()
        os._exit(2)


def other_settings(args):
    """Return a line if a rank, perhaps on another machine, was started differently."""
    mine = {"torch": str(torch.__version__), **vars(args)} | {"plot": None, "metrics": None}
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, mine)
    for rank, theirs in enumerate(every_rank):
        for name, value in every_rank[0].items():
            if theirs.get(name) != value:
                return f"rank {rank} has {name} {theirs.get(name)}, rank 0 has {value}"


def make_mesh(args):
    """Return this rank's Mesh; consecutive ranks are neighbours on tp, which talks the most."""
    devices = init_device_mesh(args.device, (args.pp, args.dp, args.tp), mesh_dim_names=AXES)
    axes = [
        Axis(name, devices.get_group(name), devices.get_local_rank(name), devices.size(i))
        for i, name in enumerate(AXES)
    ]
    return Mesh(devices, *axes)


def write_error(line):
    if environment("LOCAL_RANK", 0) == 0:  # one of each machine
        sys.stderr.write(f"{line}\n")  # one call, so that no other rank's line falls into it
        sys.stderr.flush()


def print0(line):
    if dist.get_rank() == 0:
        print(line, flush=True)


def run(main):
    """Run a script's main; whatever happens, this rank ends, and with the right exit code."""
    try:
        code = main()
    except Diverged as error:
        write_error(f"FAILED: {error}")
        dist.barrier()
        os._exit(1)
    except SystemExit:
        raise
    except BrokenPipeError:  # who read the output has seen enough, like head
        os._exit(1)
    except BaseException:  # KeyboardInterrupt too
        rank, lines = environment("RANK", 0), traceback.format_exc().splitlines()
        sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in lines))
        sys.stderr.flush()
        # Not sys.exit: it would wait for a communication thread that waits for a lost rank.
        os._exit(1)
    sys.exit(code)


# ------------------------------------------------------------------------------------ checkpoints


def placements(d_is_cut):
    """How a layer's [D, F] lies on the (dp, tp) ranks of its stage."""
    return [Shard(0) if d_is_cut else Replicate(), Shard(1)]


def as_dtensors(tensors, layers, d_is_cut, args, mesh):
    """Return {key: DTensor [D, F]} for this rank's parts of {suffix of the key: [L, D, 2, F]}."""
    return {
        f"{'adam.' if suffix else ''}layers.{layer}.{name}{suffix}": DTensor.from_local(
            tensor[l, :, i],
            mesh.devices["dp", "tp"],
            placements(d_is_cut),
            run_check=False,
            shape=(args.d_model, args.d_hidden),
            stride=(args.d_hidden, 1),
        )
        for suffix, tensor in tensors.items()
        for l, layer in enumerate(layers)
        for i, name in enumerate(("w_in", "w_out"))
    }


def trained(state, args, mesh):
    """Return what training changes, which is what a checkpoint holds."""
    tensors = {"": state.master, ".exp_avg": state.exp_avg, ".exp_avg_sq": state.exp_avg_sq}
    return as_dtensors(tensors, state.layers, args.zero_stage > 0, args, mesh)


def saved_steps(directory):
    """Return the steps that have a complete checkpoint, oldest first."""
    names = [path.parent.name for path in Path(directory).glob("step-*/.metadata")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def newest_checkpoint(directory):
    return Path(directory) / f"step-{saved_steps(directory)[-1]}"


def saved_sizes(directory):
    """Return L, D and F of the newest checkpoint."""
    if not saved_steps(directory):
        fail(f"no checkpoint in {directory}")
    newest = newest_checkpoint(directory)
    try:
        known = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
        d_model, d_hidden = known["layers.0.w_in"].size
    except Exception as error:  # a damaged file can make pickle raise anything
        fail(f"cannot read {newest}: {reason(error)}")
    layers = sum(key.startswith("layers.") and key.endswith("w_in") for key in known)
    return layers, d_model, d_hidden


def reason(error):
    """Return in one short line what an exception says; of several ranks', the first one's."""
    first, *_ = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
    return f"{type(first).__name__} {' '.join(str(first).split())[:200]}"


def save(state, step, args, mesh):
    """Save after the last step and every --save-every, if there is a --checkpoint DIR.

    Written under another name and then renamed, so a checkpoint is complete or absent."""
    due = step == args.steps or (args.save_every and step % args.save_every == 0)
    if not (args.checkpoint and due):
        return
    directory, problem = Path(args.checkpoint), None
    unfinished = directory / f"unfinished-{step}"
    tensors = trained(state, args, mesh) | {"step": torch.tensor(step)}
    try:
        dcp.save(tensors, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            shutil.rmtree(directory / f"step-{step}", ignore_errors=True)
            unfinished.rename(directory / f"step-{step}")
            for old in saved_steps(directory)[:-2]:
                shutil.rmtree(directory / f"step-{old}")
    except (OSError, dcp.CheckpointException) as error:  # a full disk, a name that is taken
        problem = f"cannot save {directory}/step-{step}: {reason(error)}"
    end_if_any(problem, args)  # and a barrier: no rank goes on before it is saved


def begin(state, args, mesh):
    """Print the first line, load the newest checkpoint if there is one, whatever layout wrote it,
    and return the step to go on with."""
    sizes = f"L {args.layers} D {args.d_model} F {args.d_hidden} B {args.batch_size}"
    axes = f"dp {args.dp} tp {args.tp} pp {args.pp}"
    print0(f"{args.script}   {axes} | {sizes} | {args.dtype} {args.device}")
    if "RANK" not in os.environ and args.script[:2] != "01":
        print0(f"more ranks:  torchrun --standalone --nproc-per-node 4 {args.script}.py")
    steps = saved_steps(args.checkpoint) if args.checkpoint else []
    if not steps:
        return 0
    newest = newest_checkpoint(args.checkpoint)
    load(trained(state, args, mesh), newest, args)
    # The matmuls' weights too: in bfloat16, and of rows whose master another rank holds.
    weights = state.weights.to(state.master.dtype)
    load(as_dtensors({"": weights}, state.layers, args.zero_stage == 3, args, mesh), newest, args)
    state.weights.copy_(weights)
    print0(f"resumed from {newest}")
    return steps[-1]


def load(tensors, path, args):
    """Fill the tensors from the checkpoint, or end if it can't be read or is another model's."""
    problem = None
    try:
        dcp.load(tensors, checkpoint_id=path)
    except (Exception, dcp.CheckpointException) as error:
        problem = f"cannot load {path}: {reason(error)}"
    end_if_any(problem, args)


# --------------------------------------------------------------- the check: the same on one device


def reference_run(args):
    """Yield (loss, gradient norm, weights) after each step of the same training by torch's own
    autograd, Adam and clip_grad_norm_ on one device: nothing of it is the code under test."""
    weights = initial_weights(args).requires_grad_()
    adam = torch.optim.Adam([weights], lr=args.lr, betas=ADAM_BETAS, eps=ADAM_EPS)
    for step in range(args.steps):
        x_BD, t_BD = make_batch(args, step)
        for layer in weights.to(x_BD.dtype):
            w_in_DF, w_out_DF = layer.unbind(1)
            x_BD = x_BD + torch.relu(x_BD @ w_in_DF) @ w_out_DF.T
        loss = (x_BD - t_BD).double().square().mean()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([weights], args.clip_norm)
        adam.step()
        yield loss.item(), norm.item(), weights.detach()


def compare_with_one_device(state, history, args, mesh):
    """Return ({what: largest relative difference of any rank from the reference}, its losses).

    Rank 0 makes the reference run. Each rank compares what it holds itself, so that copies which
    have drifted apart can't hide behind rank 0's."""
    reference, curves = reference_run(args), torch.zeros(2, args.steps, dtype=torch.float64)
    curves, weights = curves.to(args.device), initial_weights(args)
    for step in range(args.steps):
        if dist.get_rank() == 0:
            curves[0, step], curves[1, step], weights = next(reference)
        dist.barrier()  # each step: to wait for all of a long run would exceed the time limit
    dist.broadcast(curves, 0)
    dist.broadcast(weights, 0)
    ours = curves.new_tensor([(step.loss, step.norm) for step in history]).reshape(-1, 2).T
    theirs = curves[:, args.steps - len(history) :]
    differences = ((ours - theirs) / theirs).abs().nan_to_num(nan=torch.inf)
    losses, norms = differences.amax(1).tolist() if history else (0.0, 0.0)

    whole, zero = weights[list(state.layers)], args.zero_stage
    error = max(
        difference_from(whole, state.master, zero > 0, args, mesh),
        difference_from(whole, state.weights, zero == 3, args, mesh),
    )
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, (losses, norms, error))
    names = "losses", "gradient norms", "weights"
    return dict(zip(names, map(max, *every_rank, (0, 0, 0)))), curves[0].tolist()


def difference_from(whole, mine, d_is_cut, args, mesh):
    """Return the relative difference of this rank's part from its part of [L, D, 2, F]."""
    shape, offset = compute_local_shape_and_global_offset(
        (args.d_model, args.d_hidden), mesh.devices["dp", "tp"], placements(d_is_cut)
    )
    d, f = (slice(start, start + size) for start, size in zip(offset, shape))
    part = whole[:, d, :, f].to(mine.dtype)
    error = (mine - part).double().norm() / max(part.double().norm().item(), 1e-30)
    return error.nan_to_num(nan=torch.inf).item()


# --------------------------------------------------------------------------------------- the report


def storage_bytes(*tensors):
    """Return the bytes kept alive by the tensors, counting what two of them share once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def layer_buffers():
    """Return the buffers in which ZeRO brings a layer together."""
    return [buffer for (name, *_), buffer in buffers.items() if name.startswith("layer's ")]


def measured_costs(state, history):
    """Return for this rank the bytes sent in each step, by axis, and the bytes it holds."""
    state_tensors = state.weights, state.master, state.exp_avg, state.exp_avg_sq
    weights = storage_bytes(state.weights)
    return {
        "sent": [
            {axis: sum(s.bytes for s in step.trace if s.axis == axis) for axis in AXES}
            for step in history
        ],
        "memory_bytes": {
            "weights": weights,
            "gradients": storage_bytes(state.grads),
            "optimizer": storage_bytes(*state_tensors) - weights,
            "activations": peak["activations"],
            "buffers": storage_bytes(*layer_buffers()),
        },
        "microbatches_alive": peak["microbatches"],
        "trace": history[median_step(history)].trace if history else [],
    }


def predicted_costs(costs, args):
    """Return the same in bytes from what a script's `predict` gives in elements."""
    s = getattr(torch, args.dtype).itemsize
    memory = {what: s * costs[what] for what in ("weights", "gradients")}
    memory["optimizer"] = ADAM_BYTES[args.dtype] * costs["updated"]
    memory["activations"] = s * costs["activations"]
    memory["buffers"] = s * costs.get("buffers", 0)
    return {
        "sent": {axis: s * costs.get(axis, 0) for axis in AXES},
        "memory_bytes": memory,
        "microbatches_alive": costs.get("microbatches", 1),
        "bubble": costs.get("bubble", 0.0),
    }


def counted_axes(args):
    """The axes whose messages pass through isend: what torch's collectives send can't be seen."""
    return ("pp",) if args.collectives == "torch" else AXES


def wrong_costs(measured, predicted, args):
    """Return a line for each cost that is not, to the byte, what the formula says."""
    lines = []
    for rank, (m, p) in enumerate(zip(measured, predicted)):
        for axis in counted_axes(args):
            odd = [sent[axis] for sent in m["sent"] if sent[axis] != p["sent"][axis]]
            if odd:
                lines.append(f"rank {rank} sent {odd[0]:,} B over {axis}, not {p['sent'][axis]:,}")
        for what, nbytes in p["memory_bytes"].items():
            held = m["memory_bytes"][what]
            if held != nbytes:
                lines.append(f"rank {rank} held {held:,} B of {what}, not {nbytes:,}")
        alive, expected = m["microbatches_alive"], p["microbatches_alive"]
        if alive != expected:
            lines.append(f"rank {rank} had {alive} micro-batches alive, not {expected}")
    return lines


def median_step(history):
    """Return the index of the median step as rank 0 timed it, the same on all ranks."""
    order = sorted(range(len(history)), key=lambda i: history[i].seconds)
    chosen = [order[len(order) // 2]]
    dist.broadcast_object_list(chosen, 0)
    return chosen[0]


def split_time(trace, seconds):
    """Return (compute, exposed communication, other) of a step's main thread, in seconds."""
    main = sorted((s for s in trace if s.thread == "main"), key=lambda s: s.start)
    compute = sum(s.end - s.start for s in main if s.axis is None)
    exposed = end = 0.0
    for s in main:
        if s.axis and s.end > end:  # a collective's span contains its messages': count it once
            exposed, end = exposed + s.end - max(s.start, end), s.end
    return compute, exposed, seconds - compute - exposed


def pipeline_times(traces):
    """Return when the first block began, a rank's mean compute time, and as part of it the bubble:
    the rest of the time until the last block ended."""
    blocks = [[s for s in trace if s.flops] for trace in traces]
    busy = statistics.mean(sum(s.end - s.start for s in rank) for rank in blocks)
    begin, end = min(s.start for s in sum(blocks, [])), max(s.end for s in sum(blocks, []))
    return begin, busy, (end - begin) / busy - 1


def finish(state, history, costs, args, mesh):
    """Check, report, write --metrics and --plot, leave together; return the exit code."""
    differences, reference, complaints, problem = {}, [], [], None
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(
        every_rank, (measured_costs(state, history), predicted_costs(costs, args))
    )
    measured, predicted = zip(*every_rank)
    if not args.no_check:
        differences, reference = compare_with_one_device(state, history, args, mesh)
        limit = TOLERANCE[args.dtype]
        complaints = [
            f"{what} differ from one device by {difference:.1e}, which is more than {limit:.0e}"
            for what, difference in differences.items()
            if difference > limit
        ]
        complaints += wrong_costs(measured, predicted, args) if history else []
    if dist.get_rank() == 0:
        result = metrics(history, measured, predicted, args)
        result["check"] = {
            "max_rel_diff": max(differences.values(), default=None),
            "passed": not complaints if differences else None,
            "differences": differences,
        }
        lines = report(result, measured[0]["trace"], args) if history else ["no steps"]
        traces = [m["trace"] for m in measured]
        if args.replay and history:
            seconds = statistics.median(result["step_seconds"])
            more, result["replay"], traces = replay_report(traces, seconds, args)
            lines += more
        if differences and not complaints:
            within = max(differences.values())
            lines += [f"same as one device: {', '.join(differences)} within {within:.0e}   OK"]
        print("\n".join(lines + [f"FAILED: {complaint}" for complaint in complaints]), flush=True)
        try:
            if args.metrics:
                write_json(args.metrics, result)
            if args.plot != "none" and history:
                draw(result, reference, traces, args)
        except OSError as error:
            problem = f"cannot write {args.metrics or ''} {args.plot}: {reason(error)}"
    end_if_any(problem, args)
    dist.barrier()  # without it the first to leave may tear the connection from under the last
    dist.destroy_process_group()
    return 1 if complaints else 0


def metrics(history, measured, predicted, args):
    """Return what --metrics writes, but for the check; lists of costs have an entry per rank."""
    result = {
        "script": args.script,
        "config": {key: value for key, value in vars(args).items() if key != "script"},
        "axes": {axis: getattr(args, axis) for axis in AXES},
        "losses": [step.loss for step in history],
        "grad_norms": [step.norm for step in history],
        "step_seconds": [step.seconds for step in history],
        "bytes_sent": [m["sent"][-1] if history else {} for m in measured],
        "bytes_predicted": [p["sent"] for p in predicted],
    }
    for what in "memory_bytes", "microbatches_alive":
        result[what] = {"measured": [m[what] for m in measured]}
        result[what]["predicted"] = [p[what] for p in predicted]
    if args.pp > 1 and history:
        _, _, bubble = pipeline_times([m["trace"] for m in measured])
        result["bubble"] = {"measured": bubble, "predicted": predicted[0]["bubble"]}
    return result


def write_json(path, result):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def report(result, trace, args):
    """Return the lines that say what rank 0's steps cost, measured and (predicted)."""
    seconds = statistics.median(result["step_seconds"])
    compute, exposed, other = split_time(trace, seconds)
    lines = [
        f"step {1e3 * seconds:.1f} ms (median) = compute {1e3 * compute:.1f}"
        f" + exposed communication {1e3 * exposed:.1f} + other {1e3 * other:.1f}"
    ]
    for axis, sent in result["bytes_sent"][0].items():
        expected = result["bytes_predicted"][0][axis]
        counted = f"{sent:,} B (predicted {expected:,})"
        if axis not in counted_axes(args):
            counted = f"inside torch, not counted (a ring would send {expected:,} B)"
        lines += [f"sent per step over {axis}: {counted}"] if sent or expected else []
    held, expected = (ranks[0] for ranks in result["memory_bytes"].values())
    for what, nbytes in held.items():
        if what != "buffers" or nbytes or expected[what]:  # which only ZeRO has
            lines.append(f"memory: {what:11} {nbytes:13,} B (predicted {expected[what]:,})")
    if args.pp > 1:
        pieces = "pieces" if args.schedule == "interleaved" else "micro-batches"
        alive, expected = (ranks[0] for ranks in result["microbatches_alive"].values())
        bubble, theory = result["bubble"].values()
        lines.append(
            f"{pieces} alive: {alive} (predicted {expected})  bubble / compute: {bubble:.2f}"
            f" (predicted {theory:.3f})"
        )
        if environment("LOCAL_WORLD_SIZE", 1) > usable_cores():
            lines.append("  fewer cores than ranks: stages take turns, so don't trust the measured")
    return lines


# ------------------------------------------------------------------------------------- the pictures

COLOURS = {
    "forward": "#d0d0d0",
    "backward input": "#a0a0a0",
    "backward weight": "#707070",
    "adam": "#404040",
    "dp": "#3b7dd8",
    "tp": "#e08a1e",
    "pp": "#2f9e5b",
}


def import_pyplot():
    """Return matplotlib's pyplot, which needs no display, or None."""
    try:
        import matplotlib
    except ImportError:
        return print("no plot: matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure, path):
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw(result, reference, traces, args):
    """Draw --plot: the losses, and the median step with a lane for each rank and thread."""
    pyplot = import_pyplot()
    if pyplot is None:
        return
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6), height_ratios=[1, 2])
    steps = range(args.steps - len(result["losses"]), args.steps)
    top.semilogy(steps, result["losses"], "k-", label="this run")
    one_device = {"mfc": "none", "ms": 4, "color": "#c0392b", "label": "one device, autograd"}
    top.semilogy(reference, "o", **one_device)
    top.set(xlabel="step", ylabel="loss")
    top.xaxis.get_major_locator().set_params(integer=True)
    top.legend(frameon=False)

    lanes = draw_timeline(bottom, {f"rank {rank}": trace for rank, trace in enumerate(traces)})
    if args.pp > 1:
        for rank, trace in enumerate(traces):
            label_microbatches(bottom, trace, lanes.index(f"rank {rank}"))
        begin, busy, _ = pipeline_times(traces)
        end = begin + busy * (1 + result["bubble"]["predicted"])
        bottom.axvline(1e3 * end, ls="--", color="k")
        bottom.text(1e3 * end, len(lanes) - 0.5, " predicted end", va="bottom", fontsize=8)
    seconds = statistics.median(result["step_seconds"])
    if args.replay:
        seconds = result["replay"]["step_seconds"]
    compute, exposed, _ = split_time(traces[0], seconds)
    figure.suptitle(
        f"{args.script}{', replayed' if args.replay else ''}: a step of {1e3 * seconds:.3g} ms\n"
        f"computes for {1e3 * compute:.3g} ms, waits for messages for {1e3 * exposed:.3g} ms"
    )
    save_figure(figure, args.plot)


def draw_timeline(axes, traces):
    """Draw a lane for the main thread of each trace and for each of its communication threads;
    return the lanes' names. What the main thread waits for is pale."""
    from matplotlib.patches import Patch

    lanes = []
    for name, trace in traces.items():
        for thread in ["main", *AXES]:
            spans = [s for s in trace if s.thread == thread]
            if spans:
                lanes.append(name if thread == "main" else thread)
            boxes = {}  # by colour: one call draws them all
            for s in spans:
                waiting = s.axis is not None and thread == "main"
                look = COLOURS[s.axis or s.name], 0.35 if waiting else 1
                boxes.setdefault(look, []).append((1e3 * s.start, 1e3 * (s.end - s.start)))
            for (colour, alpha), places in boxes.items():
                lane = len(lanes) - 1.4, 0.8
                axes.broken_barh(places, lane, color=colour, alpha=alpha, lw=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set(xlabel="ms", xlim=(0, None))
    used = {s.axis or s.name for trace in traces.values() for s in trace}
    legend = [Patch(color=c, label=name) for name, c in COLOURS.items() if name in used]
    legend.append(Patch(alpha=0, label="pale: waits"))
    place = {"ncols": len(legend), "loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(handles=legend, frameon=False, **place)
    return lanes


def label_microbatches(axes, trace, lane):
    """Write the micro-batch's number on its forward and on its backward."""
    for _, spans in groupby((s for s in trace if s.flops), lambda s: (s.note, s.name == "forward")):
        spans = list(spans)
        if spans[-1].end - spans[0].start < trace[-1].end / 80:
            continue  # too narrow to be read
        middle = 1e3 * (spans[0].start + spans[-1].end) / 2
        axes.text(middle, lane, spans[0].note, ha="center", va="center", fontsize=6)


# ------------------------------------------------------------- replay: the trace on other hardware


def replay(traces, hardware, ranks_per_node=None):
    """Return the traces of one step as they would be on that hardware: an event loop.

    Compute takes flops / C. A send takes bytes / W as soon as the sender's link is free, and
    arrives a latency later if the receiver's link is. A wait ends when what it waits for has
    happened. All collectives are made of sends and receives, so nothing else needs a model."""
    queues = {}
    for rank, spans in enumerate(traces):
        for s in spans:
            meeting = s.needs and s.needs[0] == "meeting"
            if s.name == "torch_all_reduce" if meeting else s.needs or s.gives or s.axis is None:
                queues.setdefault((rank, s.thread), deque()).append(s)
    # What an earlier step gave, like a task that ended in it, has happened already.
    happened = {s.needs: 0.0 for spans in traces for s in spans if s.needs and s.needs[0] == "done"}
    for gone in {s.gives for spans in traces for s in spans} & set(happened):
        del happened[gone]
    parked, free, met = {}, Counter(), Counter()
    clock, ended = Counter(), Counter()  # when a thread's last event ended, here and there
    agenda = [(0.0, lane) for lane in queues]
    heapify(agenda)
    replayed = [[] for _ in traces]

    def happen(key, when):
        happened[key] = when
        for since, lane in parked.pop(key, []):
            heappush(agenda, (max(since, when), lane))

    def send(key, nbytes, now):
        _, src, dst, _, _ = key
        between = ranks_per_node and src // ranks_per_node != dst // ranks_per_node
        took = nbytes / (hardware.between if between and hardware.between else hardware.bandwidth)
        out, into = ("out", src, between), ("into", dst, between)
        free[out] = max(now, free[out]) + took
        free[into] = max(free[out] - took + hardware.latency, free[into]) + took
        happen(("left", *key), free[out])
        happen(key, free[into])

    while agenda:
        now, lane = heappop(agenda)
        s = queues[lane][0]
        if s.needs and s.needs[0] == "meeting" and s.needs not in happened:
            met[s.needs] += 1
            if met[s.needs] == len(s.needs) - 3:  # all ranks are there; a tree's latencies
                rounds = 2 * ceil(log2(met[s.needs]))
                happen(s.needs, now + rounds * hardware.latency)
        if s.needs and s.needs not in happened:
            parked.setdefault(s.needs, []).append((now, lane))
            continue
        unseen = s.start - ended[lane] if s.name != "begin" else 0.0
        other = unseen + (s.end - s.start if s.axis is None and not s.flops else 0.0)
        begin = clock[lane] + hardware.other * other
        end = max(begin, happened.get(s.needs, 0.0)) + s.flops / hardware.flops
        if s.bytes:
            send(s.gives, s.bytes, end)
        elif s.gives:
            happen(s.gives, end)
        replayed[lane[0]].append(s._replace(start=clock[lane], end=end))
        queues[lane].popleft()
        clock[lane], ended[lane] = end, s.end
        if queues[lane]:
            heappush(agenda, (end, lane))
    return replayed


def measured_hardware(traces):
    """Return this machine as the run's own spans show it: C, W, the latency and the overhead."""
    spans = [s for trace in traces for s in trace]
    blocks = [s for s in spans if s.flops]
    flops = sum(s.flops for s in blocks) / sum(s.end - s.start for s in blocks)
    sends = {s.gives: s for s in spans if s.bytes}
    arrivals = sorted((s.end, s.needs) for s in spans if s.name == "receive")
    before, took = {}, {}
    for end, key in arrivals:
        link = key[1:3]
        start = max(sends[key].start, before.get(link, 0.0))
        took.setdefault(sends[key].bytes, []).append(end - start)
        before[link] = end
    points = {nbytes: statistics.median(times) for nbytes, times in took.items()} or {1: 1e-9}
    few, many = min(points), max(points)
    if many < 2 * few or points[many] <= points[few]:  # one size: all of it is bandwidth
        return Hardware(flops, many / points[many], other=1.0)
    bandwidth = (many - few) / (points[many] - points[few])
    return Hardware(flops, bandwidth, max(0.0, points[few] - few / bandwidth), other=1.0)


def scaled(traces, args):
    """Return the traces with the FLOPs and bytes of --scale-to: they follow from the letters."""
    now = {"B": args.batch_size, "D": args.d_model, "F": args.d_hidden}
    ratio = {letter: (args.scale_to or {}).get(letter, size) / size for letter, size in now.items()}
    moved = {"dp": "BF" if args.layout == "2d" else "DF", "tp": "BD", "pp": "BD"}
    return [
        [
            s._replace(
                flops=s.flops * ratio["B"] * ratio["D"] * ratio["F"],
                bytes=s.bytes * prod(ratio[letter] for letter in moved.get(s.axis, "")),
            )
            for s in trace
        ]
        for trace in traces
    ]


def replay_report(traces, measured_seconds, args):
    """Return (lines, numbers, the replayed traces): what the step costs on --replay's hardware."""
    hw = measured_hardware(traces) if args.replay == "here" else args.replay
    replayed = replay(scaled(traces, args), hw, args.ranks_per_node)
    seconds = max(s.end for trace in replayed for s in trace)
    parts = [split_time(trace, seconds) for trace in replayed]
    compute, exposed = (statistics.mean(part[i] for part in parts) / seconds for i in (0, 1))
    flops = sum(s.flops for trace in scaled(traces, args) for s in trace)
    result = hw._asdict() | {
        "step_seconds": seconds,
        "compute": compute,
        "exposed_communication": exposed,
        "model_flops_utilisation": flops / (len(traces) * hw.flops * seconds),
    }
    lines = [
        f"replay with {hw.flops / 1e12:.3g} TFLOP/s, {hw.bandwidth / 1e9:.3g} GB/s,"
        f" {1e6 * hw.latency:.3g} us, {len(traces)} ranks: step {1e3 * seconds:.3g} ms",
        f"  compute {compute:.0%}  exposed communication {exposed:.0%}"
        f"  model FLOPs utilisation {result['model_flops_utilisation']:.0%}",
    ]
    if args.replay == "here":
        lines.append(
            f"  measured {1e3 * measured_seconds:.3g} ms: replay / measured"
            f" {seconds / measured_seconds:.2f}"
        )
    if args.pp > 1:
        _, _, result["bubble"] = pipeline_times(replayed)
        lines.append(f"  bubble / compute {result['bubble']:.3f}")
    # Compute hides what a ring sends of s bytes each iff B/X (dp) or F/Y (tp) is above this.
    size = getattr(torch, args.dtype).itemsize
    at = {"B": args.batch_size, "F": args.d_hidden} | (args.scale_to or {})
    for axis, letter, n in ("dp", "B", args.dp), ("tp", "F", args.tp):
        if n > 1 and not args.layout:
            needed = size / 2 * (n - 1) / n * hw.flops / hw.bandwidth
            bound, sign = "communication", "<"
            if at[letter] / n > needed:
                bound, sign = "compute", ">"
            lines.append(
                f"  over {axis} {bound}-bound: {letter}/{n} = {at[letter] / n:.0f} {sign}"
                f" s/2 (n-1)/n C/W = {needed:.0f}, s = {size} B"
            )
    return lines, result, replayed
