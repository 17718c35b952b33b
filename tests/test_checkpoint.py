"""What one script saves at one layout, any other goes on with at any other."""

import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import SCRIPTS, run_to_the_end

SIZES = "--layers 5 --d-model 7 --d-hidden 12 --batch-size 8"


def run(chapter, ranks, flags, folder, steps=None):
    """Run to the end; return (losses by step, what rank 0 printed)."""
    metrics = folder / "metrics.json"
    results = run_to_the_end(SCRIPTS[chapter], f"{flags} --metrics {metrics}", ranks)
    assert {code for code, _, _ in results} == {0}, results
    return json.loads(metrics.read_text())["losses"], results[0][1]


def saved(folder, step, dtype):
    """Load a checkpoint in this one process, as anybody could; return {key: tensor}."""
    path = folder / f"step-{step}"
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(7, 12, dtype=dtype) for key in known if key != "step"}
    tensors["step"] = torch.tensor(0)
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


# From each chapter to others, with layouts, stages and schedules that cut differently.
WAYS = [
    ("float64", (1, 1, ""), (5, 8, "--tp 2 --pp 2 --zero-stage 3 --microbatches 2")),
    ("float64", (5, 8, "--tp 2 --pp 2 --zero-stage 1 --microbatches 2"), (2, 3, "")),
    ("float64", (2, 2, ""), (3, 3, "--tp 3")),
    ("float64", (3, 4, "--tp 2 --sequence-parallel"), (4, 3, "--microbatches 3")),
    ("float64", (4, 2, "--schedule interleaved --microbatches 2"), (4, 3, "--schedule zb-h1")),
    ("float64", (4, 3, "--schedule gpipe"), (5, 4, "--zero-stage 2")),
    ("float64", (5, 4, "--zero-stage 2 --tp 2"), (1, 1, "")),
    ("bfloat16", (1, 1, ""), (5, 4, "--zero-stage 1")),
    ("bfloat16", (5, 4, "--zero-stage 1"), (5, 2, "--zero-stage 3")),
    ("bfloat16", (5, 4, "--zero-stage 3"), (5, 2, "--zero-stage 2")),
    ("bfloat16", (5, 2, "--zero-stage 2"), (4, 2, "")),
    ("float32", (4, 2, ""), (5, 4, "--zero-stage 1 --tp 2")),
]


@pytest.mark.parametrize("dtype, first, second", WAYS)
def test_any_goes_on_with_any(tmp_path, dtype, first, second):
    (chapter, ranks, flags), (then, ranks_then, flags_then) = first, second
    base = f"{SIZES} --dtype {dtype} --checkpoint {tmp_path}"
    losses, _ = run(chapter, ranks, f"{base} --steps 3 {flags}", tmp_path)
    more, printed = run(then, ranks_then, f"{base} --steps 6 {flags_then}", tmp_path)
    assert f"resumed from {tmp_path}/step-3" in printed and len(more) == 3
    whole, _ = run(1, 1, f"{SIZES} --dtype {dtype} --steps 6", tmp_path)
    close = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert losses + more == pytest.approx(whole, rel=close)


