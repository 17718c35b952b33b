"""Groups of processes for the tests, much quicker to start than torchrun: the processes fork from a
server that has imported torch already, and one group runs many cases."""

import contextlib
import ctypes
import importlib.util
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
NAMES = "single_device data_parallel tensor_parallel pipeline_parallel zero_sharding"
NAMES += " inference_sharding"
SCRIPTS = {n: ROOT / f"0{n}_{name}.py" for n, name in enumerate(NAMES.split(), 1)}
JOB_LIMIT = 120  # seconds; whatever takes longer hangs

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.testing"]
)


class Group:
    """`size` processes with a gloo process group between them, which run functions of this file."""

    def __init__(self, size):
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, self.folder.name))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args, limit=JOB_LIMIT):
        """Return [function(*args) of each rank]; raise if one raises, dies or takes too long."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self.pipes):
            try:
                ok, result = pipe.recv() if pipe.poll(limit) else (False, "no answer in time")
            except EOFError:
                ok, result = False, "died"
            results.append(result)
            errors += [] if ok else [f"rank {rank}: {result}"]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(pipe, rank, size, folder):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def load(path):
    """Import a script, whose name starts with a digit, together with the common.py beside it."""
    path = Path(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripts, meshes = {}, {}  # of this process


def prepare(chapter, flags):
    """Return (script, args, mesh) as the script's main would have them, without checks or files."""
    if chapter not in scripts:
        scripts[chapter] = load(SCRIPTS[chapter])
    common = sys.modules["common"]
    sys.argv = [SCRIPTS[chapter].name, "--plot", "none", *flags.split()]
    args = common.parse_args(SCRIPTS[chapter].name, "")
    if hasattr(args, "problem"):
        raise common.BadInput(args.problem)
    layout = args.pp, args.dp, args.tp
    if layout not in meshes:
        meshes[layout] = common.make_mesh(args)
    return scripts[chapter], args, meshes[layout]


def train(chapter, flags, reference=None):
    """Train and return a dict of lists with an entry per step: losses, norms, weights, bytes.

    `weights` is this rank's part, or with a `reference`, one device's weights after each step, the
    largest difference from it relative to the largest weight."""
    script, args, mesh = prepare(chapter, flags)
    common = sys.modules["common"]
    state = script.init_state(args, mesh)
    costs = common.predicted_costs(script.predict(args, mesh), args)
    common.peak.update(activations=0, microbatches=0)
    common.buffers.clear()
    result = {"losses": [], "norms": [], "weights": [], "sent": [], "predicted": costs}
    result["start"] = difference(state, args, mesh, reference, 0)
    for step in range(args.steps):
        batch = [script.shard_batch(rows, args, mesh) for rows in common.make_batch(args, step)]
        common.trace.clear()
        loss, norm = script.train_step(state, *batch, step, args, mesh)
        result["losses"].append(float(loss))
        result["norms"].append(float(norm))
        result["weights"].append(difference(state, args, mesh, reference, step + 1))
        sent = {axis: 0 for axis in common.AXES}
        for span in common.trace:
            if span.axis:
                sent[span.axis] += span.bytes
        result["sent"].append(sent)
    measured = common.measured_costs(state, [])
    result |= {what: measured[what] for what in ("memory_bytes", "microbatches_alive")}
    return result


def part(size, n, i):
    """Where torch.chunk would cut part i of n."""
    step = -(-size // n)
    return slice(min(size, i * step), min(size, (i + 1) * step))


def difference(state, args, mesh, reference, step):
    """How far this rank's part of the weights is from one device's, by the contract's layout."""
    if reference is None:
        return state.master.clone()
    wanted = reference[step][list(state.layers)][..., part(args.d_hidden, args.tp, mesh.tp.rank)]
    if getattr(args, "zero_stage", 0):
        wanted = wanted[:, part(args.d_model, args.dp, mesh.dp.rank)]
    assert wanted.shape == state.master.shape, (wanted.shape, state.master.shape)
    if not wanted.numel():
        return 0.0
    return ((state.master - wanted).abs().max() / reference[step].abs().max()).item()


def run_main(path, flags):
    """Run a script's main as torchrun would; return (exit code, what it printed)."""
    sys.argv = [str(path), "--plot", "none", *flags.split()]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = load(path).main()
    return code, printed.getvalue()


def launch(ranks, script, *flags, cwd=ROOT, limit=120, env=None):
    """Run torchrun as a user would, or python where ranks is 0; return the CompletedProcess.

    Whatever the outcome, all its processes are gone afterwards."""
    command = [sys.executable, str(script), *flags]
    if ranks:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = torchrun
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{' '.join(command)} takes longer than {limit} s") from None
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def workers(launcher):
    """Return the ids of torchrun's ranks."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True)
    return [int(pid) for pid in listed.stdout.split()]


def end(process):
    """End torchrun and its ranks. Those are in sessions of their own: it alone can end them all."""
    if process.poll() is None:
        left = workers(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        for pid in [process.pid, *left] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait()


def edit(folder, script, old, new, file=None):
    """Copy a script and common.py to the folder with one change; return the copy's path."""
    for path in script, ROOT / "common.py":
        text = path.read_text()
        if path == (file or script):
            assert text.count(old) == 1, f"{path.name} has {text.count(old)} times: {old}"
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    return folder / script.name


def run_to_the_end(path, flags, ranks, limit=60, whole=False):
    """Run a script as its own program on some ranks; return [(exit code, stdout, stderr)].

    Much quicker than torchrun, and says what each rank's exit code is. `whole`: as a program does,
    take down the interpreter and the libraries' threads before leaving, which is where ends go
    wrong; it takes another second."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=be_a_rank, args=(str(path), flags, rank, ranks, folder, whole))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(limit)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        assert not late, f"{len(late)} of {ranks} ranks hang: {path} {flags}"
        texts = [
            [(Path(folder) / f"{rank}.{n}").read_text() for n in (1, 2)] for rank in range(ranks)
        ]
        return [(process.exitcode, *text) for process, text in zip(processes, texts)]


def be_a_rank(path, flags, rank, ranks, folder, whole):
    for n in 1, 2:
        os.dup2(os.open(f"{folder}/{rank}.{n}", os.O_WRONLY | os.O_CREAT), n)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    rendezvous = f"file://{folder}/rendezvous"
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=ranks, timeout=limit)
    sys.argv = [path, "--plot", "none", *flags.split()]
    script = load(path)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 – pytest may have replaced it
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if not whole:
        sys.modules["common"].run(script.main)  # multiprocessing leaves by os._exit
    code = 0
    try:
        sys.modules["common"].run(script.main)
    except SystemExit as end:
        code = end.code
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code or 0))
