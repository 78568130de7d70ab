"""Trials: changes in copies of the tree, and what counts as noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.planted import Bug, Edit, Rotten, planted_bugs
from bench.trials import FAILED, PASSED, TIMED_OUT, SuiteRun, TreeCopies, run_tests

pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[2]


@pytest.fixture
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a test need no plugin; reading all that are installed takes longer than those tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_the_planted_bugs_fit_the_tree() -> None:
    """Otherwise `make planted` refuses to run. Each names tests that are there."""
    assert all(bug.tests and bug.patched(TREE) for bug in planted_bugs())
    for file, _, name in (test.partition("::") for bug in planted_bugs() for test in bug.tests):
        assert f"def {name.partition('[')[0]}(" in (TREE / file).read_text(), f"{file} has no {name}"


def test_a_bug_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Neither a text that is gone nor one that is there twice is replaced. Its edits are made one after the other."""
    (tmp_path / "f").write_text("a b b")
    for old in ("c", "b"):
        with pytest.raises(Rotten, match="not once"):
            Bug("n", "x", (Edit("f", "a", "x"), Edit("f", old, "x")), ("t",)).patched(tmp_path)
    assert Bug("n", "x", (Edit("f", "a", "x"), Edit("f", "x b", "y")), ("t",)).patched(tmp_path) == {"f": "y b"}


@pytest.mark.usefixtures("plain_pytest")
def test_a_change_is_made_in_a_copy_alone(tmp_path: Path) -> None:
    """The tests run there, and the tree stays as it was; a kept copy shows nothing of the change before, also where
    both are of one size and made in one second."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "thing.py").write_text("RIGHT = True\n")
    (tree / "test_it.py").write_text("import thing\n\n\ndef test_it():\n    assert thing.RIGHT\n")
    copies = TreeCopies(tree, tmp_path, shutil.copytree)
    for text, code in (("RIGHT = None\n", FAILED), ("RIGHT = True\n", PASSED), ("RIGHT = 0\n", FAILED)):
        with copies.changed({"thing.py": text}) as changed:
            assert run_tests(changed, ["test_it.py::test_it"], "-x").code == code
        with copies.changed({}) as put_right:
            assert run_tests(put_right, ["test_it.py::test_it"]).code == PASSED
    assert (tree / "thing.py").read_text() == "RIGHT = True\n"


@pytest.mark.parametrize(
    ("code", "output", "caught"),
    [
        (FAILED, "F\nFAILED tests/t.py::test_x[a b-1] - assert 1 == 2\n1 failed", True),
        (FAILED, "F\nFAILED tests/t.py::test_x\n1 failed", True),
        (FAILED, "E\nERROR tests/t.py::test_x - RuntimeError: no server\n1 error", False),
        (PASSED, "1 passed", False),
        (2, "FAILED tests/t.py::test_x", False),
        (4, "ERROR: not found", False),
        (TIMED_OUT, "not done after 90 s", False),
    ],
)
def test_only_a_failed_test_has_caught_a_bug(code: int, output: str, caught: bool) -> None:
    """Not one that could not be collected or set up, nor one that hangs."""
    assert (SuiteRun(code, 1.0, output).failure is not None) is caught
