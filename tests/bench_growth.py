"""Measures how the cost of a step grows with the work, and draws it with the formula's line:

    OMP_NUM_THREADS=1 python tests/bench_growth.py FILE.png

Time against D, rows, layers and ranks, and memory per rank against ranks for each ZeRO stage. The
formula's speeds come from one point each, which therefore says nothing: C from what the largest D
computes, W from the step of two ranks.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import matplotlib
import torch.distributed as dist

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from harness import Group, prepare  # noqa: E402

BASE = {"layers": 4, "d-model": 256, "d-hidden": 1024, "batch-size": 256}
STEPS = 7
CORES = len(os.sched_getaffinity(0))
STAGES = {0: "#b0b0b0", 1: "#8ab4e8", 2: "#3b7dd8", 3: "#1d4e96"}


def cost(chapter, flags):
    """Return this rank's median step and its compute in seconds, its bytes sent, and what it holds
    in bytes, measured and predicted."""
    script, args, mesh = prepare(chapter, flags)
    common = sys.modules["common"]
    state, seconds, compute = script.init_state(args, mesh), [], []
    for step in range(STEPS):
        batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
        common.trace.clear()
        dist.barrier()
        start = time.perf_counter()
        script.train_step(state, *batch, step, args, mesh)
        seconds.append(time.perf_counter() - start)
        compute.append(sum(s.end - s.start for s in common.trace if s.axis is None))
    held = state.weights, state.grads, state.master, state.exp_avg, state.exp_avg_sq
    predicted = common.predicted_costs(script.predict(args, mesh), args)["memory_bytes"]
    return {
        "seconds": statistics.median(seconds[2:]),
        "compute": statistics.median(compute[2:]),
        "sent": sum(s.bytes for s in common.trace),
        "held": common.storage_bytes(*held),
        "predicted": sum(predicted[what] for what in ("weights", "gradients", "optimizer")),
    }


def flags(**sizes):
    return " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())


def flops(**sizes):
    """12 B D F of each layer: 4 forward, 8 backward."""
    L, D, F, B = sizes.values()
    return 12 * L * B * D * F


def measure(group, name, values):
    """Return [(sizes, cost)] of chapter 1 as one size grows; F stays 4 D."""
    found = []
    for value in values:
        sizes = BASE | {name: value}
        sizes["d-hidden"] = 4 * sizes["d-model"]
        (mine,) = group.run(cost, 1, flags(**sizes))
        found.append((sizes, mine))
    return found


def main():
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.5))
    panels = list(axes.flat)
    one = Group(1)
    speed = None
    grown = {"d-model": [64, 128, 256, 512], "batch-size": [64, 128, 256, 512, 1024]}
    grown["layers"] = [2, 4, 8, 16]
    for panel, (name, values) in zip(panels, grown.items()):
        found = measure(one, name, values)
        works = [flops(**sizes) for sizes, _ in found]
        speed = speed or works[-1] / found[-1][1]["compute"]
        line(panel, values, [1e3 * work / speed for work in works], "12 L B D F / C")
        dots(panel, values, [1e3 * mine["seconds"] for _, mine in found], "step")
        panel.set(xlabel=name.replace("-", " "), ylabel="ms")
        for value, (_, mine), work in zip(values, found, works):
            step = f"{1e3 * mine['seconds']:.1f} ms"
            print(f"{name} {value}: {step}, {mine['seconds'] / (work / speed):.2f} of the formula")
    one.close()

    ranks, panel, bandwidth = [1, 2, 4], panels[3], None
    groups = {n: Group(n) for n in [*ranks, 8]}
    times, theory = [], []
    for n in ranks:
        mine = groups[n].run(cost, 2, flags(**BASE))[0]
        at_once = min(n, CORES)  # ranks that compute side by side; the others wait for a turn
        computing = flops(**BASE) / speed / at_once
        if n > 1:
            bandwidth = bandwidth or mine["sent"] / max(1e-9, mine["seconds"] - computing)
        theory.append(1e3 * (computing + (mine["sent"] / bandwidth if n > 1 else 0)))
        times.append(1e3 * mine["seconds"])
        share = "W is from here" if n == 2 else f"{times[-1] / theory[-1]:.2f} of the formula"
        print(f"ranks {n}: {times[-1]:.1f} ms, {share}")
    line(panel, ranks, theory, f"on {CORES} cores, sending at W")
    dots(panel, ranks, times, "step of chapter 2")
    panel.set(xlabel="ranks", ylabel="ms")

    panel = panels[4]
    for stage, colour in STAGES.items():
        costs = {n: groups[n].run(cost, 5, f"--zero-stage {stage}")[0] for n in groups}
        line(panel, costs, [mine["predicted"] / 2**20 for mine in costs.values()], None, colour)
        held = [mine["held"] / 2**20 for mine in costs.values()]
        dots(panel, costs, held, f"ZeRO stage {stage}", colour)
        print(f"stage {stage}: {', '.join(f'{mb:.2f}' for mb in held)} MB on {list(costs)} ranks")
    panel.set(xlabel="ranks", ylabel="MB of weights, gradients, Adam")
    for group in groups.values():
        group.close()
    for panel in panels[:5]:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:.3g}")
        panel.legend(frameon=False, fontsize=8)
    panels[5].axis("off")
    figure.suptitle("How the cost grows: dots are measured, lines are the formula")
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=120)


def line(panel, x, y, label, colour="k"):
    panel.plot(list(x), y, "-", lw=1, color=colour, label=label)


def dots(panel, x, y, label, colour="#3b7dd8"):
    panel.plot(list(x), y, "o", color=colour, label=label)


if __name__ == "__main__":
    main()
