"""Tables: short ids, times and coloured states on a terminal, and all of them whole in a pipe."""

from __future__ import annotations

import re
import sys

import pytest
from terminals import Terminal

from cli import jobs
from cli.output import ago, print_rows, print_table, shortener, size, table_lines

ESC = "\x1b"
IDS = [f"job_00{digit * 30}" for digit in "0123456789abcdef"]
JOB = {
    "id": IDS[0], "status": "in_progress", "priority": "standard", "model": "smollm2-135m-instruct",
    "created_at": "2026-11-24T02:06:37Z", "took": "12.3 s", "tokens": 128,
}  # fmt: skip


def test_ids_are_as_short_as_tells_them_apart() -> None:
    """Eight digits, or more where two share them; words that are no ids stay."""
    assert shortener(IDS)(IDS[3]) == "job_00333333"
    twins = ["job_" + "0" * 10 + "a" * 22, "job_" + "0" * 10 + "b" * 22]
    assert [shortener(twins)(each) for each in twins] == ["job_0000000000a", "job_0000000000b"]
    assert shortener(twins)("worker-1") == "worker-1"
    assert shortener([])(f"see {IDS[0]}") == f"see {IDS[0]}"


def test_times_and_sizes() -> None:
    """One unit; the future says so; a clock that is a little ahead is now."""
    assert [ago(seconds) for seconds in (-0.4, 0, 59, 61, 7200, 90_000)] == [
        "0s ago", "0s ago", "59s ago", "1m ago", "2h ago", "1d ago",
    ]  # fmt: skip
    assert ago(-300) == "in 5m"
    assert [size(count) for count in (0, 999, 1500, 9_960, 999_499, 999_600, 268_435_456)] == [
        "0", "999", "1.5k", "10k", "999k", "1.0M", "268M",
    ]  # fmt: skip


def test_figures_without_room_share_lines_below_their_row() -> None:
    """As many as a line has room for; before texts, of which each begins its own."""
    header = ("ID", "MODEL", "TOOK", "TOKENS", "REASON")
    rows = [("a" * 30, "model-" * 4, "2.1s", "128", "x " * 14 + "x"), ("b", "m", "-", "-", "-")]
    assert table_lines(header, rows, width=40, colour=False, now=0.0) == [
        f"{'ID':<30}  MODEL",
        f"{'a' * 30}  mode…",
        "  took: 2.1s  tokens: 128",
        "  reason: " + "x " * 14 + "x",
        f"{'b':<30}  m",
    ]


@pytest.mark.parametrize(
    ("environ", "coloured"), [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_states_are_coloured_on_a_terminal_that_wants_it(
    environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lists and in one object; the id is short and the time relative with colour or without."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
    print_table(("FIELD", "VALUE"), [("status", "completed"), ("error", "completed")])
    shown = screen.getvalue()
    assert f"{IDS[0][:12]}  " in shown and IDS[0] not in shown and " ago" in shown and "CREATED AT" not in shown
    assert (ESC in shown) is coloured
    if coloured:
        assert f"{ESC}[31mfailed{ESC}[0m" in shown
        assert shown.count(f"{ESC}[32mcompleted") == 1


@pytest.mark.parametrize("forced", [False, True])
def test_a_pipe_gets_whole_ids_and_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """For programs that read the table; colour that is forced adds styles, and changes no word or column."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
    plain = capsys.readouterr().out
    assert IDS[0] in plain and "2026-11-24T02:06:37Z" in plain and "CREATED AT" in plain and ESC not in plain
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        print_rows([JOB | {"status": "failed"}], jobs.COLUMNS)
        shown = capsys.readouterr().out
        assert f"{ESC}[31mfailed{ESC}[0m" in shown and re.sub(f"{ESC}\\[[0-9]+m", "", shown) == plain
