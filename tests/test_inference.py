"""Chapter 6 generates in every layout what one device generates, sends and holds to the byte what
its formulas say, and serves what chapter 5 saved at another layout."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import SCRIPTS, edit, launch, load, meshes, part, prepare, run_to_the_end

LAYOUTS = ("batch", "1d", "2d", "gathered", "pipeline")


def prepare_6(flags):
    """Return (script, args); meshes are made once for all cases of a process."""
    script, args, _ = prepare(6, flags)
    common = sys.modules["common"]

    def make_mesh(args):
        axes = args.pp, args.dp, args.tp
        if axes not in meshes:
            meshes[axes] = common.make_mesh(args)
        return meshes[axes]

    script.make_mesh = make_mesh
    return script, args


def serve_all(cases):
    """Return {(flags, layout): what `serve` returns} for cases of (flags, layouts)."""
    results = {}
    for flags, layouts in cases:
        script, args = prepare_6(flags)
        x_BD, _ = script.make_batch(args, 0)
        expected = script.reference_outputs(x_BD, args)
        for layout in layouts:
            results[flags, layout] = script.serve(layout, x_BD, expected, args)
    return results


SIZES = [
    "--layers 5 --d-model 7 --d-hidden 41 --batch-size 64",
    "--layers 3 --d-model 8 --d-hidden 12 --batch-size 3",
    "--layers 2 --d-model 3 --d-hidden 5 --batch-size 1",
]


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in (6, 8)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, *SLOW])
def test_every_layout_equals_one_device(group, ranks):
    sizes = [f"{size} --dtype float64 --tokens 2" for size in SIZES]
    cases = [(size, LAYOUTS) for size in sizes]
    cases += [(f"{sizes[0]} --microbatches {m}", ["pipeline"]) for m in (1, 3, 70)]
    cases += [(f"{sizes[0]} --tp {tp}", ["2d"]) for tp in (1, ranks)]
    cases += [(f"{sizes[0]} --no-overlap", ["gathered"])]
    for results in group(ranks).run(serve_all, cases):
        for (flags, layout), batches in results.items():
            where = f"{layout} on {ranks} ranks: {flags}"
            for costs in batches:
                assert costs["check"]["complaints"] == [], where
                assert max(costs["error"]) <= 1e-10, where
                assert costs["bytes_sent"] == costs["bytes_predicted"], where
                assert costs["memory_bytes"] == costs["memory_predicted"], where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(group, dtype):
    flags = f"--d-model 14 --d-hidden 41 --batch-size 16 --dtype {dtype}"
    for results in group(4).run(serve_all, [(flags, LAYOUTS)]):
        assert not any(costs["check"]["complaints"] for b in results.values() for costs in b)


def test_bytes_are_those_of_the_papers(group):
    """Where everything divides: per layer (n-1)/n of the tensor, twice for an all-reduce."""
    L, D, F, B, n, tokens = 4, 16, 32, 8, 4, 3
    flags = f"--layers {L} --d-model {D} --d-hidden {F} --batch-size {B} --dtype float64"
    results = group(n).run(serve_all, [(f"{flags} --tokens {tokens}", LAYOUTS)])[0]
    sent = {layout: batches[-1]["bytes_sent"] for (_, layout), batches in results.items()}
    for rank in range(n):
        per_token = {
            layout: {axis: nbytes / 8 / (tokens + 1) for axis, nbytes in axes[rank].items()}
            for layout, axes in sent.items()
        }
        assert per_token["batch"] == {"pp": 0, "dp": 0, "tp": 0}
        assert per_token["1d"] == {"pp": 0, "dp": 0, "tp": L * 2 * 3 / 4 * B * D}
        halves = {"dp": L * B * F / 2, "tp": L * B * D / 2}  # 2 (2-1)/2 = 1 of the part
        assert per_token["2d"] == {"pp": 0, **halves}
        assert per_token["gathered"] == {"pp": 0, "dp": L * 3 / 4 * 2 * D * F, "tp": 0}
        last = rank == n - 1  # its last token goes nowhere
        assert per_token["pipeline"]["pp"] == B * D * (tokens / (tokens + 1) if last else 1)


@pytest.fixture(scope="module")
def script():
    return load(SCRIPTS[6])


def test_crossovers_of_the_cost_model(script):
    """Those of Pope et al. 2022: they leave out (n-1)/n, so with many ranks ours come near."""
    L, D, F = 8, 1024, 4096

    def cost(layout, B, n):
        X = (D * n / F) ** 0.5  # the best
        return script.cost_model(layout, B, L, D, F, X, n / X)

    n = 4**10
    assert cost("1d", 10, n) == pytest.approx(2 * 10 * D, rel=1e-2)
    assert cost("2d", 10, n) == pytest.approx(8 * 10 * D / n**0.5, rel=1e-2)
    assert cost("gathered", 10, n) == pytest.approx(2 * D * F, rel=1e-2)
    for layout, B in ("1d", F), ("2d", F * n**0.5 / 4):
        assert cost(layout, 0.98 * B, n) < cost("gathered", B, n) < cost(layout, 1.02 * B, n)
    for n in 4, 16, 64:  # exact at any number of ranks
        assert cost("1d", F, n) == pytest.approx(cost("gathered", F, n), rel=1e-12)
        best = cost("2d", 10, n)
        assert all(script.cost_model("2d", 10, L, D, F, x, n / x) >= best * 0.9 for x in (1, 2, n))


def test_cost_model_is_what_is_sent(group):
    """Where everything divides, the model's count is that of `predict`, which the runs verify."""
    flags = "--layers 4 --d-model 16 --d-hidden 32 --batch-size 8 --dtype float64 --tokens 2"
    results = group(4).run(serve_all, [(flags, LAYOUTS)])[0]
    module = load(SCRIPTS[6])
    for (_, layout), batches in results.items():
        sent = sum(batches[-1]["bytes_sent"][0].values()) / 8 / 3
        assert sent == 4 * module.cost_model(layout, 8, 4, 16, 32, 2, 2), layout


