"""The program about slow and abusive connections: its figures, its clients, and its shows in short form."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.settings import ApiSettings
from bench.connections import __main__ as program
from bench.connections import abuse, slow
from bench.connections.__main__ import (
    ALONE,
    AT_BARE,
    AT_PENSTOCK,
    FULL,
    QUICK,
    ConnectionReading,
    abuse_goals,
    main,
    slow_goals,
    slow_rows,
    sockets_of,
    turns,
)
from bench.connections.abuse import ABUSES, Abuse, AbuseCost, one_field, try_abuse
from bench.connections.slow import BEGINNINGS, SlowClients
from bench.load.plan import StreamReading
from bench.report import goals, load
from bench.stats import Spread

pytestmark = pytest.mark.slow


def turn(ttft: float, e2e: float, wrong: int = 0, own_ms: float = 0.0) -> ConnectionReading:
    reading = StreamReading(
        requests=10,
        wrong={"cut off": wrong} if wrong else {},
        tokens=1,
        seconds=1,
        ttft=Spread(p99=ttft),
        itl=Spread(),
        e2e=Spread(p99=e2e, most=e2e),
        own_cpu=0,
    )
    return ConnectionReading(reading, 1, own_ms, 0.0, own_ms)


def test_rounds_are_compared_one_by_one() -> None:
    """Each turn beside slow connections with its round's turn without them; what fails is counted."""
    turns = {
        ALONE: [turn(10, 100), turn(20, 200)] * 3,
        AT_PENSTOCK: [turn(11, 120), turn(22, 240, wrong=1)] * 3,
        AT_BARE: [turn(10, 100), turn(20, 200)] * 3,
    }
    ttft, request, longest, held_up, control, *_, failed = slow_goals(turns)
    assert (ttft.value, ttft.verdict) == (pytest.approx(1.1), "reached")
    assert (request.value, request.verdict) == (pytest.approx(1.2), "missed")
    assert (longest.value, longest.verdict, held_up.verdict) == (pytest.approx(1.2), "", "reached")
    assert (control.value, control.verdict) == (1.0, "")
    assert (failed.value, failed.verdict) == (3, "missed")
    assert [row["errors"] for row in slow_rows(turns)] == [0] * 6 + [0, 1] * 3 + [0] * 6
    few = slow_goals({arm: found[:5] for arm, found in turns.items()})
    assert {goal.verdict for goal in few[:-1]} == {""} and few[-1].verdict == "missed"


@pytest.mark.parametrize("held_up_ms", [3000.0, float("inf")])
def test_a_freeze_is_missed_whatever_the_99th_percentile_says(held_up_ms: float) -> None:
    """A sweep that stands still for three seconds hits fewer than one request of a hundred; none may stand still for
    good either."""
    turns = {arm: [turn(10, 100)] * 9 for arm in (ALONE, AT_BARE)}
    found = slow_goals({**turns, AT_PENSTOCK: [turn(10, 100, own_ms=held_up_ms)] * 9})
    assert [goal.what for goal in found if goal.verdict == "missed"] == [
        "API process held up, slow connections at Penstock, ms"
    ]


def test_the_goals_are_those_that_were_set() -> None:
    """And a reading is long enough for a crowd to expire three times, beside enough streams to be seen by."""
    assert [goals()[f"connections.{name}"].at_most for name in ("slowed", "held_up", "memory")] == [1.1, 50, 5]
    assert FULL.slow == 1000 and FULL.streams >= 64
    assert FULL.header_timeout_s == ApiSettings().header_timeout_s and FULL.seconds > 3 * FULL.header_timeout_s
    assert FULL.seconds > ApiSettings().body_timeout_s and QUICK.seconds > 2 * QUICK.header_timeout_s


def test_an_abuse_that_is_taken_or_costs_much_misses_its_goal() -> None:
    good = AbuseCost("a", 431, 4.9, 0.1)
    assert [goal.verdict for goal in abuse_goals([good])] == ["reached", "reached"]
    cases = (
        (AbuseCost("b", 200, 0, 0), ["missed", "reached"]),
        (AbuseCost("c", 0, 0, 0), ["missed", "reached"]),
        (AbuseCost("d", 413, 5.1, 0), ["reached", "missed"]),
    )
    for bad, held in cases:
        assert [goal.verdict for goal in abuse_goals([good, bad])] == held


def test_every_arm_has_a_turn_in_every_round() -> None:
    assert turns(0) == tuple(reversed(turns(1))) and set(turns(0)) == {ALONE, AT_PENSTOCK, AT_BARE}


