"""examples/engine, which docs/engines.md shows, keeps to the protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engine import Piece, Request, Sampling
from workers.engines import registry
from workers.engines.checked_engine import CheckedEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine"


async def test_the_example_answers_goes_on_and_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request, one that an earlier attempt began, a limit, a stop string, one that is cancelled, and a prompt
    that is longer than the longest answer."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    echo = CheckedEngine(registry.build_plugin("echo_engine:Echo", "m", {"step_ms": 1}), "echo_engine:Echo", "m")
    pieces: list[Piece] = []
    ended: dict[str, asyncio.Event] = {name: asyncio.Event() for name in "abcdef"}

    def on_step(step: list[Piece]) -> None:
        pieces.extend(step)
        for piece in step:
            if piece.last:
                ended[piece.id].set()

    card = await echo.start(on_step, lambda _: None)
    assert (card.name, card.engine) == ("m", "echo_engine:Echo")
    for request in (
        Request("a", "one two three", Sampling()),
        Request("b", "one two three", Sampling(max_tokens=3), past=(("one ", (), 1),)),
        Request("c", "one two three", Sampling(max_tokens=2)),
        Request("d", "one two three", Sampling(stop=("two",))),
        Request("e", "one two three", Sampling()),
        Request("f", "word " * 5000, Sampling(), past=(("word " * 4000, (), 4000),)),
    ):
        await echo.check(request)
        echo.submit(request)
    echo.cancel("e")
    async with asyncio.timeout(20):
        for event in ended.values():
            await event.wait()
    assert echo.health().ok
    await echo.stop()
    said = {name: "".join(piece.text for piece in pieces if piece.id == name) for name in ended}
    assert said.pop("f") == "word " * (card.max_output - 4000)
    assert said == {"a": "one two three ", "b": "two three ", "c": "one two ", "d": "one ", "e": ""}
    ends = {piece.id: piece.finish for piece in pieces if piece.last}
    assert ends == {"a": "stop", "b": "stop", "c": "length", "d": "stop", "e": "cancelled", "f": "length"}
