"""The load generator: what it reads is what was sent, its clock is right, and no failure is counted as an answer."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import scripted
from bench.load.__main__ import LoadRun, summed
from bench.load.plan import LoadPlan, StreamReading, measure
from bench.load.streams import Framing, Heard, StreamedAnswer, hear
from bench.ports import free_port
from bench.processes import Processes
from bench.stats import Spread, spread

pytestmark = pytest.mark.slow

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WORDS = ("amber0", " brook1", " cedar2", " delta3")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": text}}]}) + b"\n\n"


def whole(*words: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return HEAD + b"".join(chunk(event(word)) for word in words) + chunk(end) + b"0\r\n\r\n"


def heard(raw: bytes, tokens: int = 4) -> Heard:
    return hear(StreamedAnswer(tokens, 0.0, [(1.0, raw)]))


@given(st.lists(st.integers(0, len(whole(*WORDS))), max_size=12))
def test_an_answer_reads_the_same_however_it_was_cut(cuts: list[int]) -> None:
    raw = whole(*WORDS)
    edges = [0, *sorted(cuts), len(raw)]
    parts = [raw[a:b] for a, b in itertools.pairwise(edges) if a < b]
    framing = Framing()
    assert [framing.ends_with(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    found = hear(StreamedAnswer(4, 0.0, [(float(at), part) for at, part in enumerate(parts, 1)]))
    assert found.wrong == "" and found.tokens == 4 and found.ended == len(parts)
    assert list(found.chunks) == sorted(found.chunks)


def test_a_chunk_may_bring_several_tokens_and_a_read_several_chunks() -> None:
    both = chunk(event(" brook1 cedar2"))
    first, rest = whole("amber0", " brook1 cedar2", " delta3", " ember4").split(both)
    found = hear(StreamedAnswer(5, 0.5, [(1.0, first), (2.0, both), (3.0, rest)]))
    assert found.wrong == "" and list(found.chunks) == [(1.0, 1), (2.0, 2), (3.0, 1), (3.0, 1)]
    halves = heard(whole("amb", "er0 bro", "ok1"), 2)
    assert halves.wrong == "" and [tokens for _, tokens in halves.chunks] == [1, 1]


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (whole(*WORDS[:3]), "3 tokens instead of 4"),
        (whole("amber0", " cedar2", " delta3", " ember4"), "'cedar2' where token 1 belongs"),
        (whole("amber0", " brook1", " brook1", " cedar2"), "'brook1' where token 2 belongs"),
        (whole(*WORDS, end=b": no end\n\n"), "no [DONE]"),
        (whole("amber0", end=b'data: {"error": {"message": "gone"}}\n\n'), 'error in the stream: {"message":"gone"}'),
        (whole("amber0", end=b"data: {broken\n\n"), "unreadable"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
    ],
)
def test_every_fault_is_named(raw: bytes, what: str) -> None:
    assert heard(raw).wrong.startswith(what)


def test_figures_are_of_good_answers_and_failures_are_counted() -> None:
    good = [
        Heard(10.0, [(10.020, 1), (10.050, 2)], 10.046),
        Heard(20.0, [(20.030, 1), (20.040, 1), (20.050, 1)], 20.050),
    ]
    bad = [Heard(30.0, [(90.0, 1)], 90.0, "cut off"), Heard(31.0, [], 31.0, "cut off")]
    reading = summed([*good, *bad], 2.0, {"api": 0.0007}, 0.1, False)
    assert (reading.requests, reading.errors, reading.wrong, reading.tokens) == (2, 2, {"cut off": 2}, 7)
    assert reading.ttft.p50 == pytest.approx(20) and reading.ttft.most == pytest.approx(30)
    assert reading.itl.count == 4 and reading.itl.most == pytest.approx(15) and reading.itl.p50 == pytest.approx(10)
    assert reading.e2e.mean == pytest.approx(48)
    assert reading.cpu_us_per_token == pytest.approx(100)
    assert reading.tokens_per_s == 3.5


def test_a_wrong_clock_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    late = StreamReading(
        requests=1,
        wrong={},
        tokens=2,
        seconds=1.0,
        ttft=Spread(p50=23.0),
        itl=Spread(p50=10.0),
        e2e=Spread(),
        own_cpu=0,
    )
    monkeypatch.setattr(scripted, "measure", lambda _: late)
    assert scripted.clock_error(cast(Processes, SimpleNamespace(serve=lambda *_: 1))) == 3.0


def test_a_closed_loop_against_the_floor(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        port = free_port()
        processes.start(
            "floor", [sys.executable, "-m", "bench.gateway.floor", str(port), '{"step_ms": 2, "prefill_ms": 3}']
        )
        processes.wait_port(port)
        plan = LoadPlan(port=port, model="bench", streams=3, requests=7, tokens=9, limit_s=30, watch=processes.pids())
        reading = measure(plan)
    assert (reading.requests, reading.wrong, reading.tokens, reading.cut_short) == (7, {}, 63, False)
    assert reading.itl.count == 7 * 8 and reading.ttft.p50 >= 3.0 and reading.e2e.most >= 8 * 2
    assert 0 < reading.cpu["floor"] < 5 and reading.own_cpu > 0


Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[int]:
    """A server whose connections have all ended behind the `with`."""
    port, ended = free_port(), []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.Event()
        ended.append(done.wait())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(handle, "127.0.0.1", port):
        yield port
        await asyncio.gather(*ended)


async def test_an_answer_that_is_cut_off_is_an_error_and_the_next_one_connects_again() -> None:
    served = 0

    async def every_second_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        while True:
            await reader.readuntil(b'"stream":true}')
            served += 1
            if served % 2 == 0:
                break
            writer.write(whole(*WORDS))
        writer.write(whole(*WORDS)[:100])

    async with serving(every_second_one) as port:
        plan = LoadPlan(port=port, model="m", streams=1, requests=4, tokens=4, warmup_tokens=4, limit_s=20)
        reading = await LoadRun(plan).run()
    assert (reading.requests, reading.wrong) == (2, {"cut off (closed)": 2})


async def test_silence_is_an_error_when_time_is_up() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(nothing) as port:
        plan = LoadPlan(port=port, model="m", streams=2, requests=4, tokens=4, limit_s=0.2)
        reading = await LoadRun(plan).run()
    assert reading.requests == 0 and set(reading.wrong) == {"not answered in time"} and reading.cut_short


def test_quantiles_are_values_that_occurred() -> None:
    assert spread([]) == Spread()
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.count, found.mean, found.p50, found.p99, found.most) == (5, 3.0, 3.0, 5.0, 5.0)
    assert spread([float(n) for n in range(1, 201)]).p99 == 198.0


def test_an_answer_with_a_length_ends_with_its_last_byte() -> None:
    framing = Framing()
    parts = (b"HTTP/1.1 429 No\r\ncontent-le", b"ngth: 6\r\n\r\nabc", b"def")
    assert [framing.ends_with(part) for part in parts] == [False, False, True]


async def test_nobody_there_is_an_error() -> None:
    reading = await LoadRun(LoadPlan(port=free_port(), model="m", streams=1, requests=2, tokens=4, limit_s=5)).run()
    assert reading.errors == 2 and all(what.startswith("no connection") for what in reading.wrong)