# Chapter, ranks at first, ranks that are left, flags: then more weights fall to each.
FEWER = [
    (4, 4, 2, "--schedule zb-h1"),
    (5, 4, 2, "--zero-stage 3"),
    pytest.param(2, 4, 2, "--microbatches 2", marks=pytest.mark.slow),
    pytest.param(3, 4, 2, "--sequence-parallel", marks=pytest.mark.slow),
    pytest.param(5, 8, 3, "--zero-stage 1", marks=pytest.mark.slow),
    pytest.param(5, 8, 4, "--zero-stage 2 --tp 2 --pp 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("chapter, many, few, flags", FEWER)
def test_goes_on_with_fewer_ranks(tmp_path, chapter, many, few, flags):
    """The weights and Adam's state in the end are those of a run that kept its ranks."""
    flags = f"{SIZES} --dtype float64 {flags}"
    for folder, ranks, steps in ("calm", many, 6), ("shrunk", many, 3), ("shrunk", few, 6):
        more = f"--steps {steps} --checkpoint {tmp_path / folder}"
        _, printed = run(chapter, ranks, f"{flags} {more}", tmp_path)
    assert f"resumed from {tmp_path / 'shrunk'}/step-3" in printed
    calm, shrunk = (saved(tmp_path / folder, 6, torch.float64) for folder in ("calm", "shrunk"))
    assert calm.pop("step") == shrunk.pop("step") == 6 and calm.keys() == shrunk.keys()
    for key, tensor in calm.items():
        assert (tensor - shrunk[key]).norm() <= 1e-10 * tensor.norm(), key


def test_form(tmp_path):
    """The contract: weights and Adam's state of the whole model, named by layer, and the step."""
    flags = f"{SIZES} --dtype bfloat16 --steps 3 --save-every 1 --checkpoint {tmp_path}"
    run(5, 4, f"{flags} --tp 2 --zero-stage 3", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["step-2", "step-3"]
    tensors = saved(tmp_path, 3, torch.float32)
    names = [f"layers.{l}.{w}" for l in range(5) for w in ("w_in", "w_out")]
    adam = [f"adam.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    assert set(tensors) == {*names, *adam, "step"} and tensors.pop("step") == 3
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    # float32 master weights, not bfloat16's: some need more digits.
    assert any((tensors[name] != tensors[name].bfloat16()).any() for name in names)


def test_size(tmp_path):
    """Each part is written once, and alone: not with the whole tensor that it is a view of."""
    sizes = "--layers 2 --d-model 64 --d-hidden 512 --batch-size 8"
    run(5, 4, f"{sizes} --steps 1 --tp 2 --zero-stage 1 --checkpoint {tmp_path}", tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp"))
    assert 1 <= size / (2 * 64 * 2 * 512 * 4 * 3) < 1.2


def test_a_half_written_one_is_not_used(tmp_path):
    flags = f"{SIZES} --dtype float64 --checkpoint {tmp_path}"
    run(2, 2, f"{flags} --steps 2", tmp_path)
    (tmp_path / "unfinished-3").mkdir()
    (tmp_path / "step-old").mkdir()
    _, printed = run(2, 2, f"{flags} --steps 4", tmp_path)
    assert re.search(r"resumed from .*/step-2\n", printed)


def test_none_left_to_do(tmp_path):
    flags = f"{SIZES} --dtype float64 --steps 2 --checkpoint {tmp_path}"
    run(2, 2, flags, tmp_path)
    losses, printed = run(2, 2, flags, tmp_path)
    assert losses == [] and "no steps" in printed


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--layers 4", "has L, D, F (5, 7, 12), this run (4, 7, 12)"),
        ("--d-model 8", "this run (5, 8, 12)"),
        ("--steps 1", "is past --steps 1"),
    ],
)
def test_one_that_does_not_fit(tmp_path, flags, says):
    run(2, 2, f"{SIZES} --steps 2 --checkpoint {tmp_path}", tmp_path)
    results = run_to_the_end(SCRIPTS[2], f"{SIZES} --checkpoint {tmp_path} {flags}", 2)
    assert [code for code, _, _ in results] == [2, 2]
    assert results[0][2].count("\n") == 1 and says in results[0][2], results[0][2]


def test_one_that_is_damaged(tmp_path):
    run(2, 2, f"{SIZES} --steps 2 --checkpoint {tmp_path}", tmp_path)
    for path in (tmp_path / "step-2").glob("*.distcp"):
        path.unlink()
    results = run_to_the_end(SCRIPTS[5], f"{SIZES} --checkpoint {tmp_path}", 2)
    assert [code for code, _, _ in results] == [2, 2]
    assert "cannot load" in results[0][2] and results[0][2].count("\n") == 1, results[0][2]
