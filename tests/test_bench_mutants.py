"""The mutants: what may be changed in a script, which tests are chosen against a change, and how it is counted."""

from pathlib import Path

import pytest
from redis import Redis

from bench.mutants import lua
from bench.mutants.mutant import Mutant
from bench.mutants.report import Named, Verdict, as_json, judged, score, survivors
from bench.mutants.trial import Trial
from bench.planted.trial import FAILED, PASSED, TIMED_OUT, Run
from bench.reach.change import likeliest, run_by_calls, said_by, touched, words_of
from bench.reach.reach import Reach, by_file, covering, within
from bench.reach.scripts import callers, changed_scripts

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


def test_a_shared_function_is_in_every_script_that_uses_it() -> None:
    text = (SOURCE / "streaming/lua/prelude.lua").read_text()
    whole = Mutant("streaming/lua/prelude.lua", "none", text.replace("'live'", "'lively'"))
    own = Mutant("streaming/lua/put.lua", "none", (SOURCE / "streaming/lua/put.lua").read_text() + "return 1\n")
    assert {"finish", "claim"} <= changed_scripts(SOURCE, {whole.file: whole.text}).keys()
    assert changed_scripts(SOURCE, {own.file: own.text}).keys() == {"put"}


@pytest.mark.parametrize("name", ["claim", "append", "finish", "collect", "rewound"])
def test_the_lines_that_run_a_script_are_found(name: str) -> None:
    assert callers(SOURCE, [name])


def test_a_context_leads_to_its_test_wherever_the_line_ran() -> None:
    known = by_file(["tests/a.py::one", "tests/a.py::two"])
    told = ["", "start", "start|tests/a.py::one", "tests/a.py::two (call)", "start|tests/a.py::failed"]
    assert covering(told, known) == {"tests/a.py::one", "tests/a.py::two"}


@pytest.mark.parametrize("told", ["tests/a.py::one (setup)", "tests/a.py::failed (setup)", "start|tests/a.py"])
def test_a_process_of_a_whole_file_and_its_import_are_for_all_its_tests(told: str) -> None:
    known = by_file(["tests/a.py::one", "tests/a.py::two", "tests/ab.py::three"])
    assert covering([told], known) == {"tests/a.py::one", "tests/a.py::two"}


def test_a_lines_tests_are_those_that_run_it() -> None:
    lines = {"api/a.py": {3: frozenset({"one"}), 5: frozenset({"two"}), 8: frozenset[str]()}}
    reach = Reach({"one": 1.0, "two": 0.5}, lines)
    assert reach.of("api/a.py", [3]) == {"one"}
    assert reach.of("api/a.py", range(3, 6)) == {"one", "two"}
    assert reach.of("api/a.py", [6]) == {"two"}  # a line further down in the same statement
    assert reach.of("api/a.py", [8]) == {"one", "two"}  # run by an import alone
    assert reach.of("api/a.py", [1]) == reach.of("api/b.py", [3]) == frozenset()


def test_tests_that_speak_of_the_change_come_first_and_then_the_quickest() -> None:
    said = {"a": words_of("drop the cursor"), "b": words_of("a sum"), "c": words_of("another sum")}
    seconds = {"a": 2.0, "b": 0.5, "c": 1.0}
    assert likeliest(said, {"cursor"}, said, seconds) == ["a", "b", "c"]
    assert likeliest(said, {"nothing"}, said, seconds) == ["b", "c", "a"]
    assert within(["b", "c", "a"], seconds, 2.0) == ["b", "c"]
    assert within(["a"], seconds, 1.0) == ["a"] and within([], seconds, 1.0) == []


def test_the_words_of_a_test_are_those_of_its_body_its_parameters_and_its_file() -> None:
    said = said_by(SOURCE)["tests/test_bench_mutants.py::test_a_line_of_a_script_is_changed_in_one_place"]
    assert {"bench", "mutants", "gone", "changes"} <= said and "likeliest" not in said


def test_the_lines_of_functions_are_known_from_those_that_an_import_runs() -> None:
    assert run_by_calls(
        "A = 1\n\n\ndef f(\n    a=A,\n):\n    return a\n\n\nclass B:\n    c = 2\n\n    def d(self):\n        ...\n"
    ) == {7, 14}


def test_a_change_touches_the_lines_it_replaces_or_stands_between() -> None:
    assert touched("a\nb\nc\n", "a\nB\nc\n") == {2}
    assert touched("a\nb\nc\n", "a\nc\n") == {2}
    assert touched("a\nb\nc\n", "a\nb\nx\nc\n") == {2, 3}
    assert touched("a\n", "a\n") == set()


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
    assert b'"percent": 33.3' in as_json(found, {"seed": 1})


def test_a_mutant_is_named_by_what_it_changes() -> None:
    before = "def f():\n    return 1\n"
    mutant = Mutant("api/a.py", "number", "def f():\n    return 2\n")
    assert mutant.name(before) == "api/a.py: return 1 -> return 2"


def test_what_was_judged_can_be_read() -> None:
    assert all(each.why for each in judged().values())
