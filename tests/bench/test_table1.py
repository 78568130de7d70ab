"""Table 1: which answers count, when a level is a timeout, and what is read out of a stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from bench.load.streams import StreamedAnswer
from bench.table1.__main__ import TIMEOUT, row
from bench.table1.client import (
    MAX_WORDS,
    ConcurrencyLevel,
    NotAServer,
    Protocol,
    TargetServer,
    TimedAnswer,
    level,
    made_up,
    seen,
)
from bench.table1.client import TIMEOUT as TOO_LATE

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def block(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def text(word: str) -> bytes:
    return block('{"choices":[{"delta":{"content":"' + word + '"}}]}')


END = block("[DONE]") + b"0\r\n\r\n"


def a_level(finished: int, lost: int) -> ConcurrencyLevel:
    answers = [TimedAnswer(0.0, [0.1, 0.2, 0.4], 4)] * finished + [
        TimedAnswer(0.0, [], 0, "not finished in time")
    ] * lost
    return ConcurrencyLevel(8, finished + lost, answers, 2.0, 0.1)


@pytest.mark.parametrize(
    ("finished", "lost", "timed_out"), [(10, 90, True), (11, 89, False), (0, 1, True), (2, 0, False)]
)
def test_a_level_is_a_timeout_from_nine_tenths_on(finished: int, lost: int, timed_out: bool) -> None:
    found = row("x", a_level(finished, lost))
    assert (found["ttft_ms"] == TIMEOUT) is timed_out and found["timeout"] is timed_out


def test_a_row_has_means_of_what_finished() -> None:
    """TTFT 100 ms; four tokens by 300 ms later: 100 ms between two."""
    found = row("x", a_level(3, 1))
    assert found["ttft_ms"] == pytest.approx(100) and found["tbt_ms"] == pytest.approx(100)
    assert found["tokens_per_s"] == pytest.approx(6.0) and (found["finished"], found["asked"]) == (3, 4)


def test_the_servers_own_count_of_tokens_is_believed() -> None:
    """Pieces cut anywhere; one piece of two tokens; a usage chunk behind."""
    usage = block('{"choices":[],"usage":{"completion_tokens":3}}')
    whole = HEAD + block('{"choices":[{"delta":{"role":"assistant","content":""}}]}') + text("a b") + text(" c")
    stream = whole + usage + END
    for cut in range(1, len(stream)):
        answer = StreamedAnswer(0, 1.0, [(2.0, stream[:cut]), (3.0, stream[cut:])])
        found = seen(answer)
        assert (found.tokens, len(found.times), found.fault) == (3, 2, "")
    assert seen(StreamedAnswer(0, 1.0, [(2.0, whole + END)])).tokens == 2


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\n{"a"', 'status 429: {"a"'),
        (HEAD + text("a") + block('{"error":{"code":"lost"}}') + END, 'error in the stream: {"code":"lost"}'),
        (HEAD + END, "no token"),
    ],
)
def test_what_went_wrong_is_told(data: bytes, fault: str) -> None:
    assert seen(StreamedAnswer(0, 1.0, [(2.0, data)])).fault == fault


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http:///v1"])
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(NotAServer, match="base URL"):
        TargetServer.at(url, "m")


def test_requests_carry_the_path_and_the_key() -> None:
    server = TargetServer.at("https://host/some/v1/", "m", "secret")
    assert (server.port, server.tls) == (443, True) and "secret" not in repr(server)
    request = server.chat([{"role": "user", "content": "x"}], 512, temperature=0.5, top_p=0.7)
    assert request.startswith(b"POST /some/v1/chat/completions HTTP/1.1\r\n") and b"Bearer secret" in request
    assert b'"temperature":0.5,"top_p":0.7' in request and b'"max_tokens":512' in request


@asynccontextmanager
async def serving(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server on loopback; its base URL."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        await asyncio.gather(*(task for task in tasks if task))


async def test_requests_that_do_not_end_in_time_are_given_up_and_the_rest_is_not_asked() -> None:
    """The server answers its first connection, three times."""
    connections = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times = 3 if next(connections) == 0 else 0
        for number in itertools.count():
            await reader.readuntil(b'"include_usage":true}}')
            if number < times:
                writer.write(HEAD + text("a") + END)

    async with serving(answer) as url:
        protocol = Protocol(levels=(4,), requests_per_stream=10, tokens=1, timeout_s=0.1)
        found = await level(TargetServer.at(url, "m"), 4, protocol, made_up(), lambda: None)
    assert len(found.finished) == 3 and found.timed_out
    assert 39 <= len(found.answers) <= 40 and {each.fault for each in found.answers} == {"", TOO_LATE}


async def test_a_server_without_models_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"data":[]}')

    async with serving(answer) as url:
        with pytest.raises(NotAServer, match="list of models"):
            await asyncio.to_thread(TargetServer.at(url, "").first_model)


def test_made_up_prompts_are_the_same_for_the_same_seed() -> None:
    first, again = (list(itertools.islice(made_up(), 200)) for _ in range(2))
    lengths = sorted(len(entry.question.split()) for entry in first)
    assert first == again and 60 < lengths[100] < 130 and lengths[-1] <= MAX_WORDS
