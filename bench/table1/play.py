"""The protocol: c streams in a closed loop, 20 requests each, every request with a minute to finish."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.load.answer import Answer
from bench.table1.prompts import DatasetEntry
from bench.table1.server import TIMEOUT, HttpConnection, NotAServer, TargetServer, TimedAnswer, first_model, seen

GIVEN_UP = 0.9
"""The share of unfinished requests from which a level is a timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The paper's, unless a run is to be shorter."""

    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    requests_per_stream: int = 20
    tokens: int = 512
    timeout_s: float = 60.0


@dataclass(slots=True)
class ConcurrencyLevel:
    """What was seen at one concurrency."""

    streams: int
    asked: int
    """Requests that belong to the level; some may not have been made."""
    answers: list[TimedAnswer]
    seconds: float
    own_cpu: float
    """Share of one core that this program itself used."""

    @property
    def finished(self) -> list[TimedAnswer]:
        return [answer for answer in self.answers if not answer.fault]

    @property
    def timed_out(self) -> bool:
        """Whether the paper writes "Timeout"."""
        return self.asked - len(self.finished) >= GIVEN_UP * self.asked


async def level(
    server: TargetServer, streams: int, protocol: Protocol, prompts: Iterator[DatasetEntry], done: Callable[[], None]
) -> ConcurrencyLevel:
    """The paper's requests, asked as `closed_loop` says."""
    entries = itertools.islice(prompts, streams * protocol.requests_per_stream)
    requests = [server.chat(entry.messages, protocol.tokens, temperature=0.5, top_p=0.7) for entry in entries]
    return await closed_loop(server, streams, requests, protocol.timeout_s, done)


async def closed_loop(
    server: TargetServer, streams: int, requests: Sequence[bytes], timeout_s: float, done: Callable[[], None]
) -> ConcurrencyLevel:
    """Every stream asks again as soon as it is answered, until all requests are made; or, where so many have not
    finished that the rest cannot change it, until it is known to be a timeout."""
    asked, left = len(requests), iter(requests)
    answers: list[Answer] = []
    lost = 0

    async def stream() -> None:
        nonlocal lost
        line = HttpConnection(server)
        try:
            for request in left:
                answers.append(await _ask(line, request, timeout_s))
                done()
                if answers[-1].fault:  # what its connection may still bring belongs to no later answer
                    lost += 1
                    line.close()
                    line = HttpConnection(server)
                if lost >= GIVEN_UP * asked:
                    return
        finally:
            line.close()

    began, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.monotonic() - began
    own = (time.process_time() - cpu) / seconds
    return ConcurrencyLevel(streams, asked, [seen(answer) for answer in answers], seconds, own)


async def _ask(line: HttpConnection, request: bytes, timeout_s: float) -> Answer:
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            return await line.ask(request, 0)
    except TimeoutError:
        return Answer(0, begun, fault=TIMEOUT)
    except OSError as error:
        await asyncio.sleep(0.1)
        return Answer(0, begun, fault=f"no connection: {error}")


async def model_of(server: TargetServer) -> str:
    """The first model a server names. Raises NotAServer, OSError."""
    line = HttpConnection(server)
    try:
        async with asyncio.timeout(30):
            return first_model(await line.ask(server.models(), 0))
    except TimeoutError:
        raise NotAServer("its list of models does not come") from None
    finally:
        line.close()


def endless(entries: Sequence[DatasetEntry]) -> Iterator[DatasetEntry]:
    """Again from the beginning when all were asked."""
    while True:
        yield from entries
