"""The open loop: requests leave on time with the lengths they should, and each class has a target of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bench.load.streams import StreamedAnswer
from bench.table1.__main__ import main, workload
from bench.table1.client import TargetServer
from bench.table1.open_loop import ReplayedRequest, ReplayLimits, lateness, replay, rows
from planner.simulator.trace import COLUMNS, Trace, TraceRow

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ANSWER = HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT) + b"0\r\n\r\n"


@asynccontextmanager
async def endpoint(answer_s: float) -> AsyncIterator[tuple[TargetServer, list[dict[str, object]]]]:
    """Answers each request with one token after so many seconds, and keeps what it was asked."""
    asked: list[dict[str, object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                asked.append(msgspec.json.decode(await reader.readexactly(size)))
                await asyncio.sleep(answer_s)
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield TargetServer.at(f"http://127.0.0.1:{port}/v1", "m"), asked


async def test_nobody_waits_for_an_answer_before_asking_again() -> None:
    """Five requests 20 ms apart at an endpoint that takes 400 ms: all are asked before the first is answered."""
    load = [TraceRow(0.02 * n, 3, 7, "standard" if n % 2 else "interactive") for n in range(5)]
    async with endpoint(0.4) as (server, seen):
        began = time.monotonic()
        asked = await replay(server, load, ReplayLimits(limit_s=9), lambda: None)
        assert time.monotonic() - began < 5 * 0.4, "not one after the other"
    assert max(each.answer.sent for each in asked) < min(each.answer.arrivals[0][0] for each in asked)
    assert [body["max_tokens"] for body in seen] == [7] * 5
    assert [body["queue"] for body in seen[:2]] == [{"priority": "interactive"}, {"priority": "standard"}]
    assert seen[0]["messages"] == [{"role": "user", "content": "water water water "}]
    assert all(each.late_s is not None and each.late_s >= 0 for each in asked)


async def test_the_replay_ends_when_its_time_is_over() -> None:
    """Nothing leaves after `limit_s`, and what is not answered in time has failed."""
    load = [TraceRow(at, 1, 1) for at in (0.0, 0.05, 50.0)]
    async with endpoint(30.0) as (server, seen):
        asked = await replay(server, load, ReplayLimits(limit_s=1, timeout_s=0.2), lambda: None, lanes=False)
        assert "queue" not in seen[0]
    assert [each.answer.fault for each in asked] == ["not finished in time"] * 2


async def test_where_nobody_listens_every_request_has_failed() -> None:
    asked = await replay(
        TargetServer.at("http://127.0.0.1:1/v1", "m"), [TraceRow(0, 1, 1)], ReplayLimits(), lambda: None
    )
    assert asked[0].answer.fault.startswith("no connection")
    assert rows(asked, {})[0]["within"] == 0


def answered(lane: str, after_s: float) -> ReplayedRequest:
    return ReplayedRequest(TraceRow(0, 1, 1, lane), StreamedAnswer(1, 10.0, [(10.0 + after_s, ANSWER)]), 0.001)


def test_each_class_has_its_own_target() -> None:
    """Three seconds are too late for interactive jobs and soon for standard ones; by the queue where it is known."""
    asked = [answered("interactive", 0.1), answered("interactive", 3.0), answered("standard", 3.0)]
    assert [(row["lane"], row["within"]) for row in rows(asked, {})] == [("interactive", 50.0), ("standard", 100.0)]
    by_queue = rows(asked, {"interactive": [50.0, 900.0]})[0]
    assert (by_queue["within"], by_queue["queue_p99_ms"], by_queue["ttft_p99_ms"]) == (
        100.0,
        900.0,
        pytest.approx(3000),
    )


def test_what_failed_was_not_in_time() -> None:
    failed = ReplayedRequest(TraceRow(0, 1, 1), StreamedAnswer(1, 10.0, fault="x"), 0.0)
    row = rows([answered("interactive", 0.1), failed], {"interactive": [1.0]})[0]
    assert (row["failed"], row["within"], row["faults"]) == (1, 50.0, {"x": 1})


def test_leaving_late_is_told() -> None:
    assert lateness([answered("interactive", 1.0)]).verdict == "reached"
    assert lateness([ReplayedRequest(TraceRow(0, 1, 1), StreamedAnswer(1, 0.0), 0.006)]).verdict == "missed"


def test_a_trace_is_cut_to_the_time_there_is(tmp_path: Path) -> None:
    """At ten times its speed, for three seconds."""
    path = tmp_path / "t.csv"
    lines = [f"{at},ChatGPT,5000,6,0,Conversation log" for at in (0, 20, 31)]
    path.write_text("\n".join([",".join(COLUMNS), *lines, ""]))
    assert [(each.at, each.prompt) for each in workload(Trace(path), 0.0, 10.0, 3.0)] == [(0.0, 4090), (2.0, 4090)]
    assert workload(None, 2.0, 1.0, 60.0) == workload(None, 2.0, 1.0, 60.0) != []


@pytest.mark.parametrize("words", [["--trace", "/nowhere.csv"], ["--rate", "1", "--base-url", "nonsense"]])
def test_what_cannot_be_read_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert "error: " in capsys.readouterr().out


@pytest.mark.slow
def test_against_penstock_the_queue_is_told_by_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, with a simulated engine: both classes are answered, in time."""
    monkeypatch.setattr("bench.table1.__main__.LONGEST", 60)
    assert main(["--seconds", "1", "--rate", "18", "--out", str(tmp_path)]) == 0
    found = msgspec.json.decode((tmp_path / "replay.json").read_bytes())
    assert {row["lane"] for row in found["rows"]} == {"interactive", "standard"}
    assert all(row["failed"] == 0 and row["queue_p50_ms"] is not None for row in found["rows"])
