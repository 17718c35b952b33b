"""The README keeps its word: its commands run and print what it shows, its edits break what they
should, its links lead somewhere.

    python tests/test_readme.py [WORD…]     # run the blocks that contain the words (or all), and
                                            # write into README.md what they print now
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import ROOT, SCRIPTS, edit, run_to_the_end

README = ROOT / "README.md"
SET_UP = re.compile(r"^python3 -m venv .*?requirements\.txt &&\s*", re.S)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def blocks():
    """Return [(language, body, what the ```text block right after it shows or None)]."""
    found, text = [], README.read_text()
    matches = list(FENCED.finditer(text))
    for match, after in zip(matches, [*matches[1:], None]):
        shown = None
        if after and after[1] == "text" and text[match.end() : after.start()].strip() == "":
            shown = after[2]
        if match[1] != "text":
            found.append((match[1], match[2], shown))
    return found


COMMANDS = [(body, shown) for kind, body, shown in blocks() if kind == "sh" if "pytest" not in body]
EDITS = [(body, shown) for kind, body, shown in blocks() if kind == "diff" if body[0] == "#"]
EXERCISES = [match[2] for match in FENCED.finditer(README.read_text()) if match[2][0] == "$"]
LESSONS = [body for kind, body, _ in blocks() if kind == "diff" if body[0] != "#"]


def run_command(body, cwd):
    """Return what a ```sh block prints, without the set-up that this test's Python had already."""
    folder = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = "set -e\n" + SET_UP.sub("", body)
    result = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, timeout=180
    )
    expected = 1 if body.startswith("git diff") else 0
    assert result.returncode == expected, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def run_edit(body, folder):
    """Apply a "break it" edit to a copy and return what its run prints."""
    head, *lines = body.splitlines()
    script, flags = head.removeprefix("# ").split(" ", 1)
    old = "".join(line[1:] + "\n" for line in lines if line[0] == "-")
    new = "".join(line[1:] + "\n" for line in lines if line[0] == "+")
    path = edit(folder, ROOT / script, old, new)
    ranks = run_to_the_end(path, flags, 1 if script.startswith("01") else 4)
    out = ranks[0][1]
    assert {code for code, _, _ in ranks} == {1} and "OK" not in out, (out, ranks[0][2])
    return "".join(f"{line}\n" for line in out.splitlines() if line.startswith("FAILED"))


def run_exercise(body, folder):
    """Return what a "build it" command prints when tests/solutions has solved it."""
    command = body.splitlines()[0].removeprefix("$ ") + " --plot none"
    script = next(path for path in SCRIPTS.values() if path.name in command)
    for path in script, ROOT / "common.py":
        shutil.copy(path, folder)
    solution = ROOT / "tests/solutions" / f"{script.stem}.diff"
    subprocess.run(["git", "apply", solution], cwd=folder, check=True)
    return run_command(command, folder)


# Numbers that the machine decides, on lines where others must be as shown.
MACHINE = [
    (r"^(step +\d+  loss .*?) +[\d.]+ ms$", r"\1 ms"),
    (r"^step [\d.]+ ms \(median\).*", "step"),
    (r"within \S+ +OK", "within OK"),
    (r"^  measured [\d.]+ ms: .*", "  measured"),
    (r"bubble / compute: \S+", "bubble / compute:"),
    (r"^ *\d+ MB .*", "MB"),
    (r"^(all ranks equally|the last at|the same, --batch-shares) .*", r"\1"),
    (r"^(gpipe|1f1b|interleaved|zb-h1) .*", r"\1"),
    # chapter 6: a layout's times, times and choice by rows, and where a layout was faster
    (r"^((?:batch|1d|2d|gathered|pipeline) +\w+) +[\d.,]+ +[\d.,]+ +[\d.,]+", r"\1"),
    (r"^( +\d+)(?: +[\d.]+){5}  \S+ +(\S+)$", r"\1 \2"),
    (r"; faster at .*", "; faster at"),
    (r"rank \d+ ", "rank "),
]
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def comparable(text):
    """Return [(line without its numbers, its numbers)], without what is only said of few cores."""
    lines = []
    for line in text.splitlines():
        for pattern, by in MACHINE:
            line = re.sub(pattern, by, line)
        numbers = [float(number.replace(",", "")) for number in NUMBER.findall(line)]
        if "fewer cores than ranks" not in line:
            lines.append((" ".join(NUMBER.sub("#", line).split()), numbers))
    return lines


def same(ours, theirs):
    (words, numbers), (their_words, their_numbers) = ours, theirs
    # How far off an edit leads depends on its timing, the rest on rounding at most.
    close = "FAILED" in words or numbers == pytest.approx(their_numbers, rel=2e-3, abs=1e-12)
    return words == their_words and close


def assert_printed(shown, printed):
    """What the README shows was printed, in this order; where it shows no … nothing else was."""
    lines, left = comparable(printed), comparable(shown)
    if "…" not in shown:
        assert len(left) == len(lines), printed
    for line in lines:
        if left and left[0][0] == "…":
            left.pop(0)
        if left and same(left[0], line):
            left.pop(0)
    assert left in ([], [("…", [])]), f"not printed: {left[0]}\n{printed}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository: commands write files, and later ones read them."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in [*SCRIPTS.values(), ROOT / "common.py", README]:
        (folder / path.name).write_text(path.read_text())
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=lambda *_: ["__pycache__"])
    (folder / ".github/figures").mkdir(parents=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "body, shown", COMMANDS, ids=[b.split("\n")[-2][-60:] for b, _ in COMMANDS]
)
def test_command(body, shown, checkout):
    if "unshare" in body:
        can = ["unshare", "-Urn", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit"]
        try:
            subprocess.run([*can, "burst", "1mb", "latency", "1ms"], check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs Linux with user namespaces and iproute2's tc")
    printed = run_command(body, checkout)
    if shown is not None:
        assert_printed(shown, printed)


@pytest.mark.slow
@pytest.mark.parametrize("body, shown", EDITS, ids=[body.split("\n")[1] for body, _ in EDITS])
def test_break_it(body, shown, tmp_path):
    assert_printed(shown, run_edit(body, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("body", EXERCISES, ids=lambda body: re.search(r"0\d_\w+", body)[0])
def test_build_it(body, tmp_path):
    assert_printed(body.split("\n", 1)[1], run_exercise(body, tmp_path))


def test_there_are_edits_and_an_exercise_for_each_chapter():
    for path in SCRIPTS.values():
        assert sum(path.name in body for body, _ in EDITS) >= 3
        assert sum(path.name in body for body in EXERCISES) == 1


def test_lessons_are_in_the_diffs():
    """The lines that a chapter picks out of its diff are in it."""
    for lesson in LESSONS:
        added = [line for line in lesson.splitlines() if line[0] == "+"]
        diffs = [diff_of(n).splitlines() for n in range(1, 6)]
        assert any(all(line in diff for line in added) for diff in diffs), lesson
    for code in [body for kind, body, _ in blocks() if kind == "python"]:
        assert any(code in path.read_text() for path in SCRIPTS.values()), code


def diff_of(n):
    command = ["git", "diff", "--no-index", "--no-color", SCRIPTS[n].name, SCRIPTS[n + 1].name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def diff_size(n):
    lines = diff_of(n).splitlines()[4:]
    return "+{} −{}".format(*(sum(line[0] == sign for line in lines) for sign in "+-"))


def test_diff_sizes():
    for n in range(1, 6):
        assert f"{n + 1} " in README.read_text()
        row = next(line for line in README.read_text().splitlines() if f"0{n} → 0{n + 1} |" in line)
        assert diff_size(n) in row, f"{row} should say {diff_size(n)}"


def test_links_and_paths():
    text = README.read_text()
    for path in re.findall(r"\]\(([^)]+)\)", FENCED.sub("", text)):
        assert path.startswith("http") or (ROOT / path.split("#")[0]).exists(), path
    for path in re.findall(r"\b(?:tests/|0\d_)\w+\.py", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"(?<![\w`-])--[a-z][\w-]+", text):
        known = "standalone nproc-per-node local-addr no-index nnodes node-rank max-restarts"
        flags = (ROOT / "common.py").read_text()
        assert (
            f'"{name}"' in flags or name[2:] in f"{known} master-addr master-port fused memory all"
        ), name


FUNCTION = re.compile(r"\[`(\w+)`\]\((\w+\.py)#L(\d+)\)")


def line_of(name, path):
    """Return the line of the file on which the function begins."""
    lines = (ROOT / path).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.startswith(f"def {name}("))


def test_links_to_functions():
    links = FUNCTION.findall(README.read_text())
    assert len(links) >= 12
    for name, path, line in links:
        assert int(line) == line_of(name, path), f"{name} is on line {line_of(name, path)}"


def as_shown(shown, printed):
    """Return what was printed, less what the README leaves out of it now."""

    def kind(line):
        words, numbers = comparable(line + "\n ")[0]
        return words, numbers[:1] if words.startswith("step #") else None

    kept, left = [], printed.splitlines()
    for line in shown.splitlines():
        places = [i for i, other in enumerate(left) if kind(other) == kind(line)]
        if line == "…":
            kept.append(line)
        elif places:
            kept.append(left[places[0]])
            left = left[places[0] + 1 :]
    return "\n".join(kept or printed.splitlines()) + "\n"


def fill(words):
    text = README.read_text()
    for n in range(1, 6):
        text = re.sub(rf"(0{n} → 0{n + 1} \|) [^|]*\|", rf"\1 {diff_size(n)} |", text)
    text = FUNCTION.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{line_of(m[1], m[2])})", text)
    with tempfile.TemporaryDirectory() as folder:
        for body, shown in COMMANDS + EDITS:
            if shown is None or not all(word in body for word in words):
                continue
            print(body)
            if (body, shown) in EDITS:
                lines = run_edit(body, Path(folder)).splitlines()
                sent = [line for line in lines[3:] if "rank 0 sent" in line][:1]
                printed = "\n".join(lines[:3] + sent + ["…"] * (len(lines) > 3)) + "\n"
            else:
                printed = as_shown(shown, run_command(body, ROOT))
            print(printed)
            old, new = (f"{body}```\n\n```text\n{each}```" for each in (shown, printed))
            assert text.count(old) == 1, body
            text = text.replace(old, new)
    for body in EXERCISES:
        if all(word in body for word in words):
            command, shown = body.split("\n", 1)
            with tempfile.TemporaryDirectory() as folder:
                printed = run_exercise(body, Path(folder))
            text = text.replace(body, f"{command}\n{as_shown(shown, printed)}")
    README.write_text(text)


if __name__ == "__main__":
    fill(sys.argv[1:])
