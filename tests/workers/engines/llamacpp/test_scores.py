"""Log-probabilities of a prompt by the embedded engine, with the real model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_desk import EngineDesk
from flow import until

from penstock.engine import Logprob, Piece, Request, Sampling, Task, token_bytes
from workers.engines.llamacpp import scores
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.settings import LlamacppSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CONTEXT = 512
TEXT = "The capital of France is Paris, and the river"
ODD = "\U0001f600 漢字 <|im_start|>user\nè <|endoftext|>end"
"""Parts of characters and control tokens, which no grammar can force."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(real_model: Path) -> AsyncIterator[EngineDesk]:
    desk = EngineDesk(LlamacppEngine("smollm2", LlamacppSettings(slots=2, context=CONTEXT), real_model))
    await desk.start()
    yield desk
    await desk.engine.stop()


async def told(desk: EngineDesk, prompt: str | tuple[int, ...], **sampling: Any) -> list[Piece]:
    """All pieces of such a request; the first has the rows of its prompt."""
    asked = {"temperature": 0.0, "max_tokens": 0, "logprobs": 2, "prompt_logprobs": True} | sampling
    request_id = desk.send(prompt, **asked)
    await desk.result(request_id)
    return desk.pieces(request_id)


async def ids_of(desk: EngineDesk, text: str) -> tuple[int, ...]:
    request_id = desk.submit(Request(f"ids {len(desk.steps)}", text, Sampling(), task=Task(kind="tokenize")))
    return tuple(json.loads((await desk.result(request_id)).text)["tokens"])


def near(one: Logprob, other: Logprob) -> bool:
    return one.token == other.token and abs(one.logprob - other.logprob) < 0.05


@pytest.mark.parametrize("text", [TEXT, ODD])
async def test_each_token_of_a_prompt_has_a_row(desk: EngineDesk, text: str) -> None:
    """The first follows nothing; each other one has what the model gives it behind those before it."""
    first, last = await told(desk, text, logprobs=20)
    ids = await ids_of(desk, text)
    assert b"".join([token_bytes(row.token) for row in first.logprobs]).decode() == text
    assert len(first.logprobs) == len(ids) == first.prompt_tokens == last.prompt_tokens and (first.n, first.text) == (
        0,
        "",
    )
    assert isnan(first.logprobs[0].logprob) and first.logprobs[0].top == ()
    assert (last.finish, last.n, last.text) == ("length", 0, "")
    for place in range(1, len(ids)):
        row = first.logprobs[place]
        (begin, *_) = await told(desk, ids[:place], max_tokens=1, prompt_logprobs=False, logprobs=20)
        behind = dict(begin.logprobs[0].top) if begin.logprobs else {}
        likely = [token for token, value in row.top if value > -3]
        assert all(abs(behind[token] - dict(row.top)[token]) < 0.05 for token in likely if token in behind)
        if row.token in behind:
            assert abs(behind[row.token] - row.logprob) < 0.05
    again, _ = await told(desk, ids, logprobs=20)
    assert all(near(one, other) for one, other in zip(first.logprobs[1:], again.logprobs[1:], strict=True))


async def test_what_no_grammar_forces_is_found(desk: EngineDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by force, also where the first alternatives do not have it."""
    forced, _ = await told(desk, TEXT)
    monkeypatch.setattr(scores, "RUN_TOKENS", 0)
    monkeypatch.setattr(scores, "SEARCHED", 1)
    found, _ = await told(desk, TEXT)
    assert all(near(one, other) for one, other in zip(forced.logprobs[1:], found.logprobs[1:], strict=True))


async def test_the_answer_behind_it_is_the_same(desk: EngineDesk) -> None:
    plain = await desk.ask(TEXT, max_tokens=6, temperature=0.0)
    first, *more = await told(desk, TEXT, max_tokens=6)
    assert first.logprobs and not first.n and "".join(piece.text for piece in more) == plain.text
    assert sum(piece.n for piece in more) == 6 and sum(len(piece.logprobs) for piece in more) == 6


async def test_without_logprobs_only_its_size_is_told(desk: EngineDesk) -> None:
    (last,) = await told(desk, TEXT, logprobs=None)
    assert last.finish == "length" and not last.logprobs and last.prompt_tokens == len(await ids_of(desk, TEXT))


async def test_a_prompt_that_is_cancelled_ends_soon(desk: EngineDesk) -> None:
    """And leaves its slot; one that does not fit the context is refused."""
    request_id = desk.send("water " * 400, temperature=0.0, max_tokens=0, logprobs=1, prompt_logprobs=True)
    await until(lambda: desk.engine.stats().running == 1)
    desk.engine.cancel(request_id)
    assert (await desk.result(request_id)).finish == "cancelled" and len(desk.pieces(request_id)) == 1
    await until(lambda: desk.engine.stats().running == 0)
    (piece,) = await told(desk, "water " * 600)
    assert piece.failure is not None and piece.failure.code == "context_length_exceeded"


async def test_the_token_that_ends_the_answer_has_a_row(desk: EngineDesk) -> None:
    """Clients count rows from their end: one for each token that was asked for."""
    (end,) = await ids_of(desk, "<|im_end|>")
    first, *more = await told(desk, TEXT, max_tokens=1, logit_bias={end: 100.0})
    assert sum(len(piece.logprobs) for piece in more) == 1 and more[-1].finish == "stop"
    assert first.prompt_tokens == len(first.logprobs) and not "".join(piece.text for piece in more)
