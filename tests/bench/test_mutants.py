"""The mutants: what may be changed in a script, and what is counted."""

from pathlib import Path

import pytest
from coverage import CoverageData
from redis import Redis

from bench.mutants import __main__ as mutants
from bench.mutants.__main__ import Mutant
from bench.mutants.reach import Reach

SOURCE = Path(__file__).parents[2]


@pytest.mark.parametrize(("line", "expected"), [
    ("if a < b then", ["if a <= b then"]),
    ("if a ~= 'x < y' then", ["if a == 'x < y' then"]),
    ("local n = t[3] -- 4", ["local n = t[4] -- 4"]),
    ("return a and not b", ["return a or not b", "return a and  b"]),
    ("  redis.call('DEL', key)", [""]),
    ("  total = total + 2", ["  total = total - 2", "  total = total + 3", ""]),
    ("if gone then return end", [""]),
    ("local empty = {}", []),
    ("  call(function()", []),
])  # fmt: skip
def test_a_line_of_a_script_is_changed_in_one_place(line: str, expected: list[str]) -> None:
    assert [new for _, new in mutants.changes(line + "\n")] == expected


@pytest.mark.slow
def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = mutants.draw(server, SOURCE, 1, 2)
        assert drawn == mutants.draw(server, SOURCE, 1, 2) != mutants.draw(server, SOURCE, 2, 2)
        broken = Mutant("streaming/lua/accept.lua", "#!lua name=put\nif then")
        assert not mutants.compiles(server, SOURCE, broken)


@pytest.fixture
def reach(tmp_path: Path) -> Reach:
    """Of one file: two tests run line 5, one of them line 6, and nobody line 9."""
    file = tmp_path / "streaming" / "jobs" / "relay.py"
    file.parent.mkdir(parents=True)
    file.write_text("""LIMIT = 3


def relay(a=1):
    if a:
        return 2
    b = (
        3
    )
    return b


def unused():
    return 1
""")
    data = CoverageData(str(tmp_path / "data"))
    for test, lines in ((FAR, [5]), (NEAR, [5, 6]), ("", [1, 4, 13])):
        data.set_context(test)
        data.add_lines({str(file): lines})
    data.write()
    return Reach(tmp_path, tmp_path / "data")


FAR, NEAR = "tests/api/test_chat.py::test_streams", "tests/streaming/jobs/test_relay.py::test_relays[a b]"


@pytest.mark.parametrize(("line", "expected"), [
    (1, [NEAR, FAR]),  # a constant
    (4, [NEAR, FAR]),  # the defaults of a function
    (5, [NEAR, FAR]),
    (6, [NEAR]),
    (8, []),  # a statement that no test runs
    (14, []),
])  # fmt: skip
def test_the_tests_of_a_line_are_those_that_run_its_statement_the_nearest_first(
    reach: Reach, line: int, expected: list[str]
) -> None:
    assert reach.tests("streaming/jobs/relay.py", line) == expected
