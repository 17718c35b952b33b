"""Runs chapter 4's schedules over real messages, each block replaced by a sleep of its length, and
draws them:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 tests/sleeping_schedules.py FILE.png

A machine with fewer cores than stages makes them take turns, and hides the bubble. Asleep, they
need no core, so the timeline is what a machine with a core (or GPU) for each stage would show."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from harness import SCRIPTS, load  # noqa: E402

SLEEP = 0.025  # seconds; long against the 0.2 ms that a message takes, for F, B or W of a stage


def fall_asleep(script, common, seconds):
    """Make each of the script's block functions last so long; return how to undo it."""
    names = "block_forward", "block_backward_input", "block_backward_weight"
    originals = {name: getattr(script, name) for name in names}

    def sleeping(function):
        def block(*tensors):
            start = time.perf_counter()
            result = function(*tensors)
            time.sleep(max(0, start + seconds - time.perf_counter()))
            common.trace[-1] = common.trace[-1]._replace(end=time.perf_counter())
            return result

        return block

    for name in names:
        setattr(script, name, sleeping(originals[name]))
    return lambda: [setattr(script, name, originals[name]) for name in names]


def measure(script, common, args, mesh, blocks=2, steps=3, sleep=SLEEP):
    """Return (makespan and mean compute time in seconds, predicted bubble, all ranks' traces) of
    the best of some steps. A stage of so many blocks sleeps `sleep` seconds for each F, B or W."""
    wake_up = fall_asleep(script, common, sleep / blocks)
    state = script.init_state(args, mesh)
    best = None
    for step in range(steps):
        batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
        dist.barrier()
        common.trace.clear()
        start = time.perf_counter()
        script.train_step(state, *batch, step, args, mesh)
        mine = [s._replace(start=s.start - start, end=s.end - start) for s in common.trace]
        traces = [None] * dist.get_world_size()
        dist.all_gather_object(traces, mine)
        _, busy, bubble = common.pipeline_times(traces)
        span = busy * (1 + bubble)
        if best is None or span < best[0]:
            best = span, busy, traces
    wake_up()
    return best[0], best[1], script.predict(args, mesh)["bubble"], best[2]


FLAGS = "--layers 8 --d-model 16 --d-hidden 16 --batch-size 32 --microbatches 8"


def main():
    figure_path = sys.argv[1]
    script = load(SCRIPTS[4])
    common = sys.modules["common"]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    schedules = ["gpipe", "1f1b", "interleaved", "zb-h1"]
    figure, panels = pyplot.subplots(4, 1, figsize=(9, 9), sharex=True)
    for schedule, axes in zip(schedules, panels):
        sys.argv = [
            "04_pipeline_parallel.py",
            "--plot",
            "none",
            "--schedule",
            schedule,
            *FLAGS.split(),
        ]
        args = common.parse_args("04_pipeline_parallel.py", "")
        mesh = common.start_up(args) if schedule == "gpipe" else common.make_mesh(args)
        span, busy, predicted, traces = measure(script, common, args, mesh)
        makespan = 3 * args.microbatches * SLEEP * (1 + predicted)
        common.print0(
            f"{schedule:12} {1e3 * span:5.0f} ms (theory {1e3 * makespan:.0f})   bubble / compute"
            f" {span / busy - 1:.3f} (theory {predicted:.3f})"
        )
        first = min(s.start for trace in traces for s in trace if s.flops)
        for rank, trace in enumerate(traces):
            for s in trace:
                if s.flops:
                    box = [(1e3 * (s.start - first), 1e3 * (s.end - s.start))]
                    axes.broken_barh(box, (rank - 0.4, 0.8), color=common.COLOURS[s.name], lw=0)
            moved = [s._replace(start=s.start - first, end=s.end - first) for s in trace]
            common.label_microbatches(axes, moved, rank)
        axes.axvline(1e3 * makespan, color="k", ls="--")
        axes.set_yticks(range(args.pp), [f"stage {i}" for i in range(args.pp)])
        axes.invert_yaxis()
        title = f"{schedule}: bubble {100 * (span / busy - 1):.1f} % of the compute time"
        axes.set_title(f"{title}, predicted {100 * predicted:.1f} %", loc="left", fontsize=10)
    names = {"forward": "F", "backward input": "B, input half", "backward weight": "B, weight half"}
    legend = [Patch(color=common.COLOURS[name], label=label) for name, label in names.items()]
    legend.append(pyplot.Line2D([], [], color="k", ls="--", label="predicted end"))
    figure.legend(handles=legend, ncols=4, loc="upper right", frameon=False)
    panels[-1].set_xlabel("ms; compute replaced by sleeping 25 ms for each F, B and W of a stage")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    if dist.get_rank() == 0:
        Path(figure_path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(figure_path, dpi=110)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
