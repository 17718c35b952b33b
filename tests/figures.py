"""Draws the README's pictures that need no run, and with torchrun the one of chapter 2's overlap:

python tests/figures.py FOLDER

unshare -Urn bash -c 'ip link set lo up
tc qdisc add dev lo root tbf rate 2gbit burst 256kb latency 50ms
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/figures.py FOLDER'
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import torch.distributed as dist
from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

sys.path.insert(0, str(Path(__file__).parent))
from harness import SCRIPTS, load, prepare  # noqa: E402

load(SCRIPTS[2])
common = sys.modules["common"]
HUE = {axis: common.COLOURS[axis] for axis in common.AXES}


def grid(axes, x, y, width, height, columns, rows, colour, text="", zorder=1):
    """Draw a tensor as a box that is cut into columns and rows; the first part is this rank's."""
    axes.add_patch(Rectangle((x, y), width, height, fc="#f0f0f0", ec="black", lw=1, zorder=zorder))
    part = width / columns, height / rows
    mine = (x, y + height - part[1])
    axes.add_patch(Rectangle(mine, *part, fc=colour, ec="none", zorder=zorder))
    for i in range(1, columns):
        axes.plot([x + i * part[0]] * 2, [y, y + height], color="black", lw=0.8, zorder=zorder)
    for i in range(1, rows):
        axes.plot([x, x + width], [y + i * part[1]] * 2, color="black", lw=0.8, zorder=zorder)
    axes.text(x + width / 2, y + height + 0.06, text, ha="center", va="bottom", fontsize=9)


