"""Which tests are chosen against a change: those that run its lines, the likeliest to fail first."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.reach import reach as reach_module
from bench.reach.reach import (
    CHECKSUM,
    Reach,
    by_file,
    callers,
    changed_scripts,
    covering,
    likeliest,
    run_by_calls,
    said_by,
    touched,
    within,
    words_of,
)

SOURCE = Path(__file__).parents[2]


def test_a_shared_function_is_in_every_script_that_uses_it() -> None:
    def changed(file: str, old: str, new: str) -> set[str]:
        text = (SOURCE / file).read_text()
        assert text.count(old) == 1
        return set(changed_scripts(SOURCE, {file: text.replace(old, new)}))

    assert {"finish", "claim"} <= changed("streaming/lua/shared/endings.lua", "~= 'live'", "~= 'lively'")
    assert changed("streaming/lua/accept.lua", "#!lua name=join flags=allow-oom ", "#!lua name=join ") == {"join"}


@pytest.mark.parametrize("name", ["claim", "rewound"])
def test_the_lines_that_run_a_script_are_found(name: str) -> None:
    assert callers(SOURCE, [name])


@pytest.mark.slow
def test_a_test_that_fails_at_every_change_is_not_tried() -> None:
    """It would notice the wrong change as it notices the right one."""
    file, _, name = CHECKSUM.partition("::")
    assert f"def {name}(" in (SOURCE / file).read_text()
    script = "streaming/lua/fleet.lua"  # whose last script gets one more line
    text = (SOURCE / script).read_text()
    reach = Reach({}, {}, newer=frozenset({CHECKSUM, "tests/a.py::test_it"}))
    assert reach_module.tests_of(SOURCE, reach, {script: text + "redis.call('DEL', KEYS[1])\n"}) == [
        "tests/a.py::test_it"
    ]


def test_a_context_leads_to_its_test_wherever_the_line_ran() -> None:
    known = by_file(["tests/a.py::one", "tests/a.py::two"])
    told = ["", "start", "start|tests/a.py::one", "tests/a.py::two (call)", "start|tests/a.py::failed"]
    assert covering(told, known) == {"tests/a.py::one", "tests/a.py::two"}


@pytest.mark.parametrize("told", ["{}", "start|{}", "{}|start", "tests/b.py::x[c|d]|{} (call)"])
def test_a_tests_parameters_may_hold_the_bar_that_parts_a_context(told: str) -> None:
    test = "tests/a.py::one[due|lost]"
    assert covering([told.format(test)], by_file([test, "tests/a.py::two"])) == {test}


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


@pytest.mark.slow
def test_the_words_of_a_test_are_those_of_its_body_its_parameters_and_its_file() -> None:
    said = said_by(SOURCE)["tests/bench/test_reach.py::test_the_lines_that_run_a_script_are_found"]
    assert {"bench", "reach", "claim", "callers"} <= said and "likeliest" not in said


def test_the_lines_of_functions_are_known_from_those_that_an_import_runs() -> None:
    assert run_by_calls(
        "A = 1\n\n\ndef f(\n    a=A,\n):\n    return a\n\n\nclass B:\n    c = 2\n\n    def d(self):\n        ...\n"
    ) == {7, 14}


def test_a_change_touches_the_lines_it_replaces_or_stands_between() -> None:
    assert touched("a\nb\nc\n", "a\nB\nc\n") == {2}
    assert touched("a\nb\nc\n", "a\nc\n") == {2}
    assert touched("a\nb\nc\n", "a\nb\nx\nc\n") == {2, 3}
    assert touched("a\n", "a\n") == set()
    assert touched("a\nb\n", "x\na\nb\n") == {1} and touched("a\nb\n", "a\nb\nx\n") == {2}


def test_notes_that_were_not_finished_are_of_no_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run has deleted the notes before it: their mark is gone with them."""
    tree, notes = tmp_path / "tree", tmp_path / "notes"
    (tree / "api").mkdir(parents=True)
    notes.mkdir()
    (notes / reach_module.MARK).write_text("of another tree\n/none\n")

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(reach_module, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reach_module.kept(tree, notes, 1, print)
    assert not (notes / reach_module.MARK).exists()
