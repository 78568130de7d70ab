"""The one engine behind every system: Penstock's simulated one, for programs that are not Penstock's worker.

Guests import this in environments of their own; it needs msgspec and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from streaming.jobs.job import Sampling
from workers.engines.base import Piece, Request
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings

MODEL = "bench"

Taker = Callable[[Piece], None]
"""Called with each piece of one request, on the event loop."""


class Tap:
    """Requests in, pieces out to whoever asked."""

    def __init__(self, settings: SimSettings) -> None:
        self._engine = SimEngine(MODEL, settings)
        self._takers: dict[str, Taker] = {}
        self._count = 0

    async def start(self) -> None:
        await self._engine.start(self._on_step, lambda _: None)

    def open(self, prompt: str, tokens: int, taker: Taker) -> str:
        """Generate; returns the request's id."""
        self._count += 1
        name = str(self._count)
        self._takers[name] = taker
        self._engine.submit(Request(name, prompt, Sampling(max_tokens=tokens)))
        return name

    def close(self, name: str) -> None:
        """Its reader has left."""
        if self._takers.pop(name, None) is not None:
            self._engine.cancel(name)

    def _on_step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            taker = self._takers.pop(piece.id, None) if piece.last else self._takers.get(piece.id)
            if taker is not None:
                taker(piece)


def settings_from(text: str) -> SimSettings:
    """From a guest's command line. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=SimSettings)


async def forever() -> None:
    """Until the process is ended."""
    await asyncio.Event().wait()
