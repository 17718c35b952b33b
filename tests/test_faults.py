"""Bad input ends in one line and exit code 2 of all ranks; a failure ends all; exits are clean."""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    (1, 1, "extra", "extra"),
    (1, 1, "--s 3", "ambiguous"),
    (1, 1, "--no-check=yes", "--no-check"),
    (1, 1, "--layers=", "--layers"),
    (1, 1, "--dtype=", "--dtype"),
    (1, 1, "--metrics=", "--metrics"),
    (1, 1, "--plot=", "--plot"),
    (1, 1, "--checkpoint=", "--checkpoint"),
    (1, 1, "--lr x", "--lr"),
    (1, 1, "--clip-norm inf", "--clip-norm"),
    (1, 1, "--save-every 0", "--save-every"),
    (1, 1, "--ranks-per-node 0", "--ranks-per-node"),
    (1, 1, "--replay=", "--replay"),
    (1, 1, "--replay flops=nan,bandwidth=1", "--replay"),
    (1, 1, "--replay flops=-1,bandwidth=1", "--replay"),
    (1, 1, "--replay flops=1=2,bandwidth=1", "--replay"),
    (1, 1, "--replay flops=1,bandwidth=1,latency", "--replay"),
    (1, 1, "--replay flops=1,bandwidth=1,speed=1", "--replay"),
    (1, 1, "--replay flops=1,flops=2,bandwidth=1", "--replay"),
    (1, 1, "--scale-to D", "--scale-to"),
    (1, 1, "--scale-to D=x --replay laptop", "--scale-to"),
    (1, 1, "--scale-to D=8,D=9 --replay laptop", "--scale-to"),
    (1, 1, "--scale-to D=128", "--replay"),
    (1, 1, "--ranks-per-node 2", "--replay"),
    (2, 2, "--batch-shares=", "--batch-shares"),
    (2, 2, "--batch-shares -1,2", "--batch-shares"),
    (3, 2, "--tp two", "--tp"),
    (4, 2, "--pp 0", "--pp"),
    (5, 2, "--zero-stage x", "--zero-stage"),
    (5, 6, "--tp 2 --pp 2", "--tp 2 x --pp 2"),
    # More than there is: of memory, or of 64 bits.
    (1, 1, f"--layers {10**15}", "--layers"),
    (2, 2, f"--d-model {10**23}", "--d-model"),
    (1, 1, f"--batch-size {10**15}", "memory"),
    (1, 1, f"--microbatches {10**18}", "--microbatches"),
    (1, 1, f"--seed {10**20}", "--seed"),
    (1, 1, f"--metrics /tmp/{'x' * 300}", "too long"),
    (1, 1, f"--metrics /tmp/{'x' * 300}/file", "too long"),
    (1, 1, "--plot {folder}/picture.xyz", "picture.xyz"),
    (2, 2, "--plot {folder}/same.png --metrics {folder}/same.png", "same.png"),
    (2, 2, "--metrics {folder}/loop", "loop"),
    (2, 2, "--checkpoint {folder}/loop", "loop"),
]
SIZES = "--layers 2 --d-model 4 --d-hidden 6 --batch-size 4 --steps 3"  # later flags override


@pytest.mark.parametrize("chapter, ranks, flags, says", BAD)
def test_bad_input(tmp_path, chapter, ranks, flags, says):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    printed = refused(chapter, ranks, f"{SIZES} {flags.format(folder=tmp_path)}", says)
    assert printed == ""


def refused(chapter, ranks, flags, says):
    """See that a script ends soon, with one line and exit code 2; return what it printed before."""
    start = time.time()
    results = run_to_the_end(SCRIPTS[chapter], flags, ranks)
    assert time.time() - start < 20
    errors = "".join(err for _, _, err in results)
    assert [code for code, _, _ in results] == [2] * ranks, errors or results
    assert errors.count("\n") == 1 and says in errors, errors
    assert errors.startswith(SCRIPTS[chapter].name), errors
    assert not errors.strip().endswith(":"), f"no reason: {errors}"
    return "".join(out for _, out, _ in results)


# ------------------------------------------------------------------------- damaged checkpoints


@pytest.fixture(scope="session")
def good_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    results = run_to_the_end(SCRIPTS[5], f"{SIZES} --no-check --checkpoint {folder}", 2)
    assert [code for code, _, _ in results] == [0, 0], results
    return folder


def replaced_by(state):
    """Return a function that puts a checkpoint with this state in step-3's place."""

    def replace(step_3):
        shutil.rmtree(step_3)
        dcp.save(state, checkpoint_id=step_3, no_dist=True)

    return replace


def first_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def weights(*shape):
    return {f"layers.{l}.{w}": torch.zeros(shape) for l in (0, 1) for w in ("w_in", "w_out")}


