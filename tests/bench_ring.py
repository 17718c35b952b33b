"""Times the hand-written ring against torch's all_reduce, call by call in turn, in one group.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_ring.py

With a rate (in Gbit/s per rank) it also prints the share of the bound 2(n-1)/n V / W that the ring
reaches. The rate is not set here: run it on a link that has it, e.g. two ranks at 1 Gbit/s each,

    unshare -n bash -c 'ip link set lo up
        tc qdisc add dev lo root tbf rate 2gbit burst 256kb latency 50ms
        OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/bench_ring.py 1'
"""

import importlib.util
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402

SIZES = [1, 8, 64]  # MB
REPETITIONS = {1: 100, 8: 40, 64: 9}


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(collective, tensor, axis):
    dist.barrier()
    start = perf_counter()
    collective(tensor, axis)
    took = torch.tensor(perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)  # the slowest rank's
    common.trace.clear()
    return took.item()


def main():
    rate = float(sys.argv[1]) * 1e9 / 8 if len(sys.argv) > 1 else None
    chapter = load("02_data_parallel")
    sys.argv[1:] = []
    args = common.parse_args("02_data_parallel.py", "")
    axis = common.start_up(args).dp
    both = chapter.ring_all_reduce, chapter.torch_all_reduce
    for size in SIZES:
        tensor = torch.ones(size * 2**20 // 4)
        times = []
        for _ in range(3):
            for collective in both:
                collective(tensor, axis)
        for repetition in range(REPETITIONS[size] if not rate else 6):
            took = {}
            # What ran before may have left the cores slow or the caches warm: in turn.
            for collective in both if repetition % 2 else reversed(both):
                tensor.fill_(1)
                took[collective] = seconds(collective, tensor, axis)
                if tensor[[0, -1]].tolist() != [axis.size] * 2:
                    raise SystemExit("the sum is wrong")
            times.append([took[collective] for collective in both])
        ours, theirs = (statistics.median(column) for column in zip(*times))
        low, _, high = statistics.quantiles([a / b for a, b in times], n=4)
        line = f"{size:3d} MB  ring {1e3 * ours:7.2f} ms  torch {1e3 * theirs:7.2f} ms"
        line += f"  ratio of medians {ours / theirs:.2f} (quartiles {low:.2f}-{high:.2f})"
        if rate:
            bound = 2 * (axis.size - 1) / axis.size * tensor.nbytes / rate
            line += f"  share of the bound {bound / ours:.3f}"
        common.print0(line)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
