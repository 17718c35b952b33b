"""Where two scripts differ, the difference is the lesson."""

import re
import subprocess

import pytest
from harness import ROOT, SCRIPTS

TEXTS = {n: path.read_text() for n, path in SCRIPTS.items()}


def test_main_is_the_same_to_the_byte():
    mains = {text[text.index("def main():") :] for n, text in TEXTS.items() if n < 6}
    assert len(mains) == 1


def test_order_of_functions():
    """A function has the same place among the others in all scripts that have it."""
    for n in range(1, 5):
        names, later = (re.findall(r"^def (\w+)", TEXTS[i], re.M) for i in (n, n + 1))
        assert names == [name for name in later if name in names]


def test_scripts_import_common_and_torch_alone():
    for n, text in TEXTS.items():
        imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.M))
        allowed = {"torch", "common"} | (
            {"json", "os", "argparse", "pathlib", "statistics", "time"}
        )
        assert imported <= allowed if n == 6 else imported <= {"torch", "common"}


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_diffs_add_and_hardly_take_away(n):
    command = ["git", "diff", "--no-index", "--numstat", SCRIPTS[n - 1].name, SCRIPTS[n].name]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    added, removed = map(int, out.split()[:2])
    assert added <= 200 and removed <= 25, out


def test_common_has_no_lesson():
    """No collective on a tensor, no cut: those are in the scripts."""
    code = (ROOT / "common.py").read_text()
    for word in "all_reduce( reduce_scatter all_gather_into .chunk( tensor_split".split():
        assert word not in code, word


def test_nothing_else_at_the_top():
    names = "README.md common.py requirements.txt tests".split()
    names += [path.name for path in SCRIPTS.values()]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    top = {name.split("/")[0] for name in tracked.split()}
    assert {name for name in top if name[0] != "."} == set(names)


def test_lines():
    for path in [*SCRIPTS.values(), ROOT / "common.py"]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"
