"""Bad input ends in one line and exit code 2 of all ranks; a failure ends all; exits are clean."""

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, SCRIPTS, edit, launch, run_to_the_end

BAD = [  # chapter, ranks, flags, what the line must say
    (1, 1, "--layers 0", "--layers"),
    (1, 1, "--layers -3", "--layers"),
    (1, 1, "--d-model 0", "--d-model"),
    (1, 1, "--d-hidden x", "--d-hidden"),
    (1, 1, "--batch-size 0", "--batch-size"),
    (1, 1, "--batch-size 2.5", "--batch-size"),
    (1, 1, "--microbatches 0", "--microbatches"),
    (1, 1, "--steps -1", "--steps"),
    (1, 1, "--lr nan", "--lr"),
    (1, 1, "--lr 0", "--lr"),
    (1, 1, "--clip-norm -1", "--clip-norm"),
    (1, 1, "--seed -1", "--seed"),
    (1, 1, "--dtype float16", "--dtype"),
    (1, 1, "--device mps", "--device"),
    (1, 1, "--device cuda", "GPU"),
    (1, 1, "--collectives ring", "--collectives"),
    (1, 1, "--metrics /proc/no/such/file", "/proc/no/such/file"),
    (1, 1, "--plot /proc/no/such/file.png", "/proc/no/such/file.png"),
    (1, 1, "--checkpoint /proc/checkpoint", "/proc/checkpoint"),
    (1, 1, "--checkpoint /proc/version", "/proc/version"),
    (1, 1, "--plot /proc", "/proc"),
    (1, 1, "--metrics /dev", "/dev"),
    (1, 1, "--metrics /proc/version/x", "/proc/version"),
    (1, 1, "--save-every 2", "--checkpoint"),
    (1, 1, "--replay h1000", "--replay"),
    (1, 1, "--replay flops=0,bandwidth=1", "--replay"),
    (1, 1, "--replay flops=1e12", "--replay"),
    (1, 1, "--scale-to D=0", "--scale-to"),
    (1, 1, "--scale-to X=3", "--scale-to"),
    (1, 1, "--layers 1e9", "--layers"),
    (1, 1, "--steps", "--steps"),
    (2, 2, "--replay here --collectives torch", "--replay"),
    (1, 1, "--unknown 3", "--unknown"),
    (1, 2, "", "one device"),
    (2, 2, "--collectives tree", "--collectives"),
    (2, 2, "--batch-shares 1,2,3", "--batch-shares"),
    (2, 2, "--batch-shares 1,0", "--batch-shares"),
    (2, 2, "--batch-shares a,b", "--batch-shares"),
    (2, 2, "--device cuda", "GPU"),
    (2, 2, "--tp 2", "--tp"),
    (3, 4, "--tp 3", "--tp 3"),
    (3, 2, "--tp 4", "--tp 4"),
    (3, 2, "--tp 0", "--tp"),
    (3, 2, "--sequence-parallel --collectives naive", "--collectives ring"),
    (4, 4, "--pp 3", "--pp 3"),
    (4, 2, "--schedule dualpipe", "--schedule"),
    (4, 4, "--schedule interleaved --microbatches 6", "multiple"),
    (4, 2, "--schedule interleaved --chunks 0", "--chunks"),
    (5, 2, "--zero-stage 4", "--zero-stage"),
    (5, 2, "--zero-stage 1 --collectives torch", "--collectives ring"),
]


@pytest.mark.parametrize("chapter, ranks, flags, says", BAD)
def test_bad_input(chapter, ranks, flags, says):
    start = time.time()
    results = run_to_the_end(SCRIPTS[chapter], flags, ranks)
    assert time.time() - start < 20
    assert [code for code, _, _ in results] == [2] * ranks, results
    errors = "".join(err for _, _, err in results)
    assert errors.count("\n") == 1 and says in errors, errors
    assert errors.startswith(SCRIPTS[chapter].name), errors
    assert "".join(out for _, out, _ in results) == ""


