"""`penstock logs`: the files of one run in the order of time, whole or about one job, and what the lines say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from house import eventually
from terminals import OnTerminal

from cli.__main__ import main
from cli.log_lines import is_poll, message_of, parse_line, pretty
from cli.logs import Filters
from cli.output import Exit

pytestmark = pytest.mark.slow

JOB = "job_00b24cb7937b3d526e8e4afd78f93d22"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
Logs = Callable[..., list[dict[str, Any]]]


def record(at: str, message: str, service: str = "worker", **fields: Any) -> str:
    level = fields.pop("level", "info")
    head = {"time": f"2026-11-24T02:00:{at}Z", "level": level, "service": service, "pid": 7, "logger": "x"}
    return json.dumps(head | {"message": message} | fields) + "\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The data folder of a run that has ended: two processes of Penstock, and Redis."""
    folder = tmp_path / "data" / "logs"
    folder.mkdir(parents=True)
    (folder / "worker-1.log").write_text(
        record("01.000", "one", jobs=[JOB], trace_ids=[TRACE])
        + "Traceback: not JSON\n"
        + record("05.000", "five", level="error", exception="Boom\n  at x")
        + record("06.000", "not yet whole")[:-1]
    )
    (folder / "api-1.log").write_text(
        record("02.000", "two", "api", job=JOB, trace_id=TRACE)
        + record("04.000", "four\u001b[2J", "api", level="warning")
    )
    (folder / "redis-1.log").write_text("12:M 24 Nov 2026 02:00:03.000 # three\n")
    (folder / "worker-1.log.1").write_text(record("00.000", "zero", jobs=[JOB]))
    return tmp_path / "data"


