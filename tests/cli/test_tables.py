"""Tables on a terminal: they fit it, break no id and no header, and colour the states."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from cli import admin, batch, jobs, processes, scale
from cli.output import ago, cells, cut, print_rows, print_table, shortener, size, table_lines

NOW = 1_795_486_000.0
ESC = "\x1b"
IDS = [f"job_00{digit * 30}" for digit in "0123456789abcdef"]
JOB = {
    "id": IDS[0], "status": "in_progress", "priority": "standard", "model": "smollm2-135m-instruct",
    "created_at": "2026-11-24T02:06:37Z", "took": "12.3 s", "tokens": 128,
}  # fmt: skip
MESSAGE = {
    "id": f"msg_00{'a' * 30}", "endpoint": "billing-service", "type": "job.completed", "status": "pending",
    "attempts": 3, "at": "2026-11-24T02:06:37Z", "next_attempt_at": "2026-11-24T12:06:37Z",
    "last_error": "cannot connect to 10.1.2.3 port 443: Connection refused by the other side of the network",
    "subject": IDS[0], "url": "https://billing.example/hooks/of/penstock",
}  # fmt: skip
POOL = {
    "model": "smollm2-135m-instruct", "want": 12, "ready": 10, "starting": 2, "draining": 0, "range": "0-64",
    "waiting": 1000, "wait": "123.4 s", "override": "set to 12 by ops at 2026-11-24T02:06:37Z",
    "reason": "interactive would wait 3.1 s, its goal is 2.0 s: 12 workers",
}  # fmt: skip
PROCESS = {
    "role": "scheduler", "id": "scheduler-1", "host": "gpu-machine-17.example", "pid": 123456, "state": "ready",
    "since": "2026-11-24T02:06:37Z", "model": "smollm2-135m-instruct", "used": "12/256", "restarts": 3, "reserved": 4,
}  # fmt: skip
TENANT = {
    "tenant": "research", "jobs": "999/10000", "waiting": 100, "running": 32, "job_bytes": "123456789/268435456",
    "result_bytes": "123456789/268435456", "files": 12, "file_bytes": "123456789/1073741824",
}  # fmt: skip
LETTER = {"id": "0-1795486176000-0", "reason": "attempts_exhausted", "at": NOW, "job_id": IDS[0], "lane": "standard"}
BATCH = {
    "id": f"batch_00{'a' * 30}", "status": "in_progress", "lines": "12345/50000", "failed": 123, "per_second": "123.4",
    "window": "24h", "created_at": "2026-11-24T02:06:37Z",
}  # fmt: skip


def lines(row: dict[str, Any], columns: tuple[str, ...], width: int = 80) -> list[str]:
    header = [name.upper().replace("_", " ") for name in columns]
    return table_lines(header, [[str(row.get(name, "-")) for name in columns]], width=width, colour=False, now=NOW)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (JOB, jobs.COLUMNS),
        (BATCH, batch.COLUMNS),
        (MESSAGE, admin.MESSAGE_COLUMNS),
        (LETTER, admin.LETTER_COLUMNS),
        (TENANT, admin.TENANT_COLUMNS),
        (POOL, scale.COLUMNS),
        (PROCESS, processes.COLUMNS),
        (PROCESS, processes.FLEET_COLUMNS),
    ],
)
def test_every_table_fits_80_columns(row: dict[str, Any], columns: tuple[str, ...]) -> None:
    """With a long name of a model: no line is longer, the header is one line, and ids and states are whole."""
    header, first, *_ = shown = lines(row, columns)
    assert max(map(cells, shown)) <= 80, shown
    titles = re.split(r" {2,}", header)
    assert len(re.split(r" {2,}", first)) == len(titles)
    for name in ("id", "status", "state", "pid"):
        if name in columns:
            whole = str(row[name])
            assert re.search(rf"(^| ){whole[:12] if len(whole) > 30 else whole}", first), first


def test_texts_stand_below_a_row_that_has_no_room() -> None:
    """Wide terminals have them as columns; narrow ones below, whole."""
    assert len(lines(POOL, scale.COLUMNS, 200)) == 2
    header, _, *below = lines(POOL, scale.COLUMNS)
    assert "REASON" not in header
    assert below == [
        "  override: set to 12 by ops at 2026-11-24T02:06:37Z",
        "  reason: interactive would wait 3.1 s, its goal is 2.0 s: 12 workers",
    ]


@pytest.mark.parametrize("width", [80, 110, 140])
def test_a_prompt_has_the_room_of_an_endpoint(width: int) -> None:
    columns = (*jobs.COLUMNS[:4], "endpoint", *jobs.COLUMNS[4:])
    job = JOB | {"endpoint": "/v1/chat/completions", "prompt": "Name a river of Europe."}
    header, first, *below = lines(job, columns, width)
    assert ("ENDPOINT" in header) == (width == 140)
    assert "  prompt: Name a river of Europe." in below if width == 80 else "Name a river" in first


def test_a_value_wraps_at_words_beside_its_field() -> None:
    """Also a value of several lines, and one of wide characters."""
    shown = table_lines(
        ("FIELD", "VALUE"), [("id", IDS[1]), ("answer", "word " * 30 + "\nnext")], width=50, colour=False, now=0
    )
    assert IDS[1] in shown[1]  # one object: its id is whole
    assert shown[2].startswith("answer  word word") and shown[-1] == "        next"
    assert max(map(cells, shown)) <= 50 and len(shown) == 7
    wide = table_lines(("FIELD", "VALUE"), [("answer", "日本語" * 20)], width=50, colour=False, now=0)
    assert max(map(cells, wide)) <= 50 and "".join(wide).count("語") == 20


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


def test_cells_and_cut() -> None:
    """Wide characters take two columns, combining ones none."""
    assert (cells("abc"), cells("日本"), cells("e\u0301")) == (3, 4, 1)
    assert (cut("abcdef", 6), cut("abcdef", 5), cut("日本語", 5)) == ("abcdef", "abcd…", "日本…")
    assert (cut("abcdef", 1), cut("日本語", 2), cut("abc", 0), cut("abc", -1)) == ("…", "…", "", "")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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
