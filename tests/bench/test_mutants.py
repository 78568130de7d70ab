"""The mutants: what may be changed in a script, and what is counted."""

from pathlib import Path

import pytest
from redis import Redis

from bench.mutants import __main__ as mutants
from bench.mutants.__main__ import Mutant, folders_of

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
    assert [new for _, new in mutants.changes(line + "\n")] == expected


@pytest.mark.slow
def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = mutants.draw(server, SOURCE, 1, 2)
        assert drawn == mutants.draw(server, SOURCE, 1, 2) != mutants.draw(server, SOURCE, 2, 2)
        broken = Mutant("streaming/lua/accept.lua", "#!lua name=put\nif then")
        assert not mutants.compiles(server, SOURCE, broken)


def test_the_tests_of_a_file_are_those_of_its_folder_then_of_its_room_and_then_of_all_others() -> None:
    others = ("tests/api", "tests/workers", "tests/scheduler", "tests/offline")
    assert folders_of(SOURCE, "streaming/jobs/relay.py") == [("tests/streaming/jobs",), ("tests/streaming",), others]
    assert folders_of(SOURCE, "streaming/lua/claim.lua") == [("tests/streaming",), others]
