"""Trials: changes in copies of the tree, and what counts as noticed."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.planted import Bug, Edit, Rotten, planted_bugs
from bench.trials import (
    FAILED,
    FIRST_TESTS,
    PACKAGES,
    PASSED,
    TIMED_OUT,
    SuiteRun,
    TreeCopies,
    run_changed,
    run_tests,
    run_until_noticed,
)

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
        assert run_changed(copies, {"thing.py": text}, ["test_it.py::test_it"], 60.0).code == code
        with copies.changed({}) as put_right:
            assert run_tests(put_right, ["test_it.py::test_it"]).code == PASSED
    assert (tree / "thing.py").read_text() == "RIGHT = True\n"


def test_a_copy_is_used_by_one_at_a_time_and_kept(tmp_path: Path) -> None:
    """A file that the tree does not have is gone after the change, also after an error."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("1")
    copies = TreeCopies(tree, tmp_path, shutil.copytree)
    with pytest.raises(Rotten), copies.changed({"a": "2", "b": "3"}) as first:
        with copies.changed({}) as second:
            assert second != first and (second / "a").read_text() == "1"
        assert (first / "a").read_text() + (first / "b").read_text() == "23"
        raise Rotten
    with copies.changed({}) as one, copies.changed({}) as other:
        assert {one, other} == {first, second}
        assert [path.name for path in (*one.iterdir(), *other.iterdir())] == ["a", "a"]
        assert (one / "a").read_text() == (other / "a").read_text() == "1"


@pytest.mark.usefixtures("plain_pytest")
@pytest.mark.parametrize(
    ("broken", "ran"),
    [(1, [0, 1]), (FIRST_TESTS, [*range(FIRST_TESTS + 1)]), (None, [*range(FIRST_TESTS + 2)])],
)
def test_tests_are_run_until_one_notices(tmp_path: Path, broken: int | None, ran: list[int]) -> None:
    """Among the first few, among the others, or nowhere."""
    text = "from pathlib import Path\n"
    for number in range(FIRST_TESTS + 2):
        text += f"def test_{number}():\n    Path('ran').open('a').write('{number} ')\n    assert {number != broken}\n"
    (tmp_path / "test_all.py").write_text(text)
    tests = [f"test_all.py::test_{number}" for number in range(FIRST_TESTS + 2)]
    run = run_until_noticed(lambda some: run_tests(tmp_path, some, "-x"), lambda _: SuiteRun(PASSED, 1.0, ""), tests)
    assert list(map(int, (tmp_path / "ran").read_text().split())) == ran
    assert (run.failure is not None, run.code) == ((False, PASSED) if broken is None else (True, FAILED))


class Told:
    """A tree of which is told, for the tests that matter, what pytest says of them, one run after the other."""

    def __init__(self, **says: tuple[int, str]) -> None:
        self.says = says
        self.runs: list[list[str]] = []

    def __call__(self, tests: Sequence[str]) -> SuiteRun:
        self.runs.append(list(tests))
        code, output = next((self.says[test] for test in tests if test in self.says), (PASSED, ""))
        return SuiteRun(code, 1.0, output)


FAILS, CRASHES, HANGS = (FAILED, "FAILED b - no\n"), (4, "ERROR t.py - ImportError\n"), (TIMED_OUT, "")


@pytest.mark.parametrize(
    ("changed", "sound", "code", "unsure", "asked"),
    [
        pytest.param({"b": FAILS}, {}, FAILED, (), [["b"]], id="the sound tree passes the test that failed"),
        pytest.param({"b": FAILS}, {"b": FAILS}, PASSED, ("b",), [["b"]], id="it fails too, and the others pass"),
        pytest.param(
            {"b": FAILS, "c": (FAILED, "FAILED c[1] - no\n")},
            {"b": FAILS},
            FAILED,
            ("b",),
            [["b"], ["c"]],
            id="another",
        ),
        pytest.param({"c": CRASHES}, {}, 4, (), [["a", "b", "c"]], id="only the changed tree cannot be imported"),
        pytest.param({"c": CRASHES}, {"a": CRASHES}, PASSED, ("a", "b", "c"), [["a", "b", "c"]], id="neither can"),
        pytest.param({"a": HANGS}, {}, TIMED_OUT, (), [["a", "b", "c"]], id="only the changed tree hangs"),
        pytest.param({"a": HANGS}, {"b": FAILS}, PASSED, ("a", "b", "c"), [["a", "b", "c"]], id="the sound one fails"),
        pytest.param({"b": (4, "ERROR: not found: /x/b\n")}, {}, PASSED, ("b",), [], id="a test is no more"),
        pytest.param(
            {"b": (4, "ERROR: not found: /x/b\nERROR: found no collectors for /x/c\n")},
            {},
            4,
            (),
            [["a", "b", "c"]],
            id="a file of tests cannot be imported",
        ),
    ],
)
def test_nothing_is_noticed_that_the_sound_tree_shares(
    changed: dict[str, tuple[int, str]],
    sound: dict[str, tuple[int, str]],
    code: int,
    unsure: tuple[str, ...],
    asked: list[list[str]],
) -> None:
    """A failed test is tried there by itself; all of them, where none failed."""
    before, after = Told(**sound), Told(**changed)
    run = run_until_noticed(after, before, ["a", "b", "c"])
    assert (run.code, run.unsure, before.runs) == (code, unsure, asked)
    assert run.seconds == len(after.runs)
    if code == PASSED and len(unsure) < 3:
        assert after.runs[-1] == [test for test in "abc" if test not in unsure], "the others go on"


def test_every_package_is_in_a_copy() -> None:
    """One left out would be imported from the installed tree, or be missed."""
    settings = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(PACKAGES) == sorted(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


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
