"""Streams whose only Penstock worker is killed in their middle, beside the direct answers of the same engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import msgspec

from bench.load.prompts import PromptSource
from bench.load.streams import StreamedAnswer
from bench.load.target import HttpConnection, TargetServer, TimedAnswer, seen
from bench.penstock import PenstockUp
from planner.load import RequestLengths

STREAMS, PROMPT = 16, 256
SECOND_RUN_STREAMS = 4
"""Streams at once of the second direct run, which shows whether the engine itself repeats an answer beside others."""
KILLED_AT = 1 / 3
"""Of the tokens of the slowest stream."""
TIMEOUT_S = 60.0
UNFINISHED = f"no end {TIMEOUT_S:.0f} s after the kill"


class Unanswered(RuntimeError):
    """Requests of a load were not answered."""


class KilledStreams(msgspec.Struct, frozen=True, kw_only=True):
    """What became of them."""

    streams: int
    tokens: int
    """Of each answer."""
    differ: int
    """Texts that are not those of the direct run, all at once."""
    direct_differ: int
    """The same of a second direct run, a few at once: without Penstock."""
    wrong: list[str]
    """Of the streams that broke, or have another number of tokens: what was wrong."""
    restarts: int
    """Of the worker."""
    killed_at: list[int]
    """Tokens that each stream had brought."""
    silences_s: list[float]
    """The longest of each stream from the kill on."""

    @property
    def unmet(self) -> int:
        """Streams that the kill says nothing of: they had ended, or no worker was started again."""
        return sum(count >= self.tokens for count in self.killed_at) if self.restarts else self.streams


def wrong_with(answer: TimedAnswer, tokens: int) -> str:
    """What is wrong with an answer, whatever its words are; "" if nothing is."""
    if answer.fault or answer.finish != "length":
        return answer.fault or f"it ends with {answer.finish!r}"
    count = len(answer.text.split())
    return "" if count == tokens else f"{count} tokens instead of {tokens}"


def killed_streams(
    direct: TargetServer, penstock: PenstockUp, through: TargetServer, tokens: int, streams: int = STREAMS
) -> KilledStreams:
    """`direct` is the server behind `penstock`, with slots for all streams; `through` is `penstock` itself.

    Raises Unanswered if it does not answer by itself, TimeoutError.
    """

    def bodies(server: TargetServer) -> list[bytes]:
        source = PromptSource(server, RequestLengths(PROMPT, tokens), seed=9, chats=False)
        return source.bodies(streams, {"temperature": 0})

    alone, again = (asyncio.run(_direct(direct, bodies(direct), count)) for count in (streams, SECOND_RUN_STREAMS))
    if wrong := next(filter(None, (wrong_with(each, tokens) for each in alone)), ""):
        raise Unanswered(f"{direct.name} by itself: {wrong}")
    at_s, counts, answers = asyncio.run(_through(penstock, through, bodies(through), round(KILLED_AT * tokens)))
    heard = [seen(each) for each in answers]
    return KilledStreams(
        streams=streams,
        tokens=tokens,
        differ=_differ(alone, heard),
        direct_differ=_differ(alone, again),
        wrong=[wrong for each in heard if (wrong := wrong_with(each, tokens))],
        restarts=penstock.worker()["restarts"],
        killed_at=counts,
        silences_s=[_silence_s(each, at_s) for each in answers],
    )


def _differ(wanted: Sequence[TimedAnswer], heard: Sequence[TimedAnswer]) -> int:
    return sum(one.text != other.text for one, other in zip(wanted, heard, strict=True))


def _silence_s(answer: StreamedAnswer, since_s: float) -> float:
    """The longest time without a byte that ended after this moment."""
    times = [at for at, _ in answer.arrivals]
    return max((after - before for before, after in pairwise(times) if after > since_s), default=0.0)


async def _direct(server: TargetServer, bodies: Sequence[bytes], at_once: int) -> list[TimedAnswer]:
    gate = asyncio.Semaphore(at_once)

    async def one(body: bytes) -> TimedAnswer:
        async with gate:
            line = HttpConnection(server)
            try:
                return seen(await line.ask(body, 0))
            finally:
                line.close()

    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*map(one, bodies))


async def _through(
    penstock: PenstockUp, server: TargetServer, bodies: Sequence[bytes], tokens: int
) -> tuple[float, list[int], list[StreamedAnswer]]:
    """All at once; the worker is killed when each has brought so many tokens. Returns when, how many, the answers."""
    with ExitStack() as stack:
        lines = [HttpConnection(server) for _ in bodies]
        for line in lines:
            stack.callback(line.close)
            await line.connect()
        answers = [line.begin(body, 0) for line, body in zip(lines, bodies, strict=True)]
        counts = await _until_each_has(answers, tokens)
        at_s = time.monotonic()
        os.kill(penstock.worker()["pid"], signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # each stream that has not ended then says so
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*(line.end() for line in lines))
        for line in lines:
            line.close(UNFINISHED)
        return at_s, counts, answers


async def _until_each_has(answers: Sequence[StreamedAnswer], tokens: int) -> list[int]:
    """Poll; how many each then has. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            counts = [_count(each) for each in answers]
            if min(counts) >= tokens:
                return counts
            await asyncio.sleep(0.002)


def _count(answer: StreamedAnswer) -> int:
    """Its tokens so far, about: events that were begun."""
    return sum(data.count(b"data: ") for _, data in answer.arrivals)
