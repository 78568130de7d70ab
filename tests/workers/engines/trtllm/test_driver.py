"""The driver's limits: what the engine would refuse never reaches it, and what ends a request or an engine ends it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from flow import until
from trtllm_double import DEADLINE_S, EngineDeadError, RequestError, Rig, ToyTokenizer, ask, params, settle

from penstock.engine import Request, Sampling, Task


async def test_an_answer_without_a_limit_gets_what_the_context_leaves(rig: Any) -> None:
    """The engine refuses a request that may exceed it."""
    started = await rig(max_seq_len=100)
    await started.submit(ask())
    assert params(started)["max_tokens"] == 96
    await started.finish("r")
    assert started.text("r") == "Hello, world."


async def test_a_text_that_was_complete_needs_no_prefill(rig: Any) -> None:
    """Although prompt and text would exceed what one takes."""
    started = await rig(max_num_tokens=6, chunked_prefill=False)
    await started.submit(ask(past=[("Hel", list(b"Hel"), 3)], max_tokens=3))
    assert started.pieces("r")[-1].finish == "length"


async def test_no_more_tokens_were_cached_than_the_prompt_has(started: Rig) -> None:
    """Else a bill would be below nothing."""
    await started.submit(ask(prompt=[1]))
    await started.finish("r")
    assert (started.pieces("r")[-1].prompt_tokens, started.pieces("r")[-1].cached_tokens) == (1, 1)


async def test_a_schema_that_held_for_a_token_is_not_at_fault_later(rig: Any) -> None:
    started = await rig(guided_decoding="xgrammar")
    await started.begin(json_schema={})
    started.llm.fail(RequestError("Guided decoding error"))
    await settle()
    assert started.failure("r").status == 500


async def test_a_task_that_waits_can_be_cancelled(started: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, texts, encode = threading.Event(), list[str](), ToyTokenizer.encode

    def slowly(self: ToyTokenizer, text: str, **more: Any) -> list[int]:
        texts.append(text)
        go_on.wait(DEADLINE_S)
        return encode(self, text, **more)

    monkeypatch.setattr(ToyTokenizer, "encode", slowly)
    try:
        for name in ("first", "second"):
            started.engine.submit(Request(name, name, Sampling(), task=Task(kind="tokenize")))
        started.engine.cancel("second")
        await until(lambda: bool(started.pieces("second")))
    finally:
        go_on.set()
    await until(lambda: bool(started.pieces("first")))
    assert [started.pieces(name)[-1].finish for name in ("first", "second")] == ["stop", "cancelled"]
    assert texts == ["first"]


async def test_a_dead_engine_gets_no_time_for_last_words(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no thread of it outlives its end."""
    before = {*threading.enumerate()}
    started = await rig()
    await started.begin()
    monkeypatch.setattr("workers.engines.trtllm.engine.GRACE_S", 60.0)
    started.llm.at_call = EngineDeadError("rank 1")
    await started.submit(ask("next"))
    assert not started.engine.health().ok
    started.llm.hang.set()
    async with asyncio.timeout(DEADLINE_S):
        await started.engine.stop()
    of_engine = [each for each in threading.enumerate() if each.name.startswith("trtllm") and each not in before]
    await until(lambda: not any(each.is_alive() for each in of_engine))


async def test_a_tokenizer_makes_prompts_or_reads_answers(started: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never both: two threads must not use one."""
    used: dict[str, list[ToyTokenizer]] = {"encode": [], "decode": []}
    for name, seen in used.items():
        method = getattr(ToyTokenizer, name)

        def noted(self: Any, *args: Any, _seen: Any = seen, _method: Any = method, **more: Any) -> Any:
            _seen.append(self)
            return _method(self, *args, **more)

        monkeypatch.setattr(ToyTokenizer, name, noted)
    await started.submit(ask())
    await started.finish("r")
    assert used["encode"] and used["decode"]
    assert not any(each is other for each in used["encode"] for other in used["decode"])
