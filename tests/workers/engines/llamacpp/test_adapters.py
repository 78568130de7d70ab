"""Adapters of the embedded engine, with the real model: what they change, and what they must not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine_desk import EngineDesk
from lora_file import write_lora

from penstock.engine import ChatTurn, EngineDead, Piece, Request, Sampling
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.settings import LlamacppSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

STORY = (ChatTurn("user", "Tell me a long story about a river."),)


class Desk(EngineDesk):
    async def tell(self, adapter: str, past: str = "") -> Piece:
        sampling = Sampling(max_tokens=16, temperature=0.0)
        number, rows = len(self.steps), [(past, (), 4)] if past else []
        return await self.result(self.submit(Request(f"{number}", STORY, sampling, rows, "red", adapter=adapter)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    """An engine with one slot and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {name: str(write_lora(folder / name, real_model, seed)) for seed, name in enumerate("ab")}
    desk = Desk(LlamacppEngine("smollm2", LlamacppSettings(slots=1, context=512), real_model, adapters))
    await desk.start()
    yield desk
    await desk.engine.stop()


async def test_each_adapter_has_its_own_text(desk: Desk, real_model: Path) -> None:
    """The same each time its prompt is computed anew; without an adapter, the text is that of the model alone."""
    assert (desk.card.adapters, desk.engine.stats().adapters) == (("a", "b"), ())
    plain = Desk(LlamacppEngine("smollm2", LlamacppSettings(slots=1, context=512), real_model))
    await plain.start()
    expected = (await plain.tell("")).text
    await plain.engine.stop()
    told = {name: (await desk.tell(name)).text for name in ("", "a", "b")}
    assert told[""] == expected and len(set(told.values())) == 3
    assert {name: (await desk.tell(name)).text for name in ("a", "", "b")} == told


async def test_a_cached_prompt_is_of_one_adapter(desk: Desk) -> None:
    """What the slot has is reused by the same adapter alone."""
    cached = [(await desk.tell(name)).cached_tokens > 0 for name in ("b", "a", "a", "b", "", "", "a")]
    assert cached[1:] == [False, True, False, False, True, False]


async def test_a_continued_text_keeps_its_adapter(desk: Desk) -> None:
    """The rest is that of the whole text."""
    whole = (await desk.tell("a")).text
    start = "".join(piece.text for piece in desk.pieces(desk.steps[-1][0].id)[:4])
    assert (start + (await desk.tell("a", start)).text)[: len(start) + 4] == whole[: len(start) + 4]


async def test_an_adapter_that_is_not_there_is_named(real_model: Path, tmp_path: Path) -> None:
    """And one that is no adapter of this model."""
    for path, more, why in (
        (tmp_path / "none", {}, "does not exist"),
        (real_model, {}, "cannot load"),
        (real_model, {"embeddings": True}, "vectors beside adapters"),
    ):
        desk = Desk(LlamacppEngine("m", LlamacppSettings(**more), real_model, {"a": str(path)}))
        with pytest.raises(EngineDead, match=why):
            await desk.start()


async def test_texts_of_adapters_take_turns(real_model: Path, tmp_path: Path) -> None:
    """llama.cpp computes them apart: one that waits begins once the texts before it have ended, whatever comes behind
    it; it can be cancelled meanwhile."""
    adapters = {name: str(write_lora(tmp_path / name, real_model, seed)) for seed, name in enumerate("ab")}
    desk = Desk(LlamacppEngine("smollm2", LlamacppSettings(slots=2, context=256), real_model, adapters))
    await desk.start()
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)

    def send(number: int, adapter: str) -> str:
        return desk.submit(Request(f"{number}{adapter}", f"text {number}", sampling, adapter=adapter))

    texts = [send(number, adapter) for number, adapter in enumerate(["a", "a", "b", "b", "a", ""])]
    desk.engine.cancel(texts[3])
    found = [await desk.result(each) for each in texts]
    assert [piece.finish for piece in found] == ["length"] * 3 + ["cancelled"] + ["length"] * 2
    steps = {each: [at for at, step in enumerate(desk.steps) for piece in step if piece.id == each] for each in texts}
    one, two, waits, _, behind, last = [(steps[each][0], steps[each][-1]) for each in texts]
    assert max(one[1], two[1]) <= waits[0] and waits[1] <= behind[0] and behind[1] <= last[0]
    assert (desk.engine.stats().running, desk.engine.stats().waiting) == (0, 0)
    await desk.engine.stop()
