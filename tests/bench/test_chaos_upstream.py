"""The upstream server of the fault rows: what it says by itself, how an answer continues there, and how it lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from bench.chaos import oracle
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.processes import until
from bench.chaos.upstream_server import AT_START, BREAKS, FIRST_ID, STALL, WORDS, UpstreamFault, UpstreamServer
from bench.ports import free_port

PROMPT = oracle.chat("p")
CHAT = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 4}


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    port = free_port()
    task = asyncio.create_task(UpstreamServer("vllm").serve(port))

    async def answers() -> bool:
        with suppress(Cut):
            await fetch(port, "GET", "/v1/models")
            return True
        return False

    await until(answers, 10)
    try:
        yield port
    finally:
        task.cancel()
        await asyncio.wait([task])


async def said(port: int, path: str, body: dict[str, Any]) -> tuple[list[int], str, list[int]]:
    """Numbers of the tokens of a reply, its finish reason, and its usage. Raises Cut."""
    exchange, texts, finish, usage = await Exchange.begin(port, "POST", path, msgspec.json.encode(body)), [], "", []
    try:
        await exchange.answer()
        if exchange.status != 200:
            return [], str(exchange.status), []
        async for block in exchange.blocks():
            if block.get("data", "[DONE]").startswith("{"):
                chunk = msgspec.json.decode(block["data"])
                for choice in chunk.get("choices", ()):
                    texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
                    finish = choice["finish_reason"] or finish
                    usage = list(chunk.get("usage", {}).values())
    finally:
        exchange.close()
    tokens = list(oracle.tokens(["".join(texts)]))
    assert all(oracle.is_right(PROMPT, token) for token in tokens)
    assert len({token.author for token in tokens}) <= 1
    return [token.number for token in tokens], finish, usage


async def test_an_answer_continues_by_ids_and_by_a_message() -> None:
    """After two tokens; the prompt then counts as two more."""
    given = oracle.plain(PROMPT, 0) + "ABCD" + oracle.plain(PROMPT, 1) + "EFGH"
    prefilled = {"messages": [*CHAT["messages"], {"role": "assistant", "content": given}], "max_tokens": 2}
    ids = [*map(ord, PROMPT), FIRST_ID, FIRST_ID + 1]
    size = oracle.prompt_tokens(PROMPT)
    async with serving() as port:
        assert await said(port, "/v1/chat/completions", CHAT) == ([0, 1, 2, 3], "length", [size, 4])
        assert await said(port, "/v1/chat/completions", prefilled) == ([2, 3], "length", [size + 2, 2])
        assert await said(port, "/v1/completions", {"prompt": ids, "max_tokens": 2}) == (
            [2, 3],
            "length",
            [size + 2, 2],
        )
        _, _, page = await fetch(port, "POST", "/tokenize", msgspec.json.encode(CHAT))
        assert msgspec.json.decode(page) == {"tokens": ids[:-2]}


@pytest.mark.parametrize("what", sorted([*WORDS, *BREAKS, *AT_START]))
async def test_a_reply_that_meets_a_fault_is_not_complete(what: str) -> None:
    """The next one is, and the fault was counted once."""
    fault = UpstreamFault(what=what, replies=1)
    async with serving() as port:
        await fetch(port, "POST", "/fault", msgspec.json.encode(fault))
        numbers: list[int] = []
        try:
            numbers, finish, _ = await said(port, "/v1/chat/completions", CHAT)
        except (Cut, msgspec.DecodeError):
            finish = "broken"
        assert finish != "length" and len(numbers) <= 1
        assert (await said(port, "/v1/chat/completions", CHAT))[1] == "length"
        _, _, page = await fetch(port, "POST", "/fault", msgspec.json.encode(UpstreamFault()))
        assert msgspec.json.decode(page) == {"met": 1}


async def test_a_stall_is_a_pause_of_a_whole_reply() -> None:
    async with serving() as port:
        await fetch(port, "POST", "/fault", msgspec.json.encode(UpstreamFault(what=STALL, replies=1, seconds=0.3)))
        began = asyncio.get_running_loop().time()
        assert (await said(port, "/v1/chat/completions", CHAT))[:2] == ([0, 1, 2, 3], "length")
        assert asyncio.get_running_loop().time() - began >= 0.3
