"""Bench of the engine `upstream`: plays the worker's part, without a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fake_upstream import MODEL, FakeUpstream, serving
from msgspec.structs import replace

from penstock.engine import RETURNED, ChatTurn, Failure, Input, ModelCard, Piece, Request, Sampling, Task
from workers.engines.upstream.engine import UpstreamEngine, build
from workers.engines.upstream.settings import UpstreamSettings

HELLO = (ChatTurn("user", "hi"),)
FAST = {"first_token_s": 0.6, "between_tokens_s": 0.6, "gauges_s": 0.05}


@dataclass
class Answer:
    """What a reader and a bill get of one request."""

    text: str = ""
    tokens: int = 0
    finish: str = ""
    failure: Failure | None = None
    prompt_tokens: int = 0
    restarts: int = 0
    """How often it began again."""
    returns: int = 0
    """How often it was given back."""
    pieces: list[Piece] = field(default_factory=list)
    served_by: list[str] = field(default_factory=list)
    """The models that its pieces named, in their order."""

    @property
    def past(self) -> list[tuple[str, tuple[int, ...], int]]:
        return [(piece.text, piece.ids, piece.n) for piece in self.pieces if piece.text or piece.n]


class Bench:
    """One engine. `ask` sees a request to its end, as a worker does: it submits again what the engine gives back."""

    def __init__(
        self,
        settings: UpstreamSettings,
        others: Mapping[str, UpstreamSettings] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`others`: settings of other models, by name; `adapters`: by name, the name of each at the servers."""
        self.engine: UpstreamEngine = build("m", settings, Path(), adapters or {}, (others or {}).get)
        self.card: ModelCard | None = None
        self.steps: list[list[Piece]] = []
        self._queues: dict[str, asyncio.Queue[Piece]] = {}
        self._numbers = count()

    async def start(self) -> None:
        self.card = await self.engine.start(self._on_step, lambda _: None)

    def _on_step(self, pieces: list[Piece]) -> None:
        self.steps.append(pieces)
        for piece in pieces:
            self._queues[piece.id].put_nowait(piece)

    async def perform(self, task: Task, prompt: Any = "", inputs: Sequence[Input] = ()) -> Answer:
        """The answer to a task, over any number of returns."""
        return await self.ask(prompt, task=task, inputs=inputs, max_tokens=1)

    def begin(self, request: Request) -> asyncio.Queue[Piece]:
        """Submit one request; its pieces."""
        queue = self._queues[request.id] = asyncio.Queue()
        self.engine.submit(request)
        return queue

    async def ask(self, prompt: Any = HELLO, **asked: Any) -> Answer:
        """The whole answer, over any number of returns. `asked`: of the request or of its sampling."""
        answer, past, text_id = Answer(), list[Any](), f"t{next(self._numbers)}"
        own = {name: asked.pop(name) for name in ("tools", "reasoning", "task", "inputs", "adapter") if name in asked}
        while True:
            request = Request(
                f"r{next(self._numbers)}", prompt, Sampling(**asked), past, served_by="".join(answer.served_by),
                text_id=text_id, begun_by=f"w/{answer.restarts}", **own,
            )  # fmt: skip
            if past and self.engine.restart_reason(request):
                answer = Answer(restarts=answer.restarts + 1, returns=answer.returns)
                request = replace(request, past=(), served_by="", begun_by=f"w/{answer.restarts}")
            queue = self.begin(request)
            while not (piece := await asyncio.wait_for(queue.get(), 20)).last:
                _add(answer, piece)
            _add(answer, piece)
            if piece.finish != RETURNED:
                answer.finish, answer.failure = piece.finish, piece.failure
                return answer
            answer.returns += 1
            past = answer.past
            while not self.engine.stats().accepts:
                await asyncio.sleep(0.02)


async def rest(queue: asyncio.Queue[Piece]) -> list[Piece]:
    """The pieces of a request up to its last one."""
    pieces = [await asyncio.wait_for(queue.get(), 20)]
    while not pieces[-1].last:
        pieces.append(await asyncio.wait_for(queue.get(), 20))
    return pieces


def _add(answer: Answer, piece: Piece) -> None:
    answer.pieces.append(piece)
    answer.text += piece.text
    answer.served_by += [piece.served_by] if piece.served_by else []
    answer.tokens += piece.n
    answer.prompt_tokens = answer.prompt_tokens or piece.prompt_tokens


@asynccontextmanager
async def bench(
    *fakes: FakeUpstream,
    fallbacks: Mapping[str, FakeUpstream] | None = None,
    adapters: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """An engine in front of these fakes, which listen inside the block. `fallbacks`: by model, its only server."""
    others = fallbacks or {}
    async with serving(*fakes, *others.values()):
        given = FAST | {"urls": tuple(fake.url for fake in fakes), "kind": _kind(fakes)} | settings
        rest = {
            name: UpstreamSettings(**FAST, urls=(fake.url,), kind=_kind((fake,)), name=MODEL)  # type: ignore[arg-type]
            for name, fake in others.items()
        }
        bench = Bench(UpstreamSettings(**given, fallback=tuple(others)), rest, adapters)
        try:
            await bench.start()
            yield bench
        finally:
            await bench.engine.stop()


async def asked_of(fake: FakeUpstream, prompt: Any = HELLO, **asked: Any) -> Answer:
    """The answer of one server to one request. `asked`: as of Bench.ask."""
    async with bench(fake) as desk:
        return await desk.ask(prompt, **asked)


def _kind(fakes: tuple[FakeUpstream, ...]) -> str:
    """The kinds that no page of a server tells."""
    return "openai" if fakes[0].kind == "openai" else ""
