"""The load generator and the closed loop against any server of OpenAI's API: what they read is what was sent, and no
failure is counted as an answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.__main__ import LoadRun, summed
from bench.load.plan import LoadPlan, StreamReading
from bench.load.streams import Framing, Heard, StreamedAnswer, hear
from bench.load.target import TIMEOUT, TargetServer, closed_loop, seen
from bench.ports import free_port

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


@pytest.mark.parametrize(("raw", "what"), [
    (whole(*WORDS[:3]), "3 tokens instead of 4"),
    (whole("amber0", " cedar2", " delta3", " ember4"), "'cedar2' where token 1 belongs"),
    (whole("amber0", " brook1", " brook1", " cedar2"), "'brook1' where token 2 belongs"),
    (whole(*WORDS, end=b": no end\n\n"), "no [DONE]"),
    (whole("amber0", end=b'data: {"error": {"message": "gone"}}\n\n'), 'error in the stream: {"message":"gone"}'),
    (whole("amber0", end=b"data: {broken\n\n"), "unreadable"),
    (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
])  # fmt: skip
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


async def measured(port: int, **plan: Any) -> StreamReading:
    """Of four tokens a request."""
    return await LoadRun(LoadPlan(port=port, model="m", tokens=4, **plan)).run()


@asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A server whose connections have all ended behind the `with`."""
    ended: list[asyncio.Event] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.Event()
        ended.append(done)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(handle, "127.0.0.1", port := free_port()):
        yield port
        await asyncio.gather(*(each.wait() for each in ended))


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
        reading = await measured(port, streams=1, requests=4, warmup_tokens=4, limit_s=20)
    assert (reading.requests, reading.wrong) == (2, {"cut off (closed)": 2})


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def test_the_servers_own_count_of_tokens_is_believed() -> None:
    """Pieces cut anywhere; one piece of two tokens; a usage chunk behind."""
    usage = chunk(b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n')
    told = HEAD + chunk(event("")) + chunk(event("a b")) + chunk(event(" c"))
    stream = told + usage + END
    for cut in range(1, len(stream)):
        answer = StreamedAnswer(0, 1.0, [(2.0, stream[:cut]), (3.0, stream[cut:])])
        found = seen(answer)
        assert (found.tokens, len(found.times), found.fault) == (3, 2, "")
    assert seen(StreamedAnswer(0, 1.0, [(2.0, told + END)])).tokens == 2


@pytest.mark.parametrize(("data", "fault"), [
    (b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\n{"a"', 'status 429: {"a"'),
    (whole("a", end=b'data: {"error":{"code":"lost"}}\n\n'), 'error in the stream: {"code":"lost"}'),
    (HEAD + END, "no token"),
])  # fmt: skip
def test_what_went_wrong_is_told(data: bytes, fault: str) -> None:
    assert seen(StreamedAnswer(0, 1.0, [(2.0, data)])).fault == fault


async def test_requests_that_do_not_end_in_time_are_given_up_and_the_rest_is_not_asked() -> None:
    """The server answers its first connection, three times."""
    connections = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times = 3 if next(connections) == 0 else 0
        for number in itertools.count():
            await reader.readuntil(b'"include_usage":true}}')
            if number < times:
                writer.write(whole("a"))

    async with serving(answer) as port:
        server = TargetServer.at(f"http://127.0.0.1:{port}/v1", "m")
        requests = [server.chat([{"role": "user", "content": f"{number}"}], 1) for number in range(40)]
        found = await closed_loop(server, 4, requests, 0.1, lambda: None)
    assert sum(not each.fault for each in found.answers) == 3
    assert 39 <= len(found.answers) <= 40 and {each.fault for each in found.answers} == {"", TIMEOUT}
