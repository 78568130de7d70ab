"""The mutants: what may be changed in a script, what is tried, and how it is counted."""

import shutil
from pathlib import Path

import pytest
from redis import Redis

from bench import trials
from bench.mutants import lua
from bench.mutants.report import (
    Mutant,
    try_mutant,
)
from bench.reach.reach import Reach
from bench.trials import FAILED, PASSED, SuiteRun, TreeCopies

SOURCE = Path(__file__).parents[2]


@pytest.mark.slow
def test_mutants_of_scripts_are_drawn_alike_by_a_seed_and_can_be_loaded(redis_url: str) -> None:
    with Redis.from_url(redis_url) as server:
        drawn = lua.draw(server, SOURCE, 1, 5)
        assert drawn == lua.draw(server, SOURCE, 1, 5)
        assert drawn != lua.draw(server, SOURCE, 2, 5)
        broken = Mutant("streaming/lua/put.lua", "none", "if then")
        assert not lua.compiles(server, SOURCE, broken)
        assert all(lua.compiles(server, SOURCE, each) for each in drawn)


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
