"""The one engine behind every system: Penstock's simulated one, for programs that are not Penstock's worker.

Guests import this in environments of their own; it needs msgspec and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from bench.served_connection import ServedConnection
from penstock.engine import Piece, Request, Sampling
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings

MODEL = "bench"

Taker = Callable[[Piece], None]
"""Called with each piece of one request, on the event loop."""


class Tap:
    """Requests in, pieces out to whoever asked."""

    def __init__(self, settings: SimSettings) -> None:
        self.slots = settings.slots
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


class EngineConnection(ServedConnection):
    """One client of an engine server."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self._tap = tap


def serve(connection: type[EngineConnection], port: str, settings: str) -> None:
    """Serve on uvloop until the process is ended."""
    import uvloop  # noqa: PLC0415 - not in every environment

    async def forever() -> None:
        tap = Tap(settings_from(settings))
        await tap.start()
        create = asyncio.get_running_loop().create_server
        await create(lambda: connection(tap), "127.0.0.1", int(port), backlog=2048)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forever())


def settings_from(text: str) -> SimSettings:
    """From a peer's command line. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=SimSettings)
