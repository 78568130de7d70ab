"""The mutants: what may be changed in a script, and what is counted."""

import shutil
from pathlib import Path

import pytest
from redis import Redis

from bench.mutants import lua
from bench.mutants.__main__ import folders_of, rows, try_mutant
from bench.mutants.lua import Mutant
from bench.trials import TreeCopies

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
    assert [new for _, new in lua.changes(line + "\n")] == expected


@pytest.mark.slow
def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = lua.draw(server, SOURCE, 1, 2)
        assert drawn == lua.draw(server, SOURCE, 1, 2) != lua.draw(server, SOURCE, 2, 2)
        broken = Mutant("streaming/lua/accept.lua", "#!lua name=put\nif then")
        assert not lua.compiles(server, SOURCE, broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "noticed"),
    [
        ("RIGHT = True\nEVEN = 0\n", "tests/workers/test_b.py::test_even"),
        ("RIGHT = EVEN = 2\n", ""),
        ("RIGHT = EVEN\n", "no test that could be run (pytest: 2)"),
    ],
)
def test_a_mutant_is_noticed_by_a_test_that_passes_without_it(
    text: str, noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one of another room. One that fails without the mutant too has noticed nothing."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tests, others = (tmp_path / "tree" / "tests" / room for room in ("api", "workers"))
    tests.mkdir(parents=True)
    others.mkdir()
    (tmp_path / "tree" / "api").mkdir()
    (tmp_path / "tree" / "api" / "__init__.py").touch()
    (tmp_path / "tree" / "api" / "a.py").write_text("RIGHT = True\nEVEN = 1\n")
    (tests / "test_a.py").write_text(
        "from api import a\n\ndef test_wrong():\n    assert 0\n\ndef test_right():\n    assert a.RIGHT\n"
    )
    (others / "test_b.py").write_text("from api import a\n\ndef test_even():\n    assert a.EVEN\n")
    copies = TreeCopies(tmp_path / "tree", tmp_path, shutil.copytree)
    trial = try_mutant(copies, Mutant("api/a.py", text))
    assert trial.noticed == noticed
    assert [(row["room"], row["percent"]) for row in rows([trial])] == [
        (room, 100 * bool(noticed)) for room in ("api", "all")
    ]


def test_the_tests_of_a_file_are_those_of_its_folder_then_of_its_room_and_then_of_all_others() -> None:
    others = ("tests/api", "tests/workers", "tests/scheduler", "tests/offline")
    assert folders_of(SOURCE, "streaming/jobs/relay.py") == [("tests/streaming/jobs",), ("tests/streaming",), others]
    assert folders_of(SOURCE, "streaming/lua/claim.lua") == [("tests/streaming",), others]
