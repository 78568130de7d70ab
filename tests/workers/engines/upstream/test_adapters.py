"""Adapters of upstream servers: by their names there, at servers that list them, and never at a fallback."""

from __future__ import annotations

import pytest
from fake_upstream import MODEL, FakeUpstream, Fault
from upstream_bench import HELLO, bench

from workers.engines.upstream import server

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


@pytest.mark.parametrize(("listed", "served"), [(("law-lora",), ("law",)), ((), ())])
async def test_an_adapter_that_no_server_lists_is_not_served(listed: tuple[str, ...], served: tuple[str, ...]) -> None:
    async with bench(fake_of(*listed), adapters=ADAPTERS) as desk:
        assert desk.card is not None and desk.card.adapters == served


async def test_servers_serve_what_all_of_them_list() -> None:
    """One that comes back without an adapter of the card gets no requests, and says which it lacks."""
    async with bench(fake_of("sql-lora", "law-lora"), fake_of("sql-lora"), adapters=ADAPTERS) as desk:
        card = desk.card
    assert card is not None and card.adapters == ("sql",)
    facts = server.of("vllm", names=(MODEL,), embed=True)
    assert "the adapter sql-lora" in server.lacking(card, facts, ADAPTERS)
    assert "adapter" not in server.lacking(card, server.of("vllm"), ADAPTERS), "it tells no names"


async def test_a_fallback_gets_no_request_with_an_adapter() -> None:
    """Which is of one model alone: the request waits for a server of its own."""
    own, other = fake_of("sql-lora", faults=(Fault(after=0, cut=True),) * 3), fake_of()
    async with bench(own, fallbacks={"other": other}, adapters={"sql": "sql-lora"}) as desk:
        answer = await desk.ask(HELLO, max_tokens=TOKENS, adapter="sql")
    assert not answer.failure and not answer.served_by
    assert not other.sent