def no_metadata_but_a_folder(step_3):
    (step_3 / ".metadata").unlink()
    (step_3 / ".metadata").mkdir()


SHARD = "__1_0.distcp"  # of rank 1
DAMAGED = {  # name: (what happens to step-3, the chapters that need what is gone)
    "a file is missing": (lambda step_3: (step_3 / SHARD).unlink(), (5, 6)),
    "a file is cut off": (lambda step_3: first_half(step_3 / SHARD), (5,)),
    "a file is empty": (lambda step_3: (step_3 / SHARD).write_text(""), (5, 6)),
    "a file is not ours": (lambda step_3: (step_3 / SHARD).write_bytes(b"\0\xff" * 9999), (5, 6)),
    "metadata is cut off": (lambda step_3: first_half(step_3 / ".metadata"), (1, 5, 6)),
    "metadata is empty": (lambda step_3: (step_3 / ".metadata").write_text(""), (5,)),
    "metadata is a text": (lambda step_3: (step_3 / ".metadata").write_text("hello\n"), (5,)),
    "metadata is another's": (
        lambda step_3: (step_3 / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        (5, 6),
    ),
    "metadata is a folder": (no_metadata_but_a_folder, (5,)),
    "another model": (replaced_by({"weight": torch.zeros(3)}), (5, 6)),
    "weights of another shape": (replaced_by(weights(24)), (5, 6)),
    "weights without Adam's state": (replaced_by(weights(4, 6)), (5,)),
    "the next step's name is taken": (lambda step_3: (step_3.parent / "step-4").touch(), (2,)),
    "so is its temporary name": (lambda step_3: (step_3.parent / "unfinished-4").touch(), (2,)),
}
CASES = [(name, chapter) for name, (_, chapters) in DAMAGED.items() for chapter in chapters]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name, chapter", CASES)
def test_bad_checkpoint(tmp_path, good_checkpoint, name, chapter):
    folder = tmp_path / "checkpoint"
    shutil.copytree(good_checkpoint, folder)
    DAMAGED[name][0](folder / "step-3")
    flags = SIZES.replace("--steps 3", "--tokens 2" if chapter == 6 else "--steps 5 --save-every 1")
    refused(chapter, 1 if chapter == 1 else 2, f"{flags} --checkpoint {folder}", str(folder))


def test_checkpoint_of_another_width(good_checkpoint):
    refused(3, 2, f"{SIZES} --d-hidden 7 --checkpoint {good_checkpoint}", "this run (2, 4, 7)")


# ------------------------------------------------------------------------------ disks, ports


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]).returncode:
        pytest.skip("needs root, to mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("flag", ["--metrics", "--plot", "--checkpoint"])
def test_full_disk(tiny_disk, flag):
    with pytest.raises(OSError), (tiny_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    refused(2, 2, f"{SIZES} {flag} {tiny_disk}/file.png", str(tiny_disk))


def test_no_space_at_the_end():
    printed = refused(1, 1, f"{SIZES} --metrics /dev/full", "/dev/full")
    assert printed.endswith("OK\n")


def test_disk_fills_up(tiny_disk):
    """That can't be known at the start. What was saved before is good."""
    sizes = SIZES.replace(
        "--d-hidden 6", "--d-hidden 200"
    )  # 38 kB for the weights and Adam's state
    flags = f"{sizes} --save-every 1 --checkpoint {tiny_disk}"
    printed = refused(2, 2, flags, str(tiny_disk))
    assert "step   0" in printed
    assert [path.parent.name for path in tiny_disk.glob("step-*/.metadata")] == ["step-1"]


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_port_in_use(taken_port):
    """torchrun's own affair, so the message is its; ours is not to add to it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(taken_port), str(SCRIPTS[2]), *SIZES.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "EADDRINUSE" in result.stderr, result.stderr
    assert "rank 0:" not in result.stderr and result.stdout == ""


def test_port_in_use_without_torchrun(taken_port):
    """Ranks may be started by hand too."""
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = os.environ | where | {"MASTER_PORT": str(taken_port)}
    command = [sys.executable, str(SCRIPTS[2]), *SIZES.split()]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]  # torch's C++
    assert result.returncode == 2 and len(lines) == 1, result.stderr
    assert lines[0].startswith("02_data_parallel.py: ") and str(taken_port) in lines[0]


# ------------------------------------------------------------------- runs, failures, exits


def test_bad_input_under_torchrun():
    result = launch(2, SCRIPTS[2], "--batch-size", "0")
    ours = [line for line in result.stderr.splitlines() if line.startswith("02_data")]
    assert result.returncode == 1 and len(ours) == 1
    assert result.stderr.count("exitcode  : 2") == 2 or result.stderr.count("exitcode: 2") == 2, (
        result.stderr
    )


# The README's commands run the other chapters so.
@pytest.mark.parametrize("chapter", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
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
