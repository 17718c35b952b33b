"""Every script at every layout trains to one device's weights, step by step, and sends and holds to
the byte what the formulas say."""

import itertools
import re

import pytest
from harness import train

EIGHT = pytest.param(8, marks=pytest.mark.slow)
ODD = "--dtype float64 --layers 5 --d-model 7 --d-hidden 10 --batch-size 26 --steps 3"


def check(group, one_device, chapter, ranks, flags, base=ODD, limit=1e-10):
    """Train at a layout and compare every rank with one device; return all ranks' results."""
    expected = one_device(re.sub(r" --microbatches \d+", "", base))
    results = group(ranks).run(train, chapter, f"{base} {flags}", expected["weights"])
    for rank, result in enumerate(results):
        where = f"chapter {chapter}, rank {rank} of {ranks}: {flags}"
        assert result["start"] == 0, f"{where}: starts with other weights"
        assert max(result["weights"]) <= limit, f"{where}: weights {result['weights']}"
        assert result["losses"] == pytest.approx(expected["losses"], rel=limit, abs=0), where
        assert result["norms"] == pytest.approx(expected["norms"], rel=limit, abs=0), where
        if "torch" not in flags:
            predicted = result["predicted"]
            assert all(sent == predicted["sent"] for sent in result["sent"]), (
                f"{where}: sent {result['sent']}, predicted {predicted['sent']}"
            )
            assert result["memory_bytes"] == predicted["memory_bytes"], where
            assert result["microbatches_alive"] == predicted["microbatches_alive"], where
    return results


def layouts(ranks):
    """All (dp, tp, pp) with dp x tp x pp ranks."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(ranks // (tp * pp), tp, pp) for tp in sizes for pp in sizes if ranks % (tp * pp) == 0]


@pytest.mark.parametrize("m", [1, 3, 30])
def test_one_device_with_microbatches(group, one_device, m):
    check(group, one_device, 1, 1, f"--microbatches {m}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_data_parallel(group, one_device, ranks):
    shares = {2: ["--batch-shares 3,1"], 3: ["--batch-shares 1,2,1"]}.get(ranks, [])
    for collectives, overlap, m, share in itertools.product(
        ["ring", "naive", "torch"], ["", "--no-overlap"], [1, 4], ["", *shares]
    ):
        flags = f"--collectives {collectives} {overlap} --microbatches {m} {share}"
        check(group, one_device, 2, ranks, flags)


def test_fewer_rows_than_ranks(group, one_device):
    check(group, one_device, 2, 4, "", ODD.replace("26", "3"))
    check(group, one_device, 2, 4, "", ODD.replace("26", "1"))


@pytest.mark.parametrize("ranks", [2, 3, 4, EIGHT])
def test_tensor_parallel(group, one_device, ranks):
    for tp in {ranks, 2 if ranks % 2 == 0 else 1}:
        for flags in ["", "--sequence-parallel", "--no-overlap", "--microbatches 4"]:
            check(group, one_device, 3, ranks, f"--tp {tp} {flags}")
        check(group, one_device, 3, ranks, f"--tp {tp} --sequence-parallel --microbatches 8")
        check(group, one_device, 3, ranks, f"--tp {tp} --collectives naive")
        check(group, one_device, 3, ranks, f"--tp {tp} --collectives torch")


def test_sizes_that_divide(group, one_device):
    base = "--dtype float64 --layers 4 --d-model 8 --d-hidden 96 --batch-size 24 --steps 3"
    check(group, one_device, 3, 3, "--tp 3", base)
    check(group, one_device, 3, 3, "--tp 3 --sequence-parallel", base)


@pytest.mark.parametrize("ranks", [2, 3, 4, EIGHT])
def test_pipeline_parallel(group, one_device, ranks):
    for _, tp, pp in layouts(ranks):
        for schedule, m in itertools.product(
            ["gpipe", "1f1b", "zb-h1", "interleaved"], [1, 2, 4, 8]
        ):
            if pp == 1 and (schedule, m) != ("1f1b", 4) or schedule == "interleaved" and m % pp:
                continue
            flags = f"--tp {tp} --pp {pp} --schedule {schedule} --microbatches {m}"
            # Half of the cases with rows cut over tp, so that all pairs of choices occur.
            rows_cut = tp > 1 and (m in (2, 8)) == (schedule in ("gpipe", "zb-h1"))
            check(group, one_device, 4, ranks, flags + " --sequence-parallel" * rows_cut)


def test_chunks_and_more_stages_than_layers(group, one_device):
    check(group, one_device, 4, 4, "--pp 4 --schedule interleaved --chunks 3 --microbatches 4")
    check(
        group, one_device, 4, 4, "--pp 4 --microbatches 3", ODD.replace("--layers 5", "--layers 3")
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, EIGHT])
def test_zero(group, one_device, ranks, stage):
    for _, tp, pp in layouts(ranks):
        schedules = ["gpipe", "1f1b", "zb-h1", "interleaved"] if pp > 1 else ["1f1b"]
        for schedule in schedules:
            m = 2 * pp if schedule in ("zb-h1", "interleaved") else 2
            flags = f"--zero-stage {stage} --tp {tp} --pp {pp} --schedule {schedule}"
            check(group, one_device, 5, ranks, f"{flags} --microbatches {m}")
        if tp > 1 and stage:
            check(group, one_device, 5, ranks, f"{flags} --microbatches {m} --sequence-parallel")


def test_zero_without_overlap(group, one_device):
    for stage in 1, 2, 3:
        check(group, one_device, 5, 4, f"--zero-stage {stage} --no-overlap --microbatches 2")


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_other_dtypes(group, one_device, dtype, limit):
    base = f"--dtype {dtype} --layers 4 --d-model 32 --d-hidden 48 --batch-size 64 --steps 3"
    check(group, one_device, 2, 4, "", base, limit)
    check(group, one_device, 4, 8, "--tp 2 --pp 2 --microbatches 4", base, limit)
    for stage in 1, 2, 3:
        check(group, one_device, 5, 4, f"--zero-stage {stage} --tp 2", base, limit)


def test_without_the_sum_the_weights_differ(group, one_device):
    """The comparison above can fail: shares of the batch alone train to other weights."""
    expected = one_device(ODD)
    alone = group(2).run(train_without_sums, f"{ODD}", expected["weights"])
    assert all(min(result["weights"]) > 1e-4 for result in alone)


def train_without_sums(flags, reference):
    from harness import SCRIPTS, load, scripts

    scripts[2] = load(SCRIPTS[2])
    scripts[2].all_reduce = lambda tensor, axis, args: None
    result = train(2, flags, reference)
    del scripts[2]
    return result


def test_stage_3_has_at_most_two_layers_whole(group):
    """Of weights, and of gradients, for an odd number of layers and two passes."""
    layer = 7 * 2 * 10 * 8  # bytes
    for result in group(4).run(train, 5, f"{ODD} --zero-stage 3 --microbatches 2"):
        assert result["memory_bytes"]["buffers"] == 4 * layer
