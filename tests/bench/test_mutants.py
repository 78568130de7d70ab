"""The mutants: what may be changed in a script, what is tried, and how it is counted."""

import shutil
from pathlib import Path

import pytest
from redis import Redis

from bench import trials
from bench.mutants import lua
from bench.mutants.__main__ import mixed
from bench.mutants.report import (
    Mutant,
    MutantTrial,
    as_document,
    false_kills,
    line,
    try_mutant,
)
from bench.reach.reach import Reach
from bench.trials import FAILED, PASSED, TIMED_OUT, SuiteRun, TreeCopies

SOURCE = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if a < b then", ["if a <= b then"]),
        ("if a ~= 'x < y' then", ["if a == 'x < y' then"]),
        ("local n = t[3] -- 4", ["local n = t[4] -- 4"]),
        ("return a and not b", ["return a or not b", "return a and  b"]),
        ("  redis.call('DEL', key)", [""]),
        ("  total = total + 2", ["  total = total - 2", "  total = total + 3", ""]),
        ("if gone then return end", [""]),
        ("local empty = {}", []),
        ("  call(function()", []),
    ],
)
def test_a_line_of_a_script_is_changed_in_one_place(line: str, expected: list[str]) -> None:
    assert [new for _, _, new in lua.changes(line + "\n")] == expected


@pytest.mark.slow
def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = lua.draw(server, SOURCE, 1, 5)
        assert drawn == lua.draw(server, SOURCE, 1, 5)
        assert drawn != lua.draw(server, SOURCE, 2, 5)
        broken = Mutant("streaming/lua/accept.lua", "none", "#!lua name=put\nif then")
        assert not lua.compiles(server, SOURCE, broken)
        assert all(lua.compiles(server, SOURCE, each) for each in drawn)


def _trial(code: int | None, *, null: bool = False, unsure: tuple[str, ...] = ()) -> MutantTrial:
    run = (
        None if code is None else SuiteRun(code, 1.0, "FAILED tests/a.py::one - no\n" if code == FAILED else "", unsure)
    )
    return MutantTrial(Mutant("api/a.py", "swap", "b\n"), "a", 3, 2, run, null)


@pytest.mark.parametrize(
    ("code", "killed"), [(FAILED, True), (TIMED_OUT, True), (2, True), (PASSED, False), (None, False)]
)
def test_a_mutant_is_killed_when_a_test_does_not_pass(code: int | None, killed: bool) -> None:
    assert _trial(code).killed is killed


def test_false_kills_are_told_beside_the_score() -> None:
    """A null mutant is none of the mutants; one without tests was not tried."""
    nulls = [_trial(code, null=True) for code in (PASSED, FAILED, None)]
    assert false_kills(nulls) == (1, 2)
    told = as_document([_trial(PASSED)], nulls, {})
    assert [told[name] for name in ("mutants", "killed", "null", "null_killed")] == [1, 0, 2, 1]
    assert told["survivors"] == ["a"]
    assert "nothing changed, tests of a" in line(nulls[1])


def test_null_mutants_stand_at_the_places_of_others() -> None:
    """By chance, and among the others."""
    mutants = [Mutant("api/a.py", "number", f"a = {number}\n") for number in range(50)]
    tries = mixed(mutants, 20, 1)
    assert len(tries) == 70 and sum(null for _, null in tries) == 20 and {mutant for mutant, _ in tries} == {*mutants}
    assert tries == mixed(mutants, 20, 1) != mixed(mutants, 20, 2) and not all(null for _, null in tries[50:])
    assert len(mixed(mutants[:3], 20, 1)) == 6


def test_a_null_mutant_is_tried_by_the_same_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is changed."""

    def run_tests(tree: Path, tests: list[str], *_: str, limit_s: float) -> SuiteRun:
        return SuiteRun(
            PASSED if (tree / "api/a.py").read_text() == "a = 0\n" else FAILED, limit_s, f"FAILED {tests[0]}"
        )

    monkeypatch.setattr(trials, "run_tests", run_tests)
    (tmp_path / "tree" / "tests").mkdir(parents=True)
    (tmp_path / "tree" / "api").mkdir()
    (tmp_path / "tree" / "api/a.py").write_text("a = 0\n")
    copies = TreeCopies(tmp_path / "tree", tmp_path, shutil.copytree)
    reach = Reach({"tests/a.py::one": 0.1}, {"api/a.py": {1: frozenset({"tests/a.py::one"})}})
    mutant = Mutant("api/a.py", "number", "a = 1\n")
    real, null = try_mutant(copies, mutant, reach), try_mutant(copies, mutant, reach, null=True)
    assert (real.killed, null.killed, real.null, null.null) == (True, False, False, True)
    assert null.tried == real.tried == 1


def test_a_mutant_is_named_by_what_it_changes() -> None:
    before = "def f():\n    return 1\n"
    mutant = Mutant("api/a.py", "number", "def f():\n    return 2\n")
    assert mutant.name(before) == "api/a.py: return 1 -> return 2"
    twice = Mutant("api/a.py", "number", "a = 1\nb = 0\na = 2\n")
    assert twice.name("a = 1\nb = 0\na = 1\n") == "api/a.py: a = 1 (2 of 2) -> a = 2"
