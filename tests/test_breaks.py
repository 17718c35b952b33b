"""The check at the end of a run fails when a copy of a script is broken, and says how."""

import pytest
from harness import SCRIPTS, edit, run_to_the_end

SMALL = "--layers 4 --d-model 16 --d-hidden 24 --batch-size 24 --steps 4 --dtype float64"

# chapter, flags, line, what is done to it instead, what the check must say differs
EDITS = {
    "average instead of sum": (
        2,
        "",
        "    by_name[args.collectives](tensor, axis)\n",
        "    by_name[args.collectives](tensor, axis)\n    tensor /= axis.size\n",
        "gradient norms",
    ),
    "skip one layer's all-reduce": (
        2,
        "",
        "    if last:\n",
        "    if last and l != 2:\n",
        "weights",
    ),
    "sum every micro-batch": (2, "--microbatches 2", "    if last:\n", "    if True:\n", "over dp"),
    "divide by the local batch": (
        2,
        "",
        "size = args.batch_size * args.d_model",
        "size = len(y_BD) * args.d_model",
        "losses",
    ),
    "clip by the norm of the local gradient": (
        2,
        "--no-overlap",
        "        start(all_reduce, state.grads[l], mesh.dp, args)\n",
        "        l or norms.append(state.grads.norm().double())\n"
        "        start(all_reduce, state.grads[l], mesh.dp, args)\n",
        "gradient norms",
    ),
    "overlap without the join": (2, "", "    join(mesh.dp)\n", "", "weights"),
    "no all-reduce of dx": (
        3,
        "",
        "        start(sum_rows, dx_BD, mesh.tp, args)",
        "        #",
        "gradient norms",
    ),
    "all-reduce of y over the wrong axis": (
        3,
        "--tp 2",
        "sum_rows(y_BD, mesh.tp, args)",
        "sum_rows(y_BD, mesh.dp, args)",
        "losses",
    ),
    "norm over the wrong axis": (
        3,
        "--tp 2",
        "sum_over(square, mesh.tp)",
        "sum_over(square, mesh.dp)",
        "gradient norms",
    ),
    "norm not summed over the stages": (
        4,
        "",
        "    square = sum_over(square, mesh.pp)\n",
        "",
        "gradient norms",
    ),
    "the residual added on every tp rank": (
        3,
        "",
        "        x_BD = x_BD + y_BD\n",
        "        x_BD = x_BD * args.tp + y_BD\n",
        "losses",
    ),
    "loss divided by the micro-batch": (
        4,
        "",
        "size = args.batch_size * args.d_model",
        "size = len(y_BD) * args.d_model",
        "gradient norms",
    ),
    "a send's buffer reused before it left": (
        4,
        "--schedule gpipe",
        "        rows = my_rows(tensor, mesh.tp, args)\n        sent",
        "        rows = scratch('send', tensor.shape, tensor).copy_(tensor)\n        sent",
        "losses",
    ),
    "weight half skipped for the last micro-batch": (
        4,
        "--schedule zb-h1",
        "            for l, half in later.pop((i, chunk)):\n",
        "            for l, half in [] if last else later.pop((i, chunk)):\n",
        "gradient norms",
    ),
    "gradients not scattered before the update": (
        5,
        "--zero-stage 1",
        "        start(scatter, grads, grads, mesh.dp, args)\n",
        "        pass\n",
        "gradient norms",
    ),
    "the next gather into the buffer in use": (
        5,
        "--zero-stage 3",
        'layer_buffer(f"weights {l % 2}", state, args)',
        'layer_buffer("weights", state, args)',
        "losses",
    ),
    "weights not gathered after the update": (
        5,
        "--zero-stage 1",
        "            start(gather, mine, full, mesh.dp, args)\n",
        "            pass\n",
        "losses",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_the_check_fails(tmp_path, name):
    chapter, flags, old, new, what = EDITS[name]
    path = edit(tmp_path, SCRIPTS[chapter], old, new)
    if "local gradient" in name:
        text = path.read_text().replace("norm = square.sqrt()", "norm = norms.pop()")
        path.write_text(text.replace("def update(", "norms = []\n\n\ndef update("))
    ranks = run_to_the_end(path, f"{SMALL} {flags}", 4)
    out = ranks[0][1]
    assert [code for code, _, _ in ranks] == [1] * 4, f"{out}\n{ranks[0][2]}"
    assert "FAILED" in out and what in out, out
    assert "OK" not in out


def test_a_seed_per_rank(tmp_path):
    common = SCRIPTS[2].parent / "common.py"
    old = "manual_seed(args.seed)"
    path = edit(tmp_path, SCRIPTS[2], old, "manual_seed(args.seed + dist.get_rank())", common)
    ranks = run_to_the_end(path, SMALL, 4)
    assert [code for code, _, _ in ranks] == [1] * 4
    assert "weights differ from one device" in ranks[0][1]


@pytest.mark.parametrize("chapter", [1, 2, 3, 4, 5])
def test_and_passes_without(chapter):
    ranks = run_to_the_end(SCRIPTS[chapter], SMALL, 4 if chapter > 1 else 1)
    assert {(code, err) for code, _, err in ranks} == {(0, "")}
    assert ranks[0][1].endswith("OK\n")
    assert all(out == "" for _, out, _ in ranks[1:])
