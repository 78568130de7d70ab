"""The mutants: what may be changed in a script, and how it is counted."""

from pathlib import Path

import pytest
from redis import Redis

from bench.mutants import lua
from bench.mutants.mutant import Mutant
from bench.mutants.report import Named, Verdict, as_document, judged, score, survivors
from bench.mutants.trial import Trial
from bench.planted.trial import FAILED, PASSED, TIMED_OUT, Run

SOURCE = Path(__file__).parents[1]


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


def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = lua.draw(server, SOURCE, 1, 5)
        assert drawn == lua.draw(server, SOURCE, 1, 5)
        assert drawn != lua.draw(server, SOURCE, 2, 5)
        broken = Mutant("streaming/lua/put.lua", "none", "if then")
        assert not lua.compiles(server, SOURCE, broken)
        assert all(lua.compiles(server, SOURCE, each) for each in drawn)


def _trial(code: int | None) -> Trial:
    run = None if code is None else Run(code, 1.0, "FAILED tests/a.py::one - no\n" if code == FAILED else "")
    return Trial(Mutant("api/a.py", "swap", "b\n"), 3, 2, run)


@pytest.mark.parametrize(
    ("code", "killed"), [(FAILED, True), (TIMED_OUT, True), (2, True), (PASSED, False), (None, False)]
)
def test_a_mutant_is_killed_when_a_test_does_not_pass(code: int | None, killed: bool) -> None:
    assert _trial(code).killed is killed


def test_what_nobody_can_notice_does_not_count() -> None:
    left = Named(_trial(PASSED), "left", Verdict("left", "too rare"))
    same = Named(_trial(PASSED), "same", Verdict("same", "the order does not matter", equivalent=True))
    new = Named(_trial(None), "new", None)
    killed = Named(_trial(FAILED), "killed", None)
    found = [left, same, new, killed]
    assert score(found) == (1, 3)
    said = survivors(found)
    assert said[0].startswith("new\n    nobody has judged it")
    assert "equivalent: the order does not matter" in "".join(said)
    assert as_document(found, {"seed": 1})["percent"] == 33.3


def test_a_mutant_is_named_by_what_it_changes() -> None:
    before = "def f():\n    return 1\n"
    mutant = Mutant("api/a.py", "number", "def f():\n    return 2\n")
    assert mutant.name(before) == "api/a.py: return 1 -> return 2"
    twice = Mutant("api/a.py", "number", "a = 1\nb = 0\na = 2\n")
    assert twice.name("a = 1\nb = 0\na = 1\n") == "api/a.py: a = 1 (2 of 2) -> a = 2"


def test_what_was_judged_can_be_read() -> None:
    assert all(each.why for each in judged().values())
