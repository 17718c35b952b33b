"""The collectives by themselves: sums, sizes, dtypes, bytes, and what must be refused."""

import sys
import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from harness import prepare


def ring_cases(flags):
    script, args, mesh = prepare(2, flags)
    common, axis = sys.modules["common"], mesh.dp
    for size in (0, 1, 2, 3, 7, 64, 1001):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            for name in ("ring", "naive", "torch"):
                args.collectives = name
                tensor = torch.arange(size).to(dtype) + axis.rank
                common.trace.clear()
                script.all_reduce(tensor, axis, args)
                wanted = torch.arange(size) * axis.size + sum(range(axis.size))
                tolerance = {"rtol": 0.02, "atol": 0} if dtype is torch.bfloat16 else {}
                torch.testing.assert_close(tensor, wanted.to(dtype), **tolerance)
                if name != "torch":
                    sent = sum(s.bytes for s in common.trace)
                    elements = script.all_reduce_elements(size, axis, args)
                    assert sent == elements * tensor.element_size()
    # Halves, on rows: each rank's own chunk holds the sum; then all hold all of it.
    script, _, _ = prepare(5, flags)
    rows = torch.arange(14.0).reshape(7, 2) * (axis.rank + 1)
    chunks = script.cut(rows, axis.size)
    total = torch.arange(14.0).reshape(7, 2) * sum(range(1, axis.size + 1))
    script.ring_reduce_scatter(chunks, axis)
    torch.testing.assert_close(chunks[axis.rank], script.cut(total, axis.size)[axis.rank])
    script.ring_all_gather(chunks, axis)
    torch.testing.assert_close(rows, total)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_sums_and_bytes(group, ranks):
    group(ranks).run(ring_cases, "")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_papers(ranks):
    """The formula itself: 2(n-1)/n in a ring; 2(n-1) moved by rank 0 of a parameter server."""
    from types import SimpleNamespace

    from harness import SCRIPTS, load

    script, size = load(SCRIPTS[2]), 12 * 7
    for rank in range(ranks):
        axis = SimpleNamespace(rank=rank, size=ranks)
        ring = script.all_reduce_elements(size, axis, SimpleNamespace(collectives="ring"))
        assert ring * ranks == 2 * (ranks - 1) * size
        assert script.ring_elements(size, axis) == (ring / 2, ring / 2)
    # Sent: (n-1) by rank 0, 1 by each other; rank 0 receives as much again.
    naive = SimpleNamespace(collectives="naive")
    axis = SimpleNamespace(rank=0, size=ranks)
    assert script.all_reduce_elements(size, axis, naive) == (ranks - 1) * size


def refuses_strided(flags):
    _, _, mesh = prepare(2, flags)
    strided = torch.zeros(4, 6)[:, :3]
    for act in sys.modules["common"].isend, sys.modules["common"].irecv:
        with pytest.raises(RuntimeError, match="contiguous"):
            act(strided, 0, mesh.dp)
    return True


def test_a_view_with_gaps_is_refused(group):
    group(2).run(refuses_strided, "")


def with_random_delays(seed):
    """Three steps of chapter 5 with sleeps thrown in at every message; return the weights."""
    script, args, mesh = prepare(5, "--zero-stage 3 --steps 3 --layers 4 --dtype float64 --tp 2")
    common, random = sys.modules["common"], Random(seed * 100 + dist.get_rank())
    isend = script.isend

    def late_isend(*operands, **more):
        time.sleep(random.choice([0, 0, 1e-4, 2e-3]))
        return isend(*operands, **more)

    script.isend = late_isend
    state = script.init_state(args, mesh)
    for step in range(args.steps):
        batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
        script.train_step(state, *batch, step, args, mesh)
    script.isend = isend
    return state.master


def test_timing_does_not_change_a_bit(group):
    first = group(4).run(with_random_delays, 0)
    for seed in range(1, 20):
        for a, b in zip(first, group(4).run(with_random_delays, seed)):
            assert torch.equal(a, b)
