"""Sends requests to an engine and collects what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.engine import ChatTurn, Engine, ModelCard, Piece, Request, Sampling
from penstock.tools import Tools
from workers.engines.text import joined


class EngineDesk:
    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine
        self.card: ModelCard
        self.phases: list[str] = []
        self.steps: list[list[Piece]] = []
        self._ended: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        self.card = await self.engine.start(self._on_step, self.phases.append)

    def submit(self, request: Request) -> str:
        self._ended[request.id] = asyncio.Event()
        self.engine.submit(request)
        return request.id

    def send(
        self,
        prompt: Sequence[ChatTurn] | str | Sequence[int],
        past: Any = (),
        tools: Tools | None = None,
        tenant: str = "",
        **sampling: Any,
    ) -> str:
        request = Request(f"r{len(self._ended)}", prompt, Sampling(**sampling), past, tenant, tools=tools)
        return self.submit(request)

    async def result(self, request_id: str) -> Piece:
        """Everything it got, as one piece."""
        await asyncio.wait_for(self._ended[request_id].wait(), 60)
        return joined(request_id, self.pieces(request_id))

    async def ask(self, prompt: Sequence[ChatTurn] | str | Sequence[int], past: Any = (), **more: Any) -> Piece:
        return await self.result(self.send(prompt, past, **more))

    def pieces(self, request_id: str) -> list[Piece]:
        return [piece for step in self.steps for piece in step if piece.id == request_id]

    def _on_step(self, pieces: list[Piece]) -> None:
        self.steps.append(pieces)
        for piece in pieces:
            assert not self._ended[piece.id].is_set(), "nothing follows the last piece"
            if piece.last:
                self._ended[piece.id].set()