def test_cost_model_counts_what_is_read(script):
    model = 8, 64, 256, 2, 2
    few, many = (
        min(LAYOUTS, key=lambda layout: script.cost_model(layout, rows, *model, 8))
        for rows in (1, 1000)
    )
    assert (few, many) == ("1d", "batch")


TRAINED = "--layers 5 --d-model 7 --d-hidden 12 --batch-size 8 --dtype float64"


def train_and_save(flags):
    script, args, mesh = prepare(5, flags)
    state = script.init_state(args, mesh)
    for step in range(args.steps):
        batch = [script.shard_batch(rows, args, mesh) for rows in script.make_batch(args, step)]
        script.train_step(state, *batch, step, args, mesh)
    script.save(state, args.steps, args, mesh)


def held_weights(flags):
    """Return {layout: (this rank's weights, layers, part of D, part of F)}."""
    script, args = prepare_6(flags)
    held = {}
    for layout in LAYOUTS:
        cut = script.with_layout(layout, args)
        mesh = script.make_mesh(cut)
        state = script.init_state(cut, mesh)
        d = part(args.d_model, cut.dp, mesh.dp.rank if layout in ("2d", "gathered") else 0)
        d = d if layout in ("2d", "gathered") else slice(None)
        held[layout] = state.weights, state.layers, d, part(args.d_hidden, cut.tp, mesh.tp.rank)
    dist.barrier()
    return held