@pytest.fixture
def logs(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Logs:
    """Runs the command into a pipe; its lines."""
    monkeypatch.setenv("TZ", "UTC")

    def run(*words: str) -> list[dict[str, Any]]:
        assert main(["logs", "--data-dir", str(home), *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_all_files_are_merged_in_the_order_of_time(logs: Logs) -> None:
    """A text without a time stands where it was written; a line whose end is not written yet is left for later."""
    found = logs()
    said = ["zero", "one", "Traceback: not JSON", "two", "three", "four\u001b[2J", "five"]
    assert [line["message"] for line in found] == said
    assert [line["process"] for line in found] == ["worker-1"] * 3 + ["api-1", "redis-1", "api-1", "worker-1"]
    assert found[4]["level"] == "warning" and found[1]["jobs"] == [JOB]


@pytest.mark.parametrize(("words", "said"), [
    (["--job", JOB], ["zero", "one", "two"]),
    (["--job", JOB[:12]], ["zero", "one", "two"]),
    (["--trace", TRACE], ["one", "two"]),
    (["--trace", TRACE[:9].upper(), "--role", "api"], ["two"]),
    (["--role", "redis"], ["three"]),
    (["--role", "worker", "-n", "1"], ["five"]),
    (["--process", "api-1"], ["two", "four\u001b[2J"]),
    (["-n", "0"], []),
])  # fmt: skip
def test_what_is_asked_for_is_shown(logs: Logs, words: list[str], said: list[str]) -> None:
    assert [line["message"] for line in logs(*words)] == said


def test_what_is_not_there_is_said(home: Path, tmp_path: Path, told: Any) -> None:
    """With what there is instead, and not on stdout."""
    out, err = told("logs --data-dir", str(home), "--process", "api-9", code=Exit.FAILED)
    assert not out and "there are logs of api-1, redis-1, worker-1" in err
    assert "there are no logs in" in told("logs --data-dir", str(tmp_path), code=Exit.UNREACHABLE).err


def test_a_terminal_is_shown_lines_for_people(home: Path) -> None:
    """Time, process, level and message, in colour and with control codes as text."""
    with OnTerminal(["-m", "cli", "logs", "--data-dir", str(home)], environ={"TZ": "UTC", "TERM": "xterm"}) as screen:
        assert screen.end() == 0
    assert "\x1b[33m11-24 02:00:04.000 api-1        warning: four\\u001b[2J\x1b[0m\r\n" in screen.seen
    assert "error: five  \r\nBoom\r\n  at x" in screen.seen


def test_a_pipe_is_shown_lines_for_people_if_it_is_asked_to(
    home: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a terminal, without colour; a trace is named as briefly as a job. Not together with --json."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lines = told("logs --data-dir", str(home), "--pretty", "-v", "--process", "api-1").out.splitlines()
    assert lines[0].endswith("02:00:02.000 api-1        two job=job_00b24cb7 trace_id=4bf92f35")
    assert "exclude each other" in told("logs --data-dir", str(home), "--pretty", "--json", code=2).err


def test_new_lines_are_followed_until_ctrl_c(home: Path) -> None:
    """Of files that grow, that are begun anew by the next run, and that are new."""
    command = [sys.executable, "-m", "cli", "logs", "-f", "-n", "1", "--data-dir", str(home)]
    folder, seen = home / "logs", home / "seen"
    with seen.open("wb") as output, subprocess.Popen(command, stdout=output) as process:

        def said() -> list[str]:
            return [json.loads(line)["message"] for line in seen.read_text().splitlines()]

        try:
            eventually(lambda: said() == ["five"])
            with (folder / "worker-1.log").open("a") as file:
                file.write("\n")
            eventually(lambda: said() == ["five", "not yet whole"])
            with (folder / "worker-1.log").open("a") as file:
                (folder / "worker-1.log").replace(folder / "worker-1.log.1")
                file.write(record("07.000", "to the old one"))
            (folder / "worker-1.log").write_text(record("08.000", "anew"))
            (folder / "offline-1.log").write_text(record("09.000", "another", "offline"))
            eventually(lambda: sorted(said()[2:]) == ["anew", "another", "to the old one"])
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == Exit.INTERRUPTED


def test_ids_are_shown_only_where_they_are_asked_for() -> None:
    """Of a list, its length is; ids of every kind are left out, and nothing else."""
    ids = {"request_id": "req_af89bad31a43ec2e663c235e", "trace_id": "20698d9320698d9320698d9320698d93", "job": JOB}
    line = parse_line(
        "worker-1", record("01.000", "said", **ids, lease="e7bb434332f4", jobs=[JOB, JOB], tenant="t"), ""
    )
    assert pretty(line, ids=False).endswith("worker-1     said jobs=2 tenant=t")
    assert all(f"{name}=" in pretty(line) for name in (*ids, "lease", "jobs"))


@pytest.mark.parametrize(("route", "status", "poll"), [
    ("/admin/overview", 200, True), ("/console/assets/{build}/{name}", 304, True), ("/admin/overview", 503, False),
    ("/admin/pools", 200, True), ("/v1/jobs/{job_id}", 200, True), ("/v1/jobs/{job_id}", 404, False),
    ("/v1/jobs/{job_id}/events", 200, False), ("/v1/jobs/{job_id}/result", 200, False),
])  # fmt: skip
def test_polls_of_a_console_are_known(route: str, status: int, *, poll: bool) -> None:
    """They are not shown to people unless they ask; one that fails is."""
    fields = {"method": "GET", "route": route, "status": status, "ms": 1.5}
    line = record("01.000", "request", "api", **fields).replace('"x"', '"api.access"')
    parsed = parse_line("api-1", line, "")
    assert is_poll(parsed) == poll
    assert Filters(polls=False).passes(parsed, line) != poll and Filters().passes(parsed, line)


DEPTHS = range(900, 1000)
"""Of nested lists, about as deep as Python reads them."""
HOSTILE_TEXTS = [
    "[" * 5000,
    '{"a":' * 5000,
    "12:M 31 Feb 2026 02:00:03.000 # no such day",
    "12:M 24 Xyz 2026 02:00:03.000 # no such month",
    "12:M 24 Nov 2026 99:99:99.000 # no such hour",
    "12:M 24 Nov 2026 ::::::::.000 # no time",
    "12:M 01 Jan 0001 00:00:00.000 # before all clocks",
    "12:M 31 Dec 9999 23:59:59.000 # after them",
]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_a_line_that_no_process_would_write_is_shown(
    zone: str, home: Path, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the text that it is; the lines around it keep their places."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        lines = [*HOSTILE_TEXTS, *(record("09.000", "deep")[:-2] + f', "x": {"[" * n}{"]" * n}}}' for n in DEPTHS)]
        (home / "logs" / "worker-2.log").write_text("\n".join(lines) + "\n")
        assert len(logs("--process", "worker-2")) == len(lines)
        parsed = [parse_line("worker-2", line, "2026-11-24T02:00:00Z") for line in lines]
        assert all(pretty(line) for line in parsed) and parsed[0].fields["message"] == lines[0]
        odd = record("01.000", "odd").replace("2026-11-24T02:00:01.000Z", "0001-01-01T00:00:00+14:00")
        assert "odd" in pretty(parse_line("worker-2", odd, ""))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_a_line_says_can_be_written() -> None:
    """A lone surrogate, which JSON may hold, would end the supervisor that writes its state."""
    assert message_of(record("01.000", "half \ud800")) == "half \\ud800"
    assert message_of(record("01.000", "")).startswith("{") and message_of(" text\n") == "text"
