"""What an engine step costs Redis when many workers write theirs at once: alone, an idle server wakes up for each.

Real appends under real leases, and readers that really get the frames; only the engine is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from bench.processes import Processes, spent
from streaming.jobs.codec import encode_delta
from streaming.jobs.frames import Delta
from streaming.jobs.lease import Lease
from streaming.keys import channel
from streaming.redis.client import RedisClient
from streaming.settings import RedisSettings

WORKERS = 16
WARMUP_S = 0.5


async def step_us(store: Processes, url: str, tokens: int, readers: int, seconds: float) -> float:
    """CPU microseconds of Redis for one step of so many tokens, spread over so many API processes.

    Raises Unavailable.
    """
    addresses = [channel("api", f"reader-{number}") for number in range(readers)]
    wire = RedisClient.open(RedisSettings(url=url))
    try:
        async with _listening(url, addresses):
            written = [0]
            rows = _rows(tokens, addresses)
            writers = [asyncio.create_task(_write(wire, rows, written)) for _ in range(WORKERS)]
            await asyncio.sleep(WARMUP_S)
            before, begun = store.cpu_s(), written[0]
            await asyncio.wait(writers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            cost, steps = spent(before, store.cpu_s()), written[0] - begun
            for writer in writers:
                writer.cancel()
            outcomes = await asyncio.gather(*writers, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            return 1e6 * cost / steps
    finally:
        await wire.close()


def _rows(tokens: int, addresses: Sequence[str]) -> Mapping[str, Sequence[bytes]]:
    rows: dict[str, list[bytes]] = {}
    for number, address in zip(range(tokens), itertools.cycle(addresses), strict=False):
        rows.setdefault(address, []).append(encode_delta(Delta(number, number + 1, 0, f" word{number}", (number,), 1)))
    return rows


async def _write(wire: RedisClient, rows: Mapping[str, Sequence[bytes]], written: list[int]) -> None:
    lease = Lease(wire, "bench")
    await lease.register()
    while True:
        await lease.calls([lease.append_call(0, rows, max(1, lease.next_frame(0) - 100), openings={})])
        written[0] += 1


@asynccontextmanager
async def _listening(url: str, addresses: Sequence[str]) -> AsyncIterator[None]:
    """A connection for each address that takes what is published there, and does nothing with it."""
    place = urlsplit(url)
    async with contextlib.AsyncExitStack() as stack:
        for address in addresses:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(b"SUBSCRIBE " + address.encode() + b"\r\n")
            stack.callback(writer.close)
            stack.callback(asyncio.create_task(_drain(reader)).cancel)
        yield


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 20):
        pass
