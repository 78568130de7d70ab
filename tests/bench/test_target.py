"""A server of OpenAI's API: what is read out of its streams, and a closed loop of clients against it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from bench.load.streams import StreamedAnswer
from bench.load.target import TIMEOUT, NotAServer, TargetServer, closed_loop, seen

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def block(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def text(word: str) -> bytes:
    return block('{"choices":[{"delta":{"content":"' + word + '"}}]}')


END = block("[DONE]") + b"0\r\n\r\n"


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
        server = TargetServer.at(url, "m")
        requests = [server.chat([{"role": "user", "content": f"{number}"}], 1) for number in range(40)]
        found = await closed_loop(server, 4, requests, 0.1, lambda: None)
    assert sum(not each.fault for each in found.answers) == 3
    assert 39 <= len(found.answers) <= 40 and {each.fault for each in found.answers} == {"", TIMEOUT}