def cuts(path):
    """Which part of x and of the weights one of four ranks holds in each chapter."""
    # chapter: (columns and rows of x [B, D], layers that are mine, columns and rows of [D, F])
    panels = [
        ("01 one device\ncuts nothing", "#9a9a9a", (1, 1), 4, (1, 1)),
        ("02 data parallel\ncuts B", HUE["dp"], (1, 4), 4, (1, 1)),
        ("03 tensor parallel\ncuts F", HUE["tp"], (1, 1), 4, (4, 1)),
        ("04 pipeline parallel\ncuts L", HUE["pp"], (1, 1), 1, (1, 1)),
        ("05 ZeRO stage 3\ncuts B and D", HUE["dp"], (1, 4), 4, (1, 4)),
    ]
    figure, row = pyplot.subplots(1, len(panels), figsize=(10, 3.6))
    for axes, (title, colour, of_x, layers, of_w) in zip(row, panels):
        grid(axes, 0.1, 0.25, 0.7, 2.2, *of_x, colour, "x")
        for layer in reversed(range(4)):
            place = 1.25 + 0.28 * layer, 0.25 + 0.38 * layer
            mine = colour if layer < layers else "#f0f0f0"
            grid(axes, *place, 1.5, 1.0, *of_w, mine, zorder=9 - layer)
        axes.text(2.4, 2.5, "weights", ha="center", va="bottom", fontsize=9)
        if title.startswith("01"):
            axes.text(0.0, 1.3, "B", ha="right", va="center", fontsize=9)
            axes.text(0.45, 0.2, "D", ha="center", va="top", fontsize=9)
            axes.text(2.0, 0.2, "F", ha="center", va="top", fontsize=9)
            axes.text(1.2, 0.75, "D", ha="right", va="center", fontsize=9)
            axes.text(3.45, 0.6, "L", ha="center", va="center", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(-0.2, 3.9), ylim=(-0.1, 2.9))
        axes.axis("off")
    figure.suptitle("What one of four ranks holds (coloured)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path / "cuts.png", dpi=120)


def ring(path, n=4):
    """What the ranks hold after each hop, by the scripts' own order of chunks."""
    script = load(SCRIPTS[2])
    asked = {}

    def irecv(chunk, src, axis, tag=0):
        asked.setdefault((axis.rank, tag), []).append(chunk)
        return SimpleNamespace(tensor=chunk)

    script.irecv, script.scratch = irecv, lambda name, shape, like: like
    for rank in range(n):
        axis = SimpleNamespace(name="dp", rank=rank, size=n, prev_rank=(rank - 1) % n)
        chunks = [SimpleNamespace(shape=(), number=i) for i in range(n)]
        script.receive_parts(chunks, axis)
        script.receive_sums(chunks, axis)
    holds = [[{rank} for _ in range(n)] for rank in range(n)]  # whose parts are in each chunk
    states = [("start", [[set(chunk) for chunk in rank] for rank in holds], set())]
    for tag, name in (0, "reduce-scatter"), (1, "all-gather"):
        for hop in range(n - 1):
            before = [[set(chunk) for chunk in rank] for rank in holds]
            moved = set()
            for rank in range(n):
                i = asked[rank, tag][hop].number
                arrived = before[(rank - 1) % n][i]
                holds[rank][i] = holds[rank][i] | arrived if tag == 0 else set(arrived)
                moved.add((rank, i))
            states.append((f"{name} {hop + 1}", [[set(c) for c in rank] for rank in holds], moved))
    figure, row = pyplot.subplots(1, len(states), figsize=(10, 2.6))
    for axes, (title, ranks, moved) in zip(row, states):
        for rank, chunks in enumerate(ranks):
            for i, chunk in enumerate(chunks):
                alpha = 0.15 + 0.85 * (len(chunk) - 1) / (n - 1)
                axes.add_patch(Rectangle((i, n - 1 - rank), 1, 1, fc=HUE["dp"], alpha=alpha))
                edge = dict(ec="#c0392b", lw=2) if (rank, i) in moved else dict(ec="white", lw=1)
                axes.add_patch(
                    Rectangle((i + 0.04, n - 0.96 - rank), 0.92, 0.92, fill=False, **edge)
                )
                colour = "white" if len(chunk) == n else "black"
                where = i + 0.5, n - 0.5 - rank
                axes.text(*where, len(chunk), ha="center", va="center", color=colour, fontsize=9)
        axes.set(xlim=(0, n), ylim=(0, n), xticks=[], yticks=[], aspect="equal")
        axes.set_title(title, fontsize=9)
        if title == "start":
            labels = [f"rank {rank}" for rank in reversed(range(n))]
            axes.set_yticks([i + 0.5 for i in range(n)], labels, fontsize=9)
        axes.set_xlabel("chunks", fontsize=8)
    figure.suptitle(
        "How many ranks' parts each chunk holds; what has just come from the rank above is framed",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path / "ring.png", dpi=120)


def predicted(chapter, L, D, F, B, **more):
    """Return what a script's `predict` says of the first rank, in elements."""
    defaults = dict(
        collectives="ring", batch_shares=None, microbatches=1, schedule="1f1b", chunks=2
    )
    defaults |= dict(zero_stage=0, sequence_parallel=False, dp=1, tp=1, pp=1)
    args = SimpleNamespace(layers=L, d_model=D, d_hidden=F, batch_size=B, dtype="bfloat16")
    args.__dict__.update(defaults | more)
    axes = {axis: SimpleNamespace(size=getattr(args, axis), rank=0) for axis in common.AXES}
    return load(SCRIPTS[chapter]).predict(args, SimpleNamespace(**axes)), args


def memory(path):
    """Bytes per rank of weights, gradients and optimizer for the ZeRO paper's 7.5B parameters."""
    L, D = 8, 8192
    F, ranks, n = round(7.5e9 / (L * D * 2)), [1, 4, 16, 64], 4
    parts = {"weights": "#d0d0d0", "gradients": "#909090", "optimizer": HUE["dp"]}
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    labels = []
    for group, dp in enumerate(ranks):
        for stage in range(n):
            costs, args = predicted(5, L, D, F, dp, dp=dp, zero_stage=stage)
            sizes, bottom = common.predicted_costs(costs, args)["memory_bytes"], 0.0
            x = group * (n + 1) + stage
            for part, colour in parts.items():
                axes.bar(x, sizes[part] / 1e9, bottom=bottom, color=colour, width=0.85)
                bottom += sizes[part] / 1e9
            axes.text(x, bottom + 2, f"{bottom:.3g}", ha="center", fontsize=8)
            labels.append((x, f"{stage}" if stage != 1 else f"{stage}\n{' ' * 8}dp {dp}"))
    axes.set_xticks(*zip(*labels))
    axes.set(ylabel="GB per rank", ylim=(0, 135), xlabel="ZeRO stage")
    axes.legend(handles=[Patch(color=c, label=part) for part, c in parts.items()], frameon=False)
    axes.set_title(
        "7.5 billion weights in bfloat16: each stage cuts one more part over dp", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path / "memory.png", dpi=120)


def step_seconds(strategy, n, hw, L, D, F, B, m=1):
    """Return the seconds of a step in closed form, Adam left out. tests/test_replay.py holds the
    replay of the scripts' own traces against it."""
    link = hw.bandwidth if n <= 8 or not hw.between else hw.between

    def ring(elements, rounds):
        return rounds * (n - 1) * (hw.latency + 2 * elements / n / link) if n > 1 else 0.0

    t = 4 * B * D * F / n / hw.flops  # of a forward, or a half of backward, of one layer
    if strategy == "dp":  # behind backward, which is two halves
        r = ring(2 * D * F, 2)
        return L * t + max(2 * L * t + r, 2 * t + L * r)
    if strategy == "zero-3":  # gathers behind forward; a gather and a scatter behind backward
        r = ring(2 * D * F, 1)
        return r + (L - 1) * max(t, r) + t + r + (L - 1) * max(2 * t, 2 * r) + 2 * t + r
    if strategy == "tp":  # exposed in forward, behind the weight half in backward
        r = ring(B * D, 2)
        return L * (t + r) + L * (t + max(t, r))
    move = hw.latency + 2 * (B / m) * D / link
    return (m + n - 1) / m * L * 3 * t + (n > 1) * 2 * (n - 1) * move  # pp, 1f1b


def scaling(path):
    """Model FLOPs utilisation of each cut by itself on 1 to 1024 H100."""
    hw, sizes = common.HARDWARE["h100"], (64, 8192, 32768, 2**20)
    L, D, F, B = sizes
    counts = [2**i for i in range(11)]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for strategy, name, style in (
        ("dp", "02 data parallel", "-"),
        ("tp", "03 tensor parallel", "-"),
        ("pp", "04 pipeline parallel, 256 micro-batches", "-"),
        ("zero-3", "05 ZeRO stage 3", "--"),
    ):
        shown = [n for n in counts if strategy != "pp" or n <= L]
        used = [
            12 * L * B * D * F / n / hw.flops / step_seconds(strategy, n, hw, *sizes, 256)
            for n in shown
        ]
        colour = HUE.get(strategy, HUE["dp"])
        axes.plot(shown, [100 * each for each in used], style, marker="o", color=colour, label=name)
    axes.axvline(8, color="#909090", lw=1, ls=":")
    axes.text(8.4, 3, "one node | many", fontsize=8, color="#606060")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts)
    axes.set(xlabel="H100 GPUs", ylabel="% of peak FLOPs used", ylim=(0, 104))
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.set_title(
        f"Each cut alone: L {L}, D {D}, F {F}, a batch of 2^20 rows, bfloat16", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path / "scaling.png", dpi=120)


