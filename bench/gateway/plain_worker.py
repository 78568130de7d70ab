"""`python -m bench.gateway.plain_worker REDIS_URL SETTINGS`: the worker of the plain gateway.

Jobs come from a list, each token is one PUBLISH on its request's own channel. What a step brings goes out in one
pipeline, which is kinder to this gateway than one round trip per token would be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import uvloop
from redis.asyncio import Redis

from bench.gateway.engine import Taker, Tap, settings_from
from penstock.engine import Piece

JOBS = "plain:jobs"


class _Job(msgspec.Struct):
    channel: str
    prompt: str
    tokens: int


async def work(url: str, tap: Tap) -> None:
    """Until the process is ended."""
    outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    await tap.start()
    async with Redis.from_url(url) as redis, asyncio.TaskGroup() as tasks:
        tasks.create_task(_publish(redis, outbox))
        while True:
            if (popped := await redis.brpop([JOBS], timeout=1)) is None:
                continue
            job = msgspec.json.decode(popped[1], type=_Job)
            tap.open(job.prompt, job.tokens, _sender(job.channel, outbox))


def _sender(channel: str, outbox: asyncio.Queue[tuple[str, bytes]]) -> Taker:
    def take(piece: Piece) -> None:
        outbox.put_nowait((channel, msgspec.json.encode({"text": piece.text, "finish": piece.finish})))

    return take


async def _publish(redis: Redis, outbox: asyncio.Queue[tuple[str, bytes]]) -> None:
    while True:
        waiting = [await outbox.get()]
        while not outbox.empty():
            waiting.append(outbox.get_nowait())
        pipeline = redis.pipeline(transaction=False)
        for channel, message in waiting:
            pipeline.publish(channel, message)
        await pipeline.execute()


def main(argv: Sequence[str]) -> int:
    """Serve."""
    url, settings = argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(url, Tap(settings_from(settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
