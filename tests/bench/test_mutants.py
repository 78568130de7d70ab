"""The mutants: what may be changed in a script, and what is counted."""

from pathlib import Path

import pytest
from redis import Redis

from bench.mutants import lua
from bench.mutants.__main__ import MutantTrial, rows
from bench.mutants.lua import Mutant
from bench.trials import FAILED, PASSED, TIMED_OUT, SuiteRun

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


@pytest.mark.parametrize(
    ("code", "killed"), [(FAILED, True), (TIMED_OUT, True), (2, True), (PASSED, False), (None, False)]
)
def test_a_mutant_is_killed_when_a_test_does_not_pass(code: int | None, killed: bool) -> None:
    trial = MutantTrial(Mutant("api/a.py", "swap", "b\n"), "a", 3, 2, None if code is None else SuiteRun(code, 1.0, ""))
    assert trial.killed is killed
    assert [(row["room"], row["mutants"], row["percent"]) for row in rows([trial])] == [
        ("api", 1, 100 * killed),
        ("all", 1, 100 * killed),
    ]


def test_a_mutant_is_named_by_what_it_changes() -> None:
    before = "def f():\n    return 1\n"
    mutant = Mutant("api/a.py", "number", "def f():\n    return 2\n")
    assert mutant.name(before) == "api/a.py:2: return 1 -> return 2"
    twice = Mutant("api/a.py", "number", "a = 1\nb = 0\na = 2\n")
    assert twice.name("a = 1\nb = 0\na = 1\n") == "api/a.py:3: a = 1 -> a = 2"