def overlap(path):
    """A step of chapter 2 without and with overlap: run it on a link that is slow."""
    sizes = "--layers 6 --d-model 256 --d-hidden 1024 --batch-size 1024"
    figure, panels = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True)
    common.start_up(common.parse_args("02_data_parallel.py", ""))
    for flags, axes in zip((f"{sizes} --no-overlap", sizes), panels):
        script, args, mesh = prepare(2, flags)
        state, history = script.init_state(args, mesh), []
        for step in range(5):
            batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
            history.append(common.timed_step(script.train_step, state, *batch, step, args, mesh))
        chosen = common.median_step(history)
        traces = [None] * dist.get_world_size()
        dist.all_gather_object(traces, history[chosen].trace)
        common.draw_timeline(axes, {f"rank {rank}": trace for rank, trace in enumerate(traces)})
        how = "no overlap" if args.no_overlap else "each layer's ring behind backward"
        axes.set_title(f"{how}: {1e3 * history[chosen].seconds:.0f} ms", fontsize=10, loc="left")
    panels[0].set_xlabel("")
    panels[1].get_legend().remove()
    if dist.get_rank() == 0:
        figure.tight_layout()
        figure.savefig(path / "overlap.png", dpi=120)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sys.argv[1:] = []
    if "RANK" in os.environ:
        overlap(folder)
    else:
        for draw in cuts, ring, memory, scaling:
            draw(folder)
