"""Tasks of the embedded engine with the real model: its vectors are llama.cpp's own, and its token ids those of an
answer."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_desk import EngineDesk

from penstock.engine import ChatTurn, EngineDead, EngineHealth, Input, Piece, Request, Sampling, Task, TaskKind
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.request import ADDED_TOKENS
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.task_answers import MIN_TOLD_BYTES, check_task_answer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TEXTS: tuple[Input, ...] = ("A river flows to the sea.", "The sea takes the river.", "Tax forms are due in May.")
TALK = (ChatTurn("user", "Name a river <|im_end|> please."),)
SIZE = 576


class TaskDesk(EngineDesk):
    """Sends tasks, too."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(LlamacppEngine("m", LlamacppSettings(slots=2, context=1024, **settings), path))

    async def perform(self, kind: TaskKind, prompt: Any = "", inputs: Sequence[Input] = (), **more: Any) -> Piece:
        task = Task(kind=kind, **more)
        request = Request(f"t{len(self._ended)}", prompt, Sampling(), task=task, inputs=inputs)
        piece = await self.result(self.submit(request))
        assert piece.n == 0 and len(self.pieces(request.id)) == 1
        if piece.failure is None:
            check_task_answer(task, inputs, piece.text)
        return piece

    async def vectors(self, *inputs: Input) -> list[array[float]]:
        piece = await self.perform("embed", inputs=inputs)
        assert piece.failure is None, piece.failure
        return [array("f", base64.b64decode(each)) for each in piece.text.split(",")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(real_model: Path) -> AsyncIterator[TaskDesk]:
    desk = TaskDesk(real_model, embeddings=True)
    await desk.start()
    yield desk
    await desk.engine.stop()


def likeness(one: array[float], other: array[float]) -> float:
    return math.sumprod(one, other) if hasattr(math, "sumprod") else sum(a * b for a, b in zip(one, other, strict=True))


# --- vectors ---------------------------------------------------------------------------------------------------------


async def test_vectors_are_of_length_one_and_the_same_each_time(desk: TaskDesk) -> None:
    """Alone or with others; texts about one thing are closer than others."""
    assert desk.card.capabilities.embed and not desk.card.capabilities.rerank and desk.card.embedding_size == SIZE
    made = await desk.vectors(*TEXTS)
    assert [len(each) for each in made] == [SIZE] * 3
    assert all(abs(likeness(each, each) - 1) < 1e-3 for each in made)
    (alone,) = await desk.vectors(TEXTS[1])
    assert likeness(alone, made[1]) > 0.999
    assert likeness(made[0], made[1]) > likeness(made[0], made[2])


async def test_texts_are_generated_beside_vectors(desk: TaskDesk) -> None:
    """At the same time, on both slots; and no text of another tenant is taken from a slot's cache."""
    stories = [desk.send("Once upon a time", tenant="a", max_tokens=8, temperature=0) for _ in range(3)]
    made = await asyncio.gather(*[desk.vectors(*TEXTS) for _ in range(2)])
    assert all(likeness(one, other) > 0.999 for each in made for one, other in zip(each, made[0], strict=True))
    for story in stories:
        whole = await desk.result(story)
        assert (whole.finish, whole.n, whole.cached_tokens) == ("length", 8, 0)


async def test_a_text_that_is_too_long_is_refused_with_the_setting(desk: TaskDesk) -> None:
    """And so is a token that the model does not have."""
    piece = await desk.perform("embed", inputs=("word " * 1100,))
    assert piece.failure is not None and piece.failure.code == "context_length_exceeded"
    assert piece.failure.status == 400 and "options.context" in piece.failure.message
    piece = await desk.perform("embed", inputs=((10**6,),))
    assert piece.failure is not None and (piece.failure.status, piece.failure.param) == (400, "input")


async def test_a_text_that_would_take_the_tokenizer_long_is_refused(desk: TaskDesk) -> None:
    """One of the largest size is told, whatever it spells."""
    piece = await desk.perform("tokenize", "1" * (MIN_TOLD_BYTES - ADDED_TOKENS))
    assert piece.failure is not None and (piece.failure.status, piece.failure.param) == (400, "prompt")
    assert str(MIN_TOLD_BYTES) in piece.failure.message
    talk = (ChatTurn("user", "1" * MIN_TOLD_BYTES),)
    piece = await desk.perform("tokenize", talk)
    assert piece.failure is not None and (piece.failure.status, piece.failure.param) == (400, "messages")
    piece = await desk.perform("tokenize", "1" * (MIN_TOLD_BYTES - ADDED_TOKENS - 1))
    assert piece.failure is None


async def test_an_engine_that_gets_no_thread_is_dead(real_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request would get none either: the worker ends instead of failing its jobs one by one."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    desk = TaskDesk(real_model, embeddings=True)
    await desk.start()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        assert (await desk.perform("embed", inputs=TEXTS)).failure is not None
        assert desk.engine.health() == EngineHealth(False, "llama.cpp cannot take requests: can't start new thread")
        with pytest.raises(EngineDead, match="can't start new thread"):
            desk.send(TALK)
    await desk.engine.stop()


async def test_a_cancelled_task_ends_at_once(desk: TaskDesk) -> None:
    """Also one that waits, and one that has not begun; the next is answered."""
    task = Task(kind="embed")
    early = Request("early", "", Sampling(), task=task, inputs=("word",))
    not_begun = desk.submit(early)
    desk.engine.cancel(early.id)
    assert (await desk.result(not_begun)).finish == "cancelled"
    requests = [Request(f"c{number}", "", Sampling(), task=task, inputs=("word " * 60,) * 2) for number in range(4)]
    waiting = [desk.submit(request) for request in requests]
    await asyncio.sleep(0.05)
    for request in requests:
        desk.engine.cancel(request.id)
        desk.engine.cancel(request.id)
    for each in waiting:
        assert (await desk.result(each)).finish == "cancelled"
    assert len(await desk.vectors("x")) == 1
    assert [len(desk.pieces(each)) for each in waiting] == [1] * 4


async def test_a_model_that_ranks_makes_no_vectors(real_model: Path) -> None:
    """The scores are in the order of the documents."""
    desk = TaskDesk(real_model, embeddings=True, pooling="rank")
    await desk.start()
    try:
        assert desk.card.capabilities.rerank and not desk.card.capabilities.embed
        piece = await desk.perform("rerank", inputs=("river", *TEXTS))
        assert piece.failure is None and piece.prompt_tokens > 10
        alone = [json.loads((await desk.perform("rerank", inputs=("river", each))).text)[0] for each in TEXTS]
        assert json.loads(piece.text) == pytest.approx(alone, abs=0.05)
    finally:
        await desk.engine.stop()


# --- token ids -------------------------------------------------------------------------------------------------------


async def test_ids_are_those_that_an_answer_counts(desk: TaskDesk) -> None:
    """Of a text and of a conversation, whose control tokens stay text; the ids give the text again."""
    assert desk.card.capabilities.tokenize_chats
    for prompt in ("A river – ünïcode 😀 <|im_start|>", TALK):
        found = json.loads((await desk.perform("tokenize", prompt)).text)
        answer = await desk.ask(prompt, max_tokens=1)
        assert answer.prompt_tokens == len(found["tokens"]) and found["max_model_len"] == 1024
        back = (await desk.perform("detokenize", found["tokens"])).text
        assert prompt == back if isinstance(prompt, str) else "Name a river <|im_end|> please." in back
    told = [await desk.perform("tokenize", TALK, generation_prompt=begins) for begins in (True, False)]
    longer, shorter = (json.loads(each.text)["tokens"] for each in told)
    assert longer[: len(shorter)] == shorter and len(longer) > len(shorter)


async def test_nothing_has_no_ids(desk: TaskDesk) -> None:
    """An empty text, and no ids; a token that the model does not have is named."""
    assert json.loads((await desk.perform("tokenize", "")).text)["tokens"] == []
    assert (await desk.perform("detokenize", ())).text == ""
    piece = await desk.perform("detokenize", (10**6,))
    assert piece.failure is not None and (piece.failure.status, piece.failure.param) == (400, "tokens")
