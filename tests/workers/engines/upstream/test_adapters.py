"""Adapters of upstream servers: by their names there, at servers that list them, and never at a fallback."""

from __future__ import annotations

import asyncio

import pytest
from fake_upstream import MODEL, FakeUpstream, Fault
from upstream_bench import HELLO, Bench, bench

ADAPTERS = {"sql": "sql-lora", "law": "law-lora"}
TOKENS = 40


def fake_of(*adapters: str, faults: tuple[Fault, ...] = ()) -> FakeUpstream:
    fake = FakeUpstream("vllm", [*faults])
    fake.adapters = adapters
    return fake


async def test_a_server_gets_the_adapters_name_as_the_model() -> None:
    """Also where it continues an answer; a request without an adapter gets the model's, found among the adapters."""
    fake = fake_of("sql-lora", "law-lora", faults=(Fault(after=20, cut=True),))
    async with bench(fake, adapters=ADAPTERS, name="") as desk:
        assert desk.card is not None and desk.card.adapters == ("sql", "law")
        for name in ("sql", "law", ""):
            assert not (await desk.ask(HELLO, max_tokens=TOKENS, adapter=name)).failure
    assert [sent.body["model"] for sent in fake.sent] == ["sql-lora", "sql-lora", "law-lora", MODEL]


@pytest.mark.parametrize("name", ["sql-lora", ""])
async def test_a_model_may_be_an_adapter_of_a_server(name: str) -> None:
    """Where options.name names it, or the model's own name does."""
    fake = fake_of("sql-lora", "m")
    async with bench(fake, name=name) as desk:
        assert not (await desk.ask(HELLO, max_tokens=TOKENS)).failure
    assert [sent.body["model"] for sent in fake.sent] == [name or "m"]


async def test_a_server_gets_requests_once_it_lists_all_adapters() -> None:
    """Until then it is away."""
    whole, late = fake_of("sql-lora", "law-lora"), fake_of("sql-lora")

    async def ask_both(desk: Bench) -> None:
        await asyncio.gather(*[desk.ask(HELLO, max_tokens=TOKENS, adapter="law") for _ in range(4)])

    async with bench(whole, late, adapters=ADAPTERS) as desk:
        assert desk.card is not None and desk.card.adapters == ("sql", "law")
        await ask_both(desk)
        assert (len(whole.sent), len(late.sent)) == (4, 0)
        late.adapters += ("law-lora",)
        while not late.sent:
            await ask_both(desk)
    assert late.sent[0].body["model"] == "law-lora"


async def test_a_fallback_does_not_hide_the_adapters() -> None:
    """A worker that starts while only a fallback is there serves them once its own server lists them."""
    own, other = fake_of(), fake_of()
    async with bench(own, fallbacks={"other": other}, adapters={"sql": "sql-lora"}, fallback_after_s=0.1) as desk:
        assert desk.card is not None and desk.card.adapters == ("sql",)
        own.adapters = ("sql-lora",)
        answer = await desk.ask(HELLO, max_tokens=TOKENS, adapter="sql")
    assert not answer.failure and not answer.served_by and not other.sent


async def test_a_fallback_gets_no_request_with_an_adapter() -> None:
    """Which is of one model alone: the request waits for a server of its own."""
    own, other = fake_of("sql-lora", faults=(Fault(after=0, cut=True),) * 3), fake_of()
    async with bench(own, fallbacks={"other": other}, adapters={"sql": "sql-lora"}) as desk:
        answer = await desk.ask(HELLO, max_tokens=TOKENS, adapter="sql")
    assert not answer.failure and not answer.served_by
    assert not other.sent
