"""Many runs in a row, for what happens once in a hundred: not a test, for it takes as long as it is
given.

    python tests/soak.py kills --count 50     jobs with killed ranks must end as if undisturbed
    python tests/soak.py exits --count 300    runs of each script must all end cleanly
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from harness import ROOT, SCRIPTS, end, run_to_the_end, workers

LIMIT = 180  # seconds; a job that takes longer hangs

# ------------------------------------------------------------------------------------------- kills

STEPS, EVERY = 40, 5
SMALL = "--layers 4 --d-model 8 --d-hidden 16 --batch-size 16"
SMALL += f" --steps {STEPS} --save-every {EVERY} --no-check --plot none"
JOBS = [  # chapter, ranks, flags
    (1, 1, ""),
    (1, 1, "--microbatches 2 --dtype bfloat16"),
    (2, 2, ""),
    (2, 3, "--batch-shares 3,2,1 --dtype bfloat16"),
    (2, 4, "--collectives naive"),
    (2, 2, "--collectives torch --no-overlap"),
    (3, 2, ""),
    (3, 4, "--tp 2 --microbatches 2"),
    (3, 4, "--sequence-parallel"),
    (4, 2, "--schedule gpipe"),
    (4, 2, "--schedule interleaved"),
    (4, 4, "--schedule zb-h1"),
    (4, 4, "--tp 2"),
    (5, 2, "--zero-stage 1 --dtype bfloat16"),
    (5, 3, "--zero-stage 2"),
    (5, 4, "--zero-stage 3 --dtype float64"),
    (5, 4, "--tp 2 --zero-stage 3"),
    (5, 4, "--tp 2 --sequence-parallel --zero-stage 1"),
    (5, 4, "--pp 2 --zero-stage 2 --microbatches 4"),
    (5, 4, "--tp 2 --pp 2 --microbatches 4"),
]


def saved(folder):
    """Return the last step that is saved, or 0."""
    steps = [int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")]
    return max(steps, default=0)


def wait_until(condition, process):
    """Return what the condition gives once it is true, or None if the job ends before."""
    end = time.time() + LIMIT
    while time.time() < end and process.poll() is None:
        result = condition()
        if result:
            return result
        time.sleep(0.001)


def kill_one(process, ranks, folder, before, moments):
    """Kill a random rank, none of those in `before`, at a random moment.

    Return (the ranks, when it was in words, what was saved by then), or None if too late."""

    def all_started():
        found = workers(process.pid)
        return found if len(found) == ranks and not set(found) & set(before) else None

    pids = wait_until(all_started, process)
    when, step = moments.choice(["start", "step", "save"]), saved(folder)
    step = moments.randrange(step, STEPS, EVERY) if step < STEPS else step
    if when == "start":
        time.sleep(moments.uniform(0, 4))
    elif when == "step":  # so long after a save, and often in one
        wait_until(lambda: saved(folder) >= step, process)
        time.sleep(moments.uniform(0, 0.3))
    else:
        unfinished = folder / f"unfinished-{step + EVERY}"
        wait_until(lambda: unfinished.exists() or saved(folder) > step, process)
        time.sleep(moments.uniform(0, 0.03))
    before_it = saved(folder)
    victim = moments.randrange(ranks)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
            return pids, f"rank {victim} at {when} after {before_it}", before_it


def disturbed(chapter, ranks, flags, folder, moments):
    """Run a job under torchrun and kill ranks of it; return (exit code, output, [the kills])."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    command += [f"--nproc-per-node={ranks}", str(SCRIPTS[chapter]), *SMALL.split(), *flags.split()]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--checkpoint", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        kills, code = [], "hangs"
        try:
            for _ in range(moments.choice([1, 1, 2])):
                kill = kill_one(process, ranks, folder, kills[-1][0] if kills else [], moments)
                kills += [kill] if kill else []
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
        output.seek(0)
        return code, output.read(), kills


def tensors(folder):
    """Load the checkpoint after the last step: {key: tensor}."""
    path = folder / f"step-{STEPS}"
    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    result = {key: torch.empty(t.size, dtype=t.properties.dtype) for key, t in known.items()}
    dcp.load(result, checkpoint_id=path, no_dist=True)
    return result


def differing(expected, got):
    """Return the keys whose tensors are not the same to the bit."""
    same = {key for key in expected.keys() & got.keys() if torch.equal(expected[key], got[key])}
    return sorted((expected.keys() | got.keys()) - same)


