"""Log lines: their exact form, what they survive, and what never gets into them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import sys
import time
from datetime import datetime
from typing import Any

import pytest

from telemetry.logs import EventLog, JsonLines, setup
from telemetry.process import start_tracing
from telemetry.redaction import HIDDEN


@pytest.fixture
def lines() -> io.StringIO:
    """What the process logs from now on."""
    stream = io.StringIO()
    setup("api", "info", stream)
    return stream


def logged(lines: io.StringIO) -> dict[str, Any]:
    (line,) = lines.getvalue().splitlines()
    event: dict[str, Any] = json.loads(line)
    return event


def test_an_event_is_one_line_of_this_form() -> None:
    """The golden line: keys in this order, milliseconds, UTC, extras after the standard ones."""
    record = logging.makeLogRecord({
        "name": "api.chat", "levelno": logging.INFO, "levelname": "INFO", "msg": "job %s accepted", "args": ("j1",),
        "created": 1_763_689_596.1239, "process": 42, "model": "m", "waiting": 3,
    })  # fmt: skip
    assert JsonLines("api").format(record) == (
        '{"time":"2025-11-21T01:46:36.123Z","level":"info","service":"api","pid":42,"logger":"api.chat",'
        '"message":"job j1 accepted","model":"m","waiting":3}'
    )


def test_a_span_gives_its_ids_to_the_lines_within(lines: io.StringIO) -> None:
    """Inside the span's block a line carries the trace, outside it does not."""
    span = start_tracing("api", "").span("chat")
    with span:
        logging.getLogger("x").info("inside")
    logging.getLogger("x").info("outside")
    inside, outside = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (inside["trace_id"], inside["span_id"]) == (span.trace_id, span.span_id)
    assert "trace_id" not in outside


def test_an_exception_is_one_string_on_the_same_line(lines: io.StringIO) -> None:
    """The traceback's newlines are escaped, and a secret in it is hidden."""
    try:
        raise ConnectionError("cannot reach redis://:hunter2@db:6379/0")
    except ConnectionError:
        logging.getLogger("x").exception("no Redis")
    exception = logged(lines)["exception"]
    assert exception.startswith("Traceback") and exception.endswith(f"redis://:{HIDDEN}@db:6379/0")


def test_control_characters_cannot_forge_a_line_or_reach_a_terminal(lines: io.StringIO) -> None:
    """Newlines, escapes, C1 controls and Unicode line ends stay inside the string, escaped."""
    hostile = 'a\n{"level":"error"}\r\x1b[2J\x9b31m\x7f\u2028\u2029b'
    logging.getLogger("x").info(hostile)
    assert logged(lines)["message"] == hostile
    assert all(" " <= character < "\x7f" for character in lines.getvalue().rstrip("\n"))


def test_nothing_is_lost_to_a_value_that_cannot_be_encoded(lines: io.StringIO) -> None:
    """Lone surrogates, huge integers and objects with a broken __str__ are shown as well as can be."""

    class Broken:
        def __str__(self) -> str:
            raise ValueError("no")

    logging.getLogger("x").info("odd", extra={"text": "\ud800", "number": 1 << 80, "thing": Broken(), "at": {"a": 1}})
    event = logged(lines)
    assert (event["message"], event["text"], event["number"]) == ("odd", "\\ud800", str(1 << 80))
    assert event["thing"] == "<Broken cannot be shown: ValueError>"


def test_the_default_stream_is_stderr(capsys: pytest.CaptureFixture[str], lines: io.StringIO) -> None:
    """Without a stream, lines go to stderr as it is at that moment, and stdout stays empty. A second setup replaces the
    handler of the first one."""
    setup("api", "info")
    logging.getLogger("x").info("here")
    sys.stderr.flush()
    captured = capsys.readouterr()
    event = json.loads(captured.err)
    assert (event["message"], event["pid"]) == ("here", os.getpid())
    assert captured.out == "" and lines.getvalue() == ""


def test_an_event_line_has_the_form_of_every_other(lines: io.StringIO) -> None:
    """What is written once per request: the same fields in the same order, the level's rule, and one line."""
    events = EventLog("api.access")
    events.write("request", route="/v1/jobs/{job_id}", note="a\nb", status=200)
    event = logged(lines)
    assert list(event) == ["time", "level", "service", "pid", "logger", "message", "route", "note", "status"]
    assert event["pid"] == os.getpid() and abs(datetime.fromisoformat(event["time"]).timestamp() - time.time()) < 60
    assert len(event["time"]) == len("2025-11-21T01:46:36.123Z")
    logging.getLogger().setLevel(logging.WARNING)
    events.write("request")
    assert len(lines.getvalue().splitlines()) == 1


async def test_events_of_one_turn_of_the_loop_are_written_together(lines: io.StringIO) -> None:
    events = EventLog("api.access", at_once=False)
    for number in range(3):
        events.write("request", number=number)
    assert lines.getvalue() == ""
    await asyncio.sleep(0)
    assert [json.loads(line)["number"] for line in lines.getvalue().splitlines()] == [0, 1, 2]
    events.write("request", number=3)
    await asyncio.sleep(0)
    assert len(lines.getvalue().splitlines()) == 4


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(), ValueError("closed file")])
def test_an_event_that_cannot_be_written_ends_no_work(error: Exception) -> None:
    """A full disk, a pipe without a reader, a closed file: as with other records."""

    tried = list[str]()

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise error

    setup("worker", "info", Broken())
    EventLog("workers.claimer").write("jobs claimed", jobs=["job_1"])
    logging.getLogger("workers.claimer").info("another")
    assert ["job_1" in tried[0], "another" in tried[-1]] == [True, True]


def test_events_go_to_other_handlers_where_there_are_no_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    root.handlers[:] = [caplog.handler]
    with caplog.at_level("INFO"):
        EventLog("x").write("claimed", job="j")
    assert [(each.message, vars(each)["job"]) for each in caplog.records] == [("claimed", "j")]
