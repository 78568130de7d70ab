"""The mutants: what may be changed in a script, what is tried, and how it is counted."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from redis import Redis

from bench import trials
from bench.mutants import lua
from bench.mutants.__main__ import _seed, main, mixed
from bench.mutants.again import GONE, found_again, merged, survivors_of
from bench.mutants.report import (
    Mutant,
    MutantTrial,
    MutantVerdict,
    Named,
    as_document,
    false_kills,
    judged,
    line,
    score,
    survivors,
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
        broken = Mutant("streaming/lua/put.lua", "none", "if then")
        assert not lua.compiles(server, SOURCE, broken)
        assert all(lua.compiles(server, SOURCE, each) for each in drawn)


def _trial(code: int | None, *, null: bool = False, unsure: tuple[str, ...] = ()) -> MutantTrial:
    run = (
        None if code is None else SuiteRun(code, 1.0, "FAILED tests/a.py::one - no\n" if code == FAILED else "", unsure)
    )
    return MutantTrial(Mutant("api/a.py", "swap", "b\n"), 3, 2, run, null)


@pytest.mark.parametrize(
    ("code", "killed"), [(FAILED, True), (TIMED_OUT, True), (2, True), (PASSED, False), (None, False)]
)
def test_a_mutant_is_killed_when_a_test_does_not_pass(code: int | None, killed: bool) -> None:
    assert _trial(code).killed is killed


def test_what_nobody_can_notice_does_not_count() -> None:
    """Whatever its tests made of it."""
    left = Named(_trial(PASSED), "left", MutantVerdict("left", "too rare"))
    same = Named(_trial(PASSED), "same", MutantVerdict("same", "the order does not matter", equivalent=True))
    luck = Named(_trial(FAILED), "luck", MutantVerdict("luck", "nor does this one", equivalent=True))
    new = Named(_trial(None), "new", None)
    killed = Named(_trial(FAILED), "killed", None)
    found = [left, same, luck, new, killed]
    assert score(found) == (1, 3)
    said = survivors(found)
    assert said[0].startswith("new\n    nobody has judged it")
    assert "equivalent: the order does not matter" in "".join(said)
    told = as_document(found, [], {"seed": 1})
    assert (told["percent"], told["equivalent"], told["killed"]) == (33.3, 2, 1)


def test_false_kills_are_told_beside_the_score() -> None:
    """A null mutant is none of the mutants; one without tests was not tried. Tests that are unsure are named."""
    nulls = [_trial(code, null=True) for code in (PASSED, FAILED, None)]
    assert false_kills(nulls) == (1, 2)
    told = as_document([Named(_trial(PASSED, unsure=("tests/b.py::two",)), "a", None)], nulls, {})
    assert [told[name] for name in ("mutants", "killed", "null", "null_killed")] == [1, 0, 2, 1]
    assert told["unsure"] == ["tests/b.py::two"] and "1 left out as unsure" in told["survivors"][0]["why"]
    assert "nothing changed, tests of a" in line(nulls[1], "a")


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


def test_every_run_draws_anew_unless_it_is_told() -> None:
    """What is said of an earlier run names its seed."""
    assert _seed(main.parser.parse_args([]), None) != _seed(main.parser.parse_args([]), None)
    assert _seed(main.parser.parse_args(["--seed", "0"]), {"seed": 5}) == 0
    assert _seed(main.parser.parse_args([]), {"seed": 5}) == 5


def test_a_mutant_is_named_by_what_it_changes() -> None:
    before = "def f():\n    return 1\n"
    mutant = Mutant("api/a.py", "number", "def f():\n    return 2\n")
    assert mutant.name(before) == "api/a.py: return 1 -> return 2"
    twice = Mutant("api/a.py", "number", "a = 1\nb = 0\na = 2\n")
    assert twice.name("a = 1\nb = 0\na = 1\n") == "api/a.py: a = 1 (2 of 2) -> a = 2"


def test_what_was_judged_can_be_read() -> None:
    assert all(each.why for each in judged().values())


FIGURES = {
    "date": "2026-01-01",
    "seed": 5,
    "mutants": 10,
    "equivalent": 1,
    "killed": 6,
    "percent": 66.7,
    "unsure": ["tests/b.py::two"],
    "survivors": [{"mutant": name, "operator": "swap", "why": "nobody"} for name in ("left", "now", "gone", "same")],
    "killed_by": {"then": "a.py::one"},
}


def test_survivors_that_are_tried_again_change_the_figures_and_keep_the_first() -> None:
    """What is noticed now, what is still not, what is not in the tree any more, and what was not tried; a second time
    too."""
    verdicts = {"same": MutantVerdict("same", "nobody can tell", equivalent=True)}
    found = [Named(_trial(PASSED, unsure=("tests/c.py::three",)), "left", None), Named(_trial(FAILED), "now", None)]
    told = merged(FIGURES, found, ["gone"], verdicts, {"command": "again"})
    assert {each["mutant"]: each["why"] for each in told["survivors"]}.keys() == {"left", "gone", "same"}
    assert [each["why"] for each in told["survivors"]][1:] == [GONE, "nobody"]
    assert (told["killed"], told["equivalent"], told["percent"]) == (7, 1, 77.8)
    assert told["before"] == {
        "date": "2026-01-01", "equivalent": 1, "killed": 6, "percent": 66.7, "survivors": 4,
    }  # fmt: skip
    assert told["killed_by"] == {"then": "a.py::one", "now": "a.py::one"}
    assert (told["again"]["noticed"], told["again"]["gone"], told["again"]["command"]) == (1, 1, "again")
    assert told["unsure"] == ["tests/b.py::two", "tests/c.py::three"] and told["seed"] == 5
    later = merged(told, [Named(_trial(FAILED), "left", None)], [], verdicts, {"command": "again"})
    assert (later["killed"], later["before"]) == (8, told["before"])
    assert (later["again"]["noticed"], later["again"]["gone"]) == (2, 1)
    lucky = merged(told, [Named(_trial(FAILED), "same", verdicts["same"])], [], verdicts, {})
    assert "same" in survivors_of(lucky), "a test that failed by luck has noticed nothing"


def test_a_survivor_is_found_again_by_its_name(redis_url: str, tmp_path: Path) -> None:
    """Whatever else has changed in its file, and among all changes of its line."""
    (tmp_path / "streaming/lua").mkdir(parents=True)
    (tmp_path / "streaming/lua/put.lua").write_text("local a = 1\nif a < 2 then return 3 end\nreturn 4\n")
    wanted = ["streaming/lua/put.lua: return 4 -> return 5", "streaming/lua/put.lua: return 9 -> return 8"]
    with Redis.from_url(redis_url) as server, patch("bench.mutants.lua.compiles", lambda *_: True):
        mutants = list(lua.named(server, tmp_path, wanted))
    assert {mutant.file for mutant in mutants} == {"streaming/lua/put.lua"}
    befores = {"streaming/lua/put.lua": (tmp_path / "streaming/lua/put.lua").read_text()}
    found = found_again(mutants, befores, wanted)
    assert list(found) == wanted[:1] and found[wanted[0]].text.endswith("return 5\n")
