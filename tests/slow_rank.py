"""What one slow rank costs a synchronous step, and what unequal shares win back: chapter 2 where
the last rank computes each block twice, so it is half as fast as the others.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/slow_rank.py
"""

import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from harness import SCRIPTS, load  # noqa: E402

SIZES = "--layers 4 --d-model 256 --d-hidden 1024 --batch-size 3072"
REPETITIONS = 9


def slow_down(script):
    """Make the script's block functions do their work twice."""
    forward, backward_input = script.block_forward, script.block_backward_input
    backward_weight = script.block_backward_weight

    def weight_twice(x_BD, h_BF, dy_BD, dz_BF, *gradients):
        backward_weight(x_BD, h_BF, dy_BD, dz_BF, *(torch.empty_like(dw) for dw in gradients))
        backward_weight(x_BD, h_BF, dy_BD, dz_BF, *gradients)

    script.block_forward = lambda *operands: [forward(*operands) for _ in range(2)][1]
    script.block_backward_input = lambda *operands: [backward_input(*operands) for _ in range(2)][1]
    script.block_backward_weight = weight_twice


def prepare(script, common, flags):
    sys.argv = [SCRIPTS[2].name, *SIZES.split(), *flags.split()]
    args = common.parse_args(SCRIPTS[2].name, "")
    mesh = common.start_up(args)
    return script.init_state(args, mesh), args, mesh


def seconds(script, common, state, args, mesh, step):
    batch = [script.shard_batch(rows_BD, args, mesh) for rows_BD in common.make_batch(args, step)]
    dist.barrier()
    common.trace.clear()
    start = perf_counter()
    loss, _ = script.train_step(state, *batch, step, args, mesh)
    took = torch.tensor(perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)  # the slowest rank's
    return took.item(), loss.item()


def main():
    script = load(SCRIPTS[2])
    common = sys.modules["common"]
    equal = prepare(script, common, "")
    n = dist.get_world_size()
    shares = ",".join(["2"] * (n - 1) + ["1"])
    unequal = prepare(script, common, f"--batch-shares {shares}")
    normal = [seconds(script, common, *equal, step) for step in range(REPETITIONS)]
    if dist.get_rank() == n - 1:
        slow_down(script)
    slow, shared = [], []
    for step in range(REPETITIONS):  # in turn, so that both see the same machine
        slow.append(seconds(script, common, *equal, REPETITIONS + step))
        shared.append(seconds(script, common, *unequal, step))
    for (_, loss), (_, same) in zip(normal, shared):  # unequal shares change no result
        if abs(loss - same) > 1e-3 * loss:
            raise SystemExit(f"the losses differ: {loss}, {same}")
    alone = statistics.median(took for took, _ in normal)
    for what, steps, theory in (
        ("all ranks equally fast", normal, 1.0),
        ("the last at half speed", slow, 2.0),
        (f"the same, --batch-shares {shares}", shared, 2 * n / (2 * n - 1)),
    ):
        took = statistics.median(took for took, _ in steps)
        common.print0(
            f"{what:32} {1e3 * took:6.1f} ms  {took / alone:.2f} times the first"
            f" (compute alone: {theory:.2f})"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
