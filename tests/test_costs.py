"""The scripts' own `predict` gives the tables of the papers."""

import sys
from types import SimpleNamespace

import pytest
from harness import SCRIPTS, load


def predict(chapter, sizes, dp=1, tp=1, pp=1, **more):
    """Return what chapter's predict says for the first rank, in elements, at any world size."""
    L, D, F, B = sizes
    defaults = dict(collectives="ring", batch_shares=None, microbatches=1, schedule="1f1b")
    defaults |= dict(chunks=2, zero_stage=0, sequence_parallel=False)
    args = SimpleNamespace(layers=L, d_model=D, d_hidden=F, batch_size=B, dp=dp, tp=tp, pp=pp)
    args.__dict__.update(defaults | more)
    axes = {name: SimpleNamespace(size=n, rank=0) for name, n in dict(dp=dp, tp=tp, pp=pp).items()}
    script = load(SCRIPTS[chapter])
    return script.predict(args, SimpleNamespace(**axes)), args


# Rajbhandari et al. 2019, table 1: GB per device for 7.5B parameters, 2 + 2 + 12 bytes for each
ZERO = {
    1: (120, 120, 120),
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}


@pytest.mark.parametrize("n", ZERO)
@pytest.mark.parametrize("billions", [7.5, 128, 1000])
def test_zero_paper_table_1(n, billions):
    L, D = 8, 8192
    F = round(billions * 1e9 / (L * D * 2))
    for stage, wanted in enumerate(ZERO[n], 1):
        costs, args = predict(5, (L, D, F, n), dp=n, zero_stage=stage)
        args.dtype = "bfloat16"
        memory = sys.modules["common"].predicted_costs(costs, args)["memory_bytes"]
        gigabytes = (memory["weights"] + memory["gradients"] + memory["optimizer"]) / 1e9
        # As printed, to half a unit of its last digit (41.25 is printed as 41.3).
        digits = len(str(wanted).partition(".")[2]) if isinstance(wanted, float) else 0
        if billions == 7.5:
            assert abs(gigabytes - wanted) <= 0.51 * 10**-digits
        two_layers = {1: 0, 2: 2, 3: 4}[stage]  # of gradients, in stage 3 of weights too
        assert memory["buffers"] == two_layers * D * 2 * F * 2
        formula = {1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[stage]
        assert gigabytes == pytest.approx(L * D * 2 * F * formula / 1e9, rel=1e-9)


def test_traffic_of_zero_is_that_of_data_parallel_or_one_and_a_half_times():
    sizes, n = (4, 64, 96, 32), 8
    base, _ = predict(2, sizes, dp=n)
    assert base["dp"] == 2 * (n - 1) / n * 2 * 4 * 64 * 96
    for stage, times in {0: 1, 1: 1, 2: 1, 3: 1.5}.items():
        costs, _ = predict(5, sizes, dp=n, zero_stage=stage)
        assert costs["dp"] == times * base["dp"]
        for m in 2, 4:
            more, _ = predict(5, sizes, dp=n, zero_stage=stage, microbatches=m)
            wanted = {0: 1, 1: 1, 2: (m + 1) / 2, 3: 1.5 * m}[stage]
            assert more["dp"] == wanted * base["dp"]


def test_naive_moves_more_the_more_ranks_there_are():
    for n in 2, 4, 8:
        costs, _ = predict(2, (4, 64, 96, 32), dp=n, collectives="naive")
        assert costs["dp"] == (n - 1) * 2 * 4 * 64 * 96  # rank 0 sends that, and receives as much


def test_megatron():
    """Narayanan et al. 2021, section 3.2: 4 B D (t-1)/t elements for an MLP block."""
    L, D, F, B = 4, 64, 96, 32
    for t in 2, 4, 8:
        costs, _ = predict(3, (L, D, F, B), tp=t)
        assert costs["tp"] == 4 * B * D * (t - 1) / t * L
        assert costs["activations"] == L * B * (D + F / t)
        rows_cut, _ = predict(3, (L, D, F, B), tp=t, sequence_parallel=True)
        assert rows_cut["activations"] == L * B * (D + F) / t
        assert rows_cut["tp"] == 5 * B * D * (t - 1) / t * L  # one gather more, for backward


@pytest.mark.parametrize("schedule, alive", [("gpipe", 8), ("1f1b", 4), ("zb-h1", 4)])
def test_pipeline(schedule, alive):
    costs, _ = predict(4, (8, 64, 96, 32), pp=4, microbatches=8, schedule=schedule)
    assert costs["pp"] == 32 * 64  # the first stage has one border
    assert costs["microbatches"] == alive
    assert costs["bubble"] == 3 / 8 / (3 if schedule == "zb-h1" else 1)
