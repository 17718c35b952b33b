"""Two machines, as two network namespaces with a link between them; and jobs that are interrupted.
The former need root and iproute2."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import ROOT, SCRIPTS, edit, launch, run_to_the_end

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = "--layers 4 --d-model 8 --d-hidden 12 --batch-size 8 --plot none".split()
ports = itertools.count(29700 + os.getpid() % 1000)


def shell(command):
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.fixture(scope="module")
def two_machines():
    """Yield (names of two namespaces, of the link in each)."""
    name = f"t{os.getpid()}"
    a, b = f"{name}a", f"{name}b"
    try:
        shell(f"ip netns add {a} && ip netns add {b}")
    except subprocess.CalledProcessError:
        pytest.skip("needs root and iproute2")
    try:
        shell(f"ip link add {a} netns {a} type veth peer name {b} netns {b}")
        for i, each in enumerate((a, b), 1):
            shell(f"ip -n {each} addr add 10.77.0.{i}/24 dev {each}")
            shell(f"ip -n {each} link set {each} up && ip -n {each} link set lo up")
        yield a, b
    finally:
        shell(f"ip netns del {a}; ip netns del {b}")


@contextlib.contextmanager
def started(machines, path, flags, flags_of_second=None):
    """Run 2 x 2 ranks; yield the two torchruns, which are gone afterwards."""
    port, processes = next(ports), []
    for i, machine in enumerate(machines):
        command = [
            "ip",
            "netns",
            "exec",
            machine,
            *TORCHRUN,
            "--nnodes",
            "2",
            "--node-rank",
            str(i),
        ]
        command += ["--nproc-per-node", "2", "--master-addr", "10.77.0.1"]
        command += ["--master-port", str(port), str(path)]
        command += flags_of_second if i and flags_of_second else flags
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": machine},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end(processes, limit=100):
    return [(*process.communicate(timeout=limit), process.returncode) for process in processes]


LAYOUTS = {
    2: [],
    3: ["--tp", "2"],
    4: ["--pp", "2", "--tp", "2", "--schedule", "zb-h1"],
    5: ["--tp", "2", "--zero-stage", "3"],
}


@pytest.mark.parametrize("chapter", LAYOUTS)
def test_two_machines_train_as_one_device(two_machines, chapter):
    flags = [*SMALL, "--steps", "5", "--dtype", "float64", *LAYOUTS[chapter]]
    with started(two_machines, SCRIPTS[chapter], flags) as processes:
        (out, err, code), (other_out, _, other_code) = end(processes)
    assert (code, other_code) == (0, 0), err
    assert out.endswith("OK\n") and other_out == ""


def test_a_link_of_100_mbit(two_machines):
    """The bytes over the link take the time they must."""
    sizes = "--layers 4 --d-model 128 --d-hidden 512 --batch-size 64 --steps 3 --plot none".split()
    for machine in two_machines:
        limit = "root tbf rate 100mbit burst 64kb latency 50ms"
        shell(f"ip netns exec {machine} tc qdisc add dev {machine} {limit}")
    try:
        with started(two_machines, SCRIPTS[2], [*sizes, "--metrics", "/tmp/metrics.json"]) as runs:
            (out, err, code), _ = end(runs)
    finally:
        for machine in two_machines:
            shell(f"ip netns exec {machine} tc qdisc del dev {machine} root")
    assert code == 0 and out.endswith("OK\n"), err
    with open("/tmp/metrics.json") as file:
        metrics = json.load(file)
    bound = metrics["bytes_sent"][0]["dp"] / (100e6 / 8)  # ranks 1 -> 2 and 3 -> 0 cross the link
    assert 0.95 * bound < sorted(metrics["step_seconds"])[1] < 1.5 * bound


def test_other_flags_on_one_machine(two_machines):
    first = [*SMALL, "--steps", "5"]
    with started(two_machines, SCRIPTS[2], first, [*SMALL, "--steps", "6"]) as processes:
        results = end(processes)
    for _, err, code in results:
        assert code != 0
        assert err.count("02_data_parallel.py: rank 2 has steps 6, rank 0 has 5") == 1, err


def test_the_link_is_cut(two_machines, tmp_path):
    common = ROOT / "common.py"
    path = edit(tmp_path, SCRIPTS[2], "timedelta(seconds=60)", "timedelta(seconds=8)", common)
    a, _ = two_machines
    with started(two_machines, path, [*SMALL, "--steps", "100000"]) as processes:
        for line in processes[0].stdout:
            if line.startswith("step   4"):
                break
        shell(f"ip -n {a} link set {a} down")
        start = time.time()
        try:
            results = end(processes, 90)
        finally:
            shell(f"ip -n {a} link set {a} up")
    assert all(code != 0 for _, _, code in results) and time.time() - start < 60
    assert "rank 0: " in results[0][1]


def saved_weights(folder, step):
    path = folder / f"step-{step}"
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    known.pop("step")
    tensors = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in known.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


# script, ranks, flags: killed at random, restarted by torchrun, and the same to the bit in the end
JOBS = [(5, 4, "--tp 2 --zero-stage 3"), (5, 2, "--zero-stage 1 --dtype bfloat16")]


@pytest.mark.parametrize("chapter, ranks, flags", JOBS)
def test_killed_and_restarted(tmp_path, chapter, ranks, flags):
    flags = [*SMALL, *flags.split(), "--steps", "160", "--save-every", "20", "--no-check"]
    calm = tmp_path / "calm"
    results = run_to_the_end(SCRIPTS[chapter], " ".join([*flags, "--checkpoint", str(calm)]), ranks)
    assert {code for code, _, _ in results} == {0}, results
    harsh, moments = tmp_path / "harsh", random.Random(chapter)
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    command += ["--monitor-interval=0.1", str(SCRIPTS[chapter]), *flags, "--checkpoint", str(harsh)]
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
        for line in process.stdout:
            if line.startswith("step  39"):  # so there is the checkpoint of 20
                break
        for _ in range(2):
            time.sleep(moments.uniform(0.2, 1.5))
            listed = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
            )
            workers = [int(pid) for pid in listed.stdout.split()]
            if len(workers) == ranks and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(moments.choice(workers), signal.SIGKILL)
            time.sleep(6)
        out, _ = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0
    assert "resumed from" in out
    undisturbed, killed = saved_weights(calm, 160), saved_weights(harsh, 160)
    assert undisturbed.keys() == killed.keys()
    assert all(torch.equal(undisturbed[key], killed[key]) for key in killed)
    shutil.rmtree(harsh)


def test_a_stopped_rank_ends_all(tmp_path):
    """SIGSTOP: the others wait for as long as the limit is, and then all end."""
    common = ROOT / "common.py"
    path = edit(tmp_path, SCRIPTS[5], "timedelta(seconds=60)", "timedelta(seconds=6)", common)
    (tmp_path / "job").mkdir()
    old = path.read_text()
    stop = "    if step == 3 and mesh.dp.rank == 1:\n        __import__('os').kill(0, 0)\n"
    stop = stop.replace("kill(0, 0)", "kill(__import__('os').getpid(), 19)")
    zero = "    state.grads.zero_()\n    loss"
    path.write_text(old.replace(zero, stop + zero))
    start = time.time()
    result = launch(2, path, *SMALL, "--steps", "50", limit=100)
    assert result.returncode != 0 and time.time() - start < 60
    assert "imed out" in result.stderr or "timeout" in result.stderr.lower(), result.stderr


def test_a_machine_is_lost(tmp_path):
    """torchrun --nnodes 1:2: when one of two launchers and its rank are gone, the other goes on.

    Both are on this machine. The first one has the store, so it is the second that is killed."""
    flags = [*SMALL, "--dtype", "float64", "--steps", "400", "--save-every", "20", "--no-check"]
    calm, shrunk = tmp_path / "calm", tmp_path / "shrunk"
    results = run_to_the_end(SCRIPTS[2], " ".join([*flags, "--checkpoint", str(calm)]), 2)
    assert {code for code, _, _ in results} == {0}, results
    command = [*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{next(ports)}"]
    command += ["--rdzv-conf", "last_call_timeout=15", "--local-addr", "127.0.0.1"]
    command += [str(SCRIPTS[2]), *flags, "--checkpoint", str(shrunk)]
    launchers = []

    def lose(launcher):
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True
        )
        for pid in [launcher.pid, *map(int, listed.stdout.split())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()

    try:
        for i in range(2):
            with (tmp_path / f"printed-{i}").open("w") as file:
                where = dict(cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
                launchers.append(subprocess.Popen(command, **where))
            time.sleep(4)
        until = time.time() + 60
        while not list(shrunk.glob("step-*/.metadata")) and time.time() < until:
            time.sleep(0.05)
        lose(launchers[1])
        code = launchers[0].wait(150)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                lose(launcher)
    printed = (tmp_path / "printed-0").read_text()
    assert code == 0 and "dp 1 tp 1" in printed and "resumed from" in printed, printed
    undisturbed, other = saved_weights(calm, 400), saved_weights(shrunk, 400)
    for key, tensor in undisturbed.items():  # summed in another order
        assert (tensor - other[key]).norm() <= 1e-10 * tensor.norm(), key