def test_bad_input_under_torchrun():
    result = launch(2, SCRIPTS[2], "--batch-size", "0")
    ours = [line for line in result.stderr.splitlines() if line.startswith("02_data")]
    assert result.returncode == 1 and len(ours) == 1
    assert result.stderr.count("exitcode  : 2") == 2 or result.stderr.count("exitcode: 2") == 2, (
        result.stderr
    )


@pytest.mark.parametrize("chapter", [1, 2, 5])  # the README runs all of them
def test_default_run(tmp_path, chapter):
    """A script as the README starts it: fast, no warnings, the loss falls tenfold, one picture."""
    metrics, start = tmp_path / "metrics.json", time.time()
    plot = tmp_path / "plot.png"
    flags = "--plot", str(plot), "--metrics", str(metrics)
    ranks = 4 if chapter > 1 else 0
    result = launch(ranks, SCRIPTS[chapter], *flags, env={"PYTHONWARNINGS": "error::FutureWarning"})
    took = time.time() - start
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and plot.stat().st_size > 10_000
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].startswith("same as one device")
    import json

    data = json.loads(metrics.read_text())
    assert data["losses"][-1] < data["losses"][0] / 10
    assert data["check"]["passed"] and data["script"] == SCRIPTS[chapter].stem
    axis = {1: "dp", 2: "dp", 3: "tp", 4: "pp", 5: "dp"}[chapter]
    assert data["axes"] == {"dp": 1, "tp": 1, "pp": 1} | {axis: max(1, ranks)}
    assert data["bytes_sent"] == data["bytes_predicted"]
    assert data["memory_bytes"]["measured"] == data["memory_bytes"]["predicted"]
    assert took < 25, f"{took:.0f} s"  # 15 on an idle machine of two cores


def test_alone_it_says_how_to_start_more():
    result = launch(0, SCRIPTS[2], "--steps", "1", "--plot", "none")
    assert result.returncode == 0 and result.stderr == ""
    assert "torchrun --standalone --nproc-per-node 4 02_data_parallel.py" in result.stdout


@pytest.mark.parametrize("ranks", [0, 2])
def test_help(ranks):
    result = launch(ranks, SCRIPTS[3], "--help")
    assert result.returncode == 0 and result.stdout.count("usage:") == 1 and result.stderr == ""


def test_a_rank_that_raises_ends_all(tmp_path):
    old = "    join(mesh.dp)\n"
    new = "    if step == 2 and mesh.dp.rank == 1:\n        raise RuntimeError('the cause')\n" + old
    path = edit(tmp_path, SCRIPTS[2], old, new)
    start = time.time()
    result = launch(2, path, "--plot", "none")
    assert result.returncode != 0 and time.time() - start < 20
    assert "rank 1: RuntimeError: the cause" in result.stderr


def wait_for_step(process, number):
    for line in process.stdout:
        if line.startswith(f"step {number:3d}"):
            return
    raise AssertionError("ended too early")


@pytest.mark.parametrize("how", ["kill", "ctrl-c"])
def test_killed_or_interrupted(how):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SCRIPTS[2]), "--steps", "100000", "--plot", "none"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_step(process, 3)
        children = subprocess.check_output(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], text=True
        )
        workers = [int(pid) for pid in children.split()]
        assert len(workers) == 2
        start = time.time()
        if how == "kill":
            os.kill(workers[1], signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode != 0 and time.time() - start < (15 if how == "kill" else 5)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def test_clean_exits():
    """Many ends in a row, none of which aborts (this takes the shutdown path only)."""
    flags = "--layers 1 --d-model 4 --d-hidden 4 --batch-size 4 --steps 1 --no-check"
    for _ in range(15):
        for chapter in 2, 5:
            results = run_to_the_end(SCRIPTS[chapter], flags, 3)
            assert [code for code, _, _ in results] == [0, 0, 0], results


def test_no_steps_and_no_matplotlib(tmp_path):
    assert launch(0, SCRIPTS[1], "--steps", "0").returncode == 0
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    path = edit(tmp_path, SCRIPTS[1], "import torch\n\n", "import torch\n\n")
    result = launch(0, path, "--steps", "2", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and "no plot: matplotlib is not installed" in result.stdout
