"""The table of planted bugs fits the tree, and what counts as caught."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.planted import sound
from bench.planted.bug import Bug, Edit, Rotten
from bench.planted.bugs import BUGS
from bench.planted.copies import TreeCopies
from bench.planted.since import bugs_since
from bench.planted.sound import CHUNK_TESTS, SoundRun, chunks, try_none
from bench.planted.tree import PACKAGES
from bench.planted.trial import (
    FAILED,
    FIRST_TESTS,
    PASSED,
    TIMED_OUT,
    BugTrial,
    Chosen,
    SuiteRun,
    as_document,
    choose,
    run_changed,
    run_tests,
    run_until_noticed,
)
from bench.program import WrongArguments
from bench.reach.reach import Reach

pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[2]

NAMED = Chosen(("tests/t.py::test_x",))


@pytest.fixture
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a test need no plugin; reading all that are installed takes longer than those tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_every_package_is_in_a_copy() -> None:
    """One left out would be imported from the installed tree, or be missed."""
    settings = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(PACKAGES) == sorted(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


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


def test_the_tests_that_run_a_line_of_a_bug_are_chosen(tmp_path: Path) -> None:
    """Those named with it, then the quickest, as long as there is time."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "a.py").write_text("def one():\n    two\n    three\n")
    bug = Bug("n", "x", (Edit("api/a.py", "two", "2"),), ("named",))
    seconds = {"slow": 110.0, "quick": 1.0, "slower": 115.0, "other": 1.0}
    lines = {1: frozenset({"other"}), 2: frozenset({"slow", "slower", "quick"})}
    known = Reach(seconds, {"api/a.py": lines})
    chosen = choose(tmp_path, bug, known)
    assert (chosen.tests, chosen.covering) == (("named", "quick", "slow"), 3)
    assert choose(tmp_path, bug, Reach(seconds, {})).tests == choose(tmp_path, bug, None).tests == ("named",)


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
    assert BugTrial(BUGS[0], SuiteRun(code, 1.0, output), NAMED).caught is caught


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


def test_no_path_of_this_machine_is_published(tmp_path: Path) -> None:
    """Of a file its name is kept; an address of the API is no path."""
    said = f"FAILED tests/test_a.py::test_b - Gone: '{tmp_path}/data' beside {sys.executable}, not /v1/jobs\n"
    trial = BugTrial(BUGS[0], SuiteRun(FAILED, 1.0, said), NAMED)
    (row,) = as_document([trial], 1.0)["bugs"]
    assert row["said"] == f"Gone: '…/data' beside …/{Path(sys.executable).name}, not /v1/jobs"


@pytest.mark.usefixtures("plain_pytest")
def test_every_test_runs_without_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, whole files together and several runs at a time; each that does not pass is told, and each run that
    says nothing."""
    monkeypatch.setattr(sound, "check_origins", lambda tree: None)
    monkeypatch.setattr(sound, "CHUNK_TESTS", 2)
    passes = "from pathlib import Path\ndef test_{0}():\n    Path('ran').open('a').write('{0} ')\n"
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(passes.format(name))
    with (tmp_path / "test_c.py").open("a") as file:
        file.write("def test_fails():\n    assert 1 == 2\n")
    tests = tuple(f"test_{name}.py::test_{name}" for name in "abcde")
    bugs = [Bug("n", "x", (), tests), Bug("m", "x", (), (tests[0], "test_c.py::test_fails"))]
    run = try_none(tmp_path, bugs, 2)
    assert sorted((tmp_path / "ran").read_text().split()) == ["a", "b", "c", "d", "e"]
    assert [line.partition(" - ")[0] for line in run.failures] == ["FAILED test_c.py::test_fails"]
    assert (len(run.runs), run.broken) == (3, [])
    assert run.seconds >= max(each.seconds for each in run.runs)
    run = try_none(tmp_path, [*bugs, Bug("o", "x", (), ("test_f.py::test_gone",))], 2)
    assert len(run.failures) == len(run.broken) == 1 and "test_f.py" in run.broken[0]


def test_a_chunk_has_whole_files() -> None:
    tests = [test for bug in BUGS for test in bug.tests]
    parts = list(chunks(reversed(tests)))
    assert sorted(test for part in parts for test in part) == sorted(set(tests))
    found = [{test.partition("::")[0] for test in part} for part in parts]
    assert len(found) <= len(set(tests)) / CHUNK_TESTS + 1
    assert sum(map(len, found)) == len(set().union(*found)), "no file is in two"


def test_a_test_that_fails_without_a_bug_fails_the_run() -> None:
    without = SoundRun(1.0, (SuiteRun(FAILED, 1.0, "E\nERROR tests/t.py::test_x - OSError: full\n1 error"),))
    caught = BugTrial(BUGS[0], SuiteRun(FAILED, 1.0, "FAILED tests/t.py::test_x\n"), NAMED)
    assert as_document([caught], 1.0)["passed"] and not as_document([caught], 1.0, without.failures)["passed"]


def test_bugs_are_chosen_by_what_changed_since_a_commit(tmp_path: Path) -> None:
    """By the file, by the file of a test, by the bug's own name; also what git does not track yet."""
    table = tmp_path / "bench" / "planted" / "table.py"
    table.parent.mkdir(parents=True)
    table.write_text('"same" "file" "test" "untracked"')
    for name in ("same", "file", "test_same", "test_changed"):
        (tmp_path / name).write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    bugs = [
        Bug(name, "x", (Edit(file, "1", "2"),), (f"{test}::test",))
        for name, file, test in (
            ("same", "same", "test_same"),
            ("file", "file", "test_same"),
            ("test", "same", "test_changed"),
            ("new", "same", "test_same"),
            ("untracked", "same", "test_new"),
        )
    ]
    assert [bug.name for bug in bugs_since(tmp_path, "HEAD", bugs)] == ["new"]
    for name in ("file", "test_changed", "test_new"):
        (tmp_path / name).write_text("3")
    assert [bug.name for bug in bugs_since(tmp_path, "HEAD", bugs)] == ["file", "test", "new", "untracked"]
    with pytest.raises(WrongArguments, match="no-such-commit"):
        bugs_since(tmp_path, "no-such-commit", bugs)