def test_checkpoint_of_chapter_5(group, tmp_path):
    flags = f"{TRAINED} --steps 2 --tp 2 --pp 2 --zero-stage 3 --checkpoint {tmp_path}"
    group(8).run(train_and_save, flags)
    saved = {
        f"layers.{l}.{name}": torch.empty(7, 12, dtype=torch.float64)
        for l in range(5)
        for name in ("w_in", "w_out")
    }
    dcp.load(saved, checkpoint_id=Path(tmp_path) / "step-2", no_dist=True)
    full = torch.stack(list(saved.values())).view(5, 2, 7, 12).transpose(1, 2)
    flags = f"--batch-size 8 --dtype float64 --tokens 2 --checkpoint {tmp_path}"
    for ranks in 1, 3, 4, 8:
        seen = {layout: torch.zeros_like(full) for layout in LAYOUTS}
        for held in group(ranks).run(held_weights, flags):
            for layout, (weights, layers, d, f) in held.items():
                assert torch.equal(weights, full[layers][:, d, :, f]), f"{layout} on {ranks}"
                for l in layers:
                    seen[layout][l, d, :, f] = 1
        assert all(each.all() for each in seen.values()), f"parts are missing on {ranks} ranks"
        for results in group(ranks).run(serve_all, [(flags, LAYOUTS if ranks in (1, 3) else [])]):
            for (_, layout), batches in results.items():
                assert not any(costs["check"]["complaints"] for costs in batches), layout


def test_a_run_from_the_command_line(tmp_path):
    metrics = tmp_path / "metrics.json"
    flags = f"--layers 2 --d-model 8 --d-hidden 16 --batch-size 5 --tokens 2 --metrics {metrics}"
    for code, out, err in run_to_the_end(SCRIPTS[6], flags, 2):
        assert (code, err) == (0, "")
        assert not [line for line in out.splitlines() if len(line) > 80]
    written = json.loads(metrics.read_text())
    assert set(written["layouts"]) == set(LAYOUTS) and written["check"]["passed"]
    for layout in written["layouts"].values():
        assert layout["rows_per_second"] == pytest.approx(5 / layout["token_seconds"])
        assert layout["bytes_sent"] == layout["bytes_predicted"]


@pytest.mark.parametrize("flags", ["--lr 1", "--tp 3", "--layout ring", "--tokens 0"])
def test_bad_input(flags):
    results = run_to_the_end(SCRIPTS[6], flags, 2)
    assert [code for code, _, _ in results] == [2, 2]


def test_no_checkpoint_is_one_line(tmp_path):
    result = launch(0, SCRIPTS[6], "--checkpoint", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"06_inference_sharding.py: no checkpoint in {tmp_path}\n"


BREAKS = {
    "one buffer for two layers": (
        "--layout gathered --d-hidden 512 --batch-size 256",
        'layer_buffer(f"weights {l % 2}", state, args)',
        'layer_buffer("weights 0", state, args)',
        "off one device",
    ),
    "no second reduction": (
        "--layout 2d",
        "        ring_all_reduce(y_BD, mesh.tp)  # partial over F\n",
        "",
        "off one device",
    ),
    "the reduction after the ReLU": (
        "--layout 2d",
        '        if args.layout == "2d":\n',
        "        z_BF.relu_()\n" + '        if args.layout == "2d":\n',
        "off one device",
    ),
    "fed the token before": (
        "--layout pipeline",
        "isend(outputs[token, i], mesh.pp.next_rank",
        "isend(outputs[max(0, token - 1), i], mesh.pp.next_rank",
        "off one device",
    ),
    "rows left over are dropped": (
        "--layout batch --batch-size 18",
        "rows_BD.tensor_split(args.dp)[mesh.dp.rank]",
        "rows_BD.split(max(1, len(rows_BD) // args.dp))[mesh.dp.rank % len(rows_BD)]",
        "did not generate all rows",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_break_it(name, tmp_path):
    flags, old, new, symptom = BREAKS[name]
    flags = f"--layers 4 --d-model 16 --d-hidden 24 --batch-size 16 --dtype float64 {flags}"
    path = edit(tmp_path, SCRIPTS[6], old, new)
    results = run_to_the_end(path, flags, 4)
    assert [code for code, _, _ in results] == [1, 1, 1, 1], results[0]
    assert "FAILED: " in results[0][1] and symptom in results[0][1], results[0][1]
    assert " OK" not in results[0][1]
