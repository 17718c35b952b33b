"""Times steps with and without writing down spans, in turn, in one process group:

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_trace.py CHAPTER [FLAGS]
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from harness import SCRIPTS, load  # noqa: E402

STEPS = 120


def main():
    path, flags = SCRIPTS[int(sys.argv[1])], sys.argv[2:]
    script = load(path)
    common = sys.modules["common"]
    sys.argv = [path.name, "--plot", "none", *flags]
    args = common.parse_args(path.name, "")
    mesh = common.start_up(args)
    state = script.init_state(args, mesh)
    span, number, times = common.span, common.number, {True: [], False: []}
    for step in range(STEPS):
        traced = step % 2 == 0
        common.span = span if traced else lambda *_, **__: contextlib.nullcontext()
        common.number = number if traced else lambda *key: key
        batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
        dist.barrier()
        common.trace.clear()
        start = time.perf_counter()
        script.train_step(state, *batch, step, args, mesh)
        times[traced].append(time.perf_counter() - start)
    traced, plain = (statistics.median(times[key][5:]) for key in (True, False))
    low, _, high = statistics.quantiles([a / b for a, b in zip(*times.values())][5:], n=4)
    common.print0(
        f"{path.stem}  traced {1e3 * traced:.2f} ms  untraced {1e3 * plain:.2f} ms"
        f"  ratio of medians {traced / plain:.3f} (quartiles {low:.3f}-{high:.3f})"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
