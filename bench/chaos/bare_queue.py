"""Bare queue: engines that are always full, each next request one answer of a bare server away, and nothing else.

`python -m bench.chaos.bare_queue PORT ENGINES SLOTS TOKENS STEP_MS PREFILL_MS` prints, for each request that ended, the
monotonic time in seconds. It shows how many requests a machine lets such engines serve.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count

from bench.bare_server import OK
from bench.chaos.http import HOST
from penstock.engine import Piece, Request, Sampling
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings

ASK = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"


class BareWorker:
    """One engine and its connection to the bare server."""

    def __init__(self, settings: SimSettings, tokens: int) -> None:
        self._engine = SimEngine("bare", settings)
        self._sampling = Sampling(max_tokens=tokens)
        self._free: asyncio.Queue[None] = asyncio.Queue()
        for _ in range(settings.slots):
            self._free.put_nowait(None)

    async def run(self, port: int) -> None:
        """Fill each slot as soon as it is free, until cancelled. Raises OSError, EOFError."""
        reader, writer = await asyncio.open_connection(HOST, port)
        await self._engine.start(self._on_step, lambda _phase: None)
        try:
            for number in count():
                await self._free.get()
                writer.write(ASK)
                await reader.readexactly(len(OK))
                self._engine.submit(Request(str(number), f"bare {number}", self._sampling))
        finally:
            await self._engine.stop()
            writer.close()

    def _on_step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.last:
                self._free.put_nowait(None)
                print(time.monotonic(), flush=True)


async def serve(port: int, engines: int, settings: SimSettings, tokens: int) -> None:
    """Until the process is ended."""
    async with asyncio.TaskGroup() as group:
        for _ in range(engines):
            group.create_task(BareWorker(settings, tokens).run(port))


if __name__ == "__main__":
    port, engines, slots, tokens, step_ms, prefill_ms = map(int, sys.argv[1:])
    sim = SimSettings(slots=slots, step_ms=step_ms, prefill_ms=prefill_ms, authors=True)
    asyncio.run(serve(port, engines, sim, tokens))