def kills(count, until, seed):
    """Return the number of jobs that went wrong."""
    print(f"kills: seed {seed}", flush=True)
    moments, undisturbed, totals, slowest = random.Random(seed), {}, collections.Counter(), 0.0
    for number in range(count):
        if time.time() > until:
            break
        job = chapter, ranks, flags = moments.choice(JOBS)
        with tempfile.TemporaryDirectory() as folder:
            if job not in undisturbed:
                calm = Path(folder) / "calm"
                results = run_to_the_end(
                    SCRIPTS[chapter], f"{SMALL} {flags} --checkpoint {calm}", ranks, LIMIT
                )
                assert {code for code, _, _ in results} == {0}, results
                undisturbed[job] = tensors(calm)
            harsh, start = Path(folder) / "harsh", time.time()
            code, output, done = disturbed(chapter, ranks, flags, harsh, moments)
            took = time.time() - start
            wrong, resumed = [], "resumed from" in output
            if code != 0:
                wrong.append(f"exit code {code}")
            # Killed after the last save it may have ended already.
            must = any(0 < step < STEPS for _, _, step in done)
            if must and not resumed:
                wrong.append("did not resume")
            if saved(harsh) < STEPS:
                wrong.append(f"saved only {saved(harsh)}")
            elif differing(undisturbed[job], tensors(harsh)):
                wrong.append(f"differs: {differing(undisturbed[job], tensors(harsh))}")
            left = sorted(path.name for path in harsh.glob("*"))
            expected = [f"step-{STEPS - EVERY}", f"step-{STEPS}"]
            litter = [name for name in left if name not in expected]
        totals.update(
            rounds=1,
            kills=len(done),
            due=must,
            resumed=resumed,
            identical=not any(each.startswith(("differs", "saved")) for each in wrong),
            littered=bool(litter),
            failed=bool(wrong),
        )
        slowest = max(slowest, took)
        how = ", ".join(what for _, what, _ in done) or "nobody: too late"
        print(
            f"{number:3d}  {chapter:02d} x{ranks} {flags}: killed {how};"
            f"{' resumed;' if resumed else ''} {took:.1f} s  {', '.join(wrong) or 'ok'}"
            f"{f'  (left: {litter})' if litter else ''}",
            flush=True,
        )
        if wrong:
            print("\n".join(f"     | {line}" for line in output.splitlines()[-80:]), flush=True)
    print(
        f"kills: {totals['rounds']} of {count} rounds, {totals['kills']} kills;"
        f" {totals['resumed']} resumed ({totals['due']} had to);"
        f" {totals['identical']} bit-identical; {totals['littered']} left files behind;"
        f" {totals['failed']} failed; slowest {slowest:.1f} s; seed {seed}",
        flush=True,
    )
    return totals["failed"]


# ------------------------------------------------------------------------------------------- exits

TINY = "--layers 3 --d-model 8 --d-hidden 16 --batch-size 16"
VARIANTS = {  # chapter: flags, taken in turn
    1: ["", "--microbatches 2", "--checkpoint {folder}"],
    2: ["", "--collectives naive", "--collectives torch", "--checkpoint {folder}", "--no-check"],
    3: ["", "--sequence-parallel", "--no-overlap", "--checkpoint {folder}"],
    4: ["", "--schedule gpipe", "--schedule zb-h1", "--schedule interleaved --microbatches 4"],
    5: ["", "--zero-stage 1", "--zero-stage 2", "--checkpoint {folder}", "--no-check"],
    6: ["--layout batch", "--layout 1d", "--layout gathered", "--layout pipeline"],
}
UGLY = "Traceback", "terminate called", "Fatal Python error", "core dumped", "Aborted"


def under_torchrun(script, flags, ranks, whole=True):
    """As run_to_the_end, but by torchrun: return [(exit code, stdout, stderr)] of it alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script), *flags.split(), "--plot", "none"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{' '.join(command)} hangs") from None
    finally:
        end(process)
    return [(process.returncode, out, err)]


def exits(count, until, seed):
    """Return the number of runs that did not end cleanly. Each 30th is under torchrun."""
    done = {chapter: collections.Counter() for chapter in SCRIPTS}
    slowest = collections.Counter()
    for number in range(count):
        for chapter, script in SCRIPTS.items():
            if time.time() > until:
                break
            variants, ranks = VARIANTS[chapter], 1 if chapter == 1 else 2
            how = under_torchrun if number % 30 == 29 else run_to_the_end
            with tempfile.TemporaryDirectory() as folder:
                flags = variants[(number // 30 + number) % len(variants)].format(folder=folder)
                flags = f"{TINY} {'--tokens' if chapter == 6 else '--steps'} 2 {flags}"
                start, wrong = time.time(), ""
                try:
                    results = how(script, flags, ranks, whole=True)
                except AssertionError as error:
                    results, wrong = [], str(error)
                slowest[chapter] = max(slowest[chapter], time.time() - start)
            errors = "".join(err for _, _, err in results)
            if any(code != 0 for code, _, _ in results):
                wrong = f"exit codes {[code for code, _, _ in results]}"
            elif any(word in errors for word in UGLY):
                wrong = "something on standard error"
            done[chapter].update(
                runs=1, torchrun=how is under_torchrun, failed=bool(wrong), noisy=bool(errors)
            )
            if wrong or errors:
                print(f"{script.name} {flags}: {wrong or 'ok, but said'}\n{errors}", flush=True)
    for chapter, script in SCRIPTS.items():
        n = done[chapter]
        print(
            f"exits: {script.name}: {n['runs']} of {count} runs ({n['torchrun']} by torchrun),"
            f" {n['failed']} failed, {n['noisy']} wrote to standard error,"
            f" slowest {slowest[chapter]:.1f} s",
            flush=True,
        )
    return sum(n["failed"] for n in done.values())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kills", "exits"])
    parser.add_argument("--count", type=int, default=50, help="rounds, or runs of each script")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after them")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the comparison runs alone
    what = {"kills": kills, "exits": exits}[args.what]
    return 1 if what(args.count, time.time() + 60 * args.minutes, args.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
