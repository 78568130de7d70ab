"""`python -m bench.engine.bare`: the engine alone. Reads an EnginePlan on stdin, writes an EngineSpeed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.engine import ChatTurn, Piece, Request, Sampling
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.settings import LlamacppSettings

SUBJECTS = (
    "a river", "an old bridge", "the sea in winter", "a lost letter", "a garden at night", "two brothers", "a road",
    "the first snow", "a clock", "a small town", "a lighthouse", "an honest thief", "a storm", "a school by the lake",
    "the last train", "a stone that could speak",
)  # fmt: skip


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` callers, each asking `requests_per_stream` times."""

    path: str
    """Of the GGUF file."""
    threads: int
    streams: int = 8
    requests_per_stream: int = 4
    tokens: int = 96
    context: int = 1024

    @property
    def prompts(self) -> list[str]:
        """One for each request, all different."""
        count = self.streams * self.requests_per_stream
        return [f"Tell me story number {n + 1} about {SUBJECTS[n % len(SUBJECTS)]}." for n in range(count)]


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all answers, from the first request to the last token."""

    tokens: int
    seconds: float
    cpu_s: float
    """Of the process the engine runs in."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float:
        return 1e3 * self.cpu_s / self.tokens


class Bare:
    """Callers of one engine."""

    def __init__(self, plan: EnginePlan) -> None:
        settings = LlamacppSettings(slots=plan.streams, context=plan.context, threads=plan.threads)
        self._plan, self._engine = plan, LlamacppEngine("bare", settings, Path(plan.path))
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._tokens = 0

    async def run(self) -> EngineSpeed:
        """Warm up with one short answer a stream, then measure. Raises EngineDead."""
        plan = self._plan
        await self._engine.start(self._on_step, lambda _phase: None)
        try:
            await asyncio.gather(*(self._ask(prompt, 4) for prompt in plan.prompts[: plan.streams]))
            self._tokens = 0
            left = iter(plan.prompts)
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.gather(*(self._ask_on(left) for _ in range(plan.streams)))
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
            return EngineSpeed(tokens=self._tokens, seconds=seconds, cpu_s=cpu_s)
        finally:
            await self._engine.stop()

    async def _ask_on(self, prompts: Iterator[str]) -> None:
        for prompt in prompts:
            await self._ask(prompt, self._plan.tokens)

    async def _ask(self, prompt: str, tokens: int) -> None:
        name = str(len(self._ended))
        self._ended[name] = asyncio.get_running_loop().create_future()
        sampling = Sampling(max_tokens=tokens, temperature=0.0)
        self._engine.submit(Request(name, (ChatTurn("user", prompt),), sampling))
        await self._ended[name]

    def _on_step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._tokens += piece.n
            if piece.last:
                self._ended[piece.id].set_result(None)


def main() -> int:
    """Returns the exit code."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=EnginePlan)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(Bare(plan).run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