async def test_slow_clients_come_back_when_they_are_closed() -> None:
    """All kinds connect; one whose connection ends connects again."""
    begun: list[bytes] = []

    async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(0.1):
                begun.append(await reader.read(65536))
        except TimeoutError:
            begun.append(b"")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(close_at_once, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        clients = SlowClients(server.sockets[0].getsockname()[1], 6)
        holding = asyncio.create_task(clients.hold())
        await clients.wait_connected()
        while len(begun) < 18 or set(begun) != set(BEGINNINGS):
            await asyncio.sleep(0.01)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_slow_clients_send_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind nothing at all, one a head that does not end, one a body that does not; both go on, byte by byte."""
    silent, head, body = BEGINNINGS
    assert silent == b"" and head.startswith(b"POST ") and b"\r\n\r\n" not in head
    fields, _, sent = body.partition(b"\r\n\r\n")
    assert b"Content-Length: 100000" in fields and sent == b"{"
    monkeypatch.setattr(slow, "BYTE_INTERVAL_S", 0.01)
    begun: dict[bytes, asyncio.Event] = {head + b"xxx": asyncio.Event(), body + b"xxx": asyncio.Event()}

    async def read_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = b""
        while part := await reader.read(65536):
            read += part
            for expected, seen in begun.items():
                if read.startswith(expected):
                    seen.set()
        writer.close()

    server = await asyncio.start_server(read_on, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        clients = SlowClients(server.sockets[0].getsockname()[1], 3)
        holding = asyncio.create_task(clients.hold())
        for seen in begun.values():
            await seen.wait()
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


ALLOCATES = """
import mmap, socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    line, _ = listener.accept()
    while b"\\r\\n\\r\\n" not in line.recv(65536):
        pass
    with mmap.mmap(-1, 50 * 2**20) as taken:
        for at in range(0, len(taken), 4096):
            taken[at] = 1
    line.sendall(b"HTTP/1.1 431 no\\r\\nContent-Length: 28\\r\\n\\r\\n" + b'{"error": {"code": "large"}}')
    line.close()
    input()
"""


@pytest.fixture
def allocating() -> Iterator[tuple[int, int]]:
    """Port and pid of a process that takes 50 MiB for its answer, and gives them back before it is sent."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ALLOCATES], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.kill()


def test_memory_that_was_given_back_is_counted(allocating: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is what a request costs."""
    monkeypatch.setattr(abuse, "SETTLE_S", 0.0)
    cost = try_abuse(Abuse("a", lambda: one_field(1)), *allocating)
    assert (cost.status, cost.code) == (431, "large") and 45 < cost.memory_mib < 60


def test_the_sockets_of_a_process_are_counted() -> None:
    """One more with each that is opened."""
    before = sockets_of(os.getpid())
    pair = asyncio.new_event_loop()  # brings two
    assert sockets_of(os.getpid()) == before + 2
    pair.close()


def test_the_whole_program_in_short_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes; the API process holds the slow connections in its arm and in no other, abusive requests are
    refused, each by the limit it is there for, and nothing fails beside slow connections."""
    watched: list[str] = []

    def try_and_note(abuse: Abuse, port: int, pid: int) -> AbuseCost:
        watched.append(Path(f"/proc/{pid}/cmdline").read_text())
        return try_abuse(abuse, port, pid)

    monkeypatch.setattr(program, "try_abuse", try_and_note)
    monkeypatch.setattr(
        program, "ABUSES", [each for each in ABUSES if "body" not in each.name and "91" not in each.name]
    )
    main(["--quick", "--out", str(tmp_path)])
    assert "TTFT p99" in capsys.readouterr().out
    found = load(tmp_path / "connections-quick.json")
    goals = {goal.what: goal for goal in found.ratios}
    assert goals["abusive requests that were not answered with a 4xx"].value == 0
    assert goals["requests beside slow connections that failed"].value == 0
    assert found.settings["slow"] == QUICK.slow
    held = {row["what"].split(",")[0].removeprefix("slow connections "): row["held"] for row in found.rows[:3]}
    assert held[AT_PENSTOCK] >= QUICK.slow > max(held[ALONE], held[AT_BARE])
    assert [row["own_ms"] is not None for row in found.rows[:3]] == [True] * 3
    codes = {row["what"].split(" ")[0]: row["code"] for row in found.rows[3:]}
    assert codes["2"] in ("headers_too_large", "body_too_complex") and codes["25,000-deep"] == "body_too_complex"
    assert codes["5,000-deep"] == codes["100-deep"] == "invalid_request_error"
    assert all("\0api\0" in each for each in watched) and len(watched) == len(found.rows[3:]) == 5


def test_shows_have_names() -> None:
    assert main(["--shows", "nothing"]) == 2
