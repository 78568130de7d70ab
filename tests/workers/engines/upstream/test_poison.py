"""Requests that break servers by their own fault: they end, and keep nobody from a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault
from flow import until
from upstream_bench import HELLO, bench

from penstock.engine import ChatTurn
from workers.engines.upstream import endpoints, pool
from workers.engines.upstream.continuation import MAX_KNOWN, BreakCounts, BrokenTexts, Rung
from workers.engines.upstream.engine import MAX_BREAKS, MAX_RESTARTS

pytestmark = pytest.mark.slow

POISON = (ChatTurn("user", "poison"),)


class Poisoned(FakeUpstream):
    """Has one fault for one prompt, and serves all others."""

    def __init__(self, fault: Fault, kind: str = "vllm", **more: Any) -> None:
        super().__init__(kind, **more)
        self.fault = fault
        self.poisons = 0

    def _fault(self, body: dict[str, Any]) -> Fault:
        if any("poison" in str(each["content"]) for each in body.get("messages", ())):
            self.poisons += 1
            return self.fault
        return super()._fault(body)


@pytest.fixture(autouse=True)
def _opens_briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(endpoints, "MAX_OPEN_S", 0.3)
    monkeypatch.setattr(endpoints, "MIN_OPEN_S", 0.3)
    monkeypatch.setattr(endpoints, "PROBE_INTERVAL_S", 0.3)
    yield


async def test_requests_of_another_tenant_are_served_beside_it() -> None:
    """While the server gives tokens to others, no failure of one prompt takes it away from them."""
    fake = Poisoned(Fault(status=500), step_s=0.02)
    async with bench(fake) as desk:
        bob = asyncio.create_task(desk.ask(HELLO, max_tokens=70))
        await until(lambda: desk.steps)
        poisons = [desk.ask((ChatTurn("user", f"poison {number}"),), max_tokens=5) for number in range(3)]
        for poison in await asyncio.wait_for(asyncio.gather(*poisons), 15):
            assert poison.failure is not None and poison.returns == 0
            assert (poison.failure.code, poison.failure.status) == ("upstream_error", 502)
        assert (await bob).text == "".join(ANSWER[:70])
    assert fake.poisons == 3 * MAX_BREAKS


@pytest.mark.parametrize("after", [0, 3])
async def test_a_reply_that_cannot_be_read_takes_no_server_away(after: int) -> None:
    """Nor does it end in a wait: the server is there."""
    fake = Poisoned(Fault(after=after, data=b"data: ?\n\n"))
    async with bench(fake) as desk:
        (endpoint,) = desk.engine._own.endpoints
        poison = asyncio.create_task(desk.ask(POISON, max_tokens=20))
        while not poison.done():
            assert endpoint.breaker.closed
            await asyncio.sleep(0)
        answer = await poison
    assert answer.returns == 0 and bool(answer.failure) == (after == 0)


LATER = (("Retry-After", "600"),)
REFUSALS = {
    "a key": Fault(status=401),
    "a limit": Fault(status=429, headers=LATER),
    "no room": Fault(status=503, headers=LATER),
    "a limit, in the stream": Fault(data=b'data: {"error":{"message":"slow down","code":429}}\n\n'),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_server_that_refuses_one_request_gets_the_others(kind: str) -> None:
    """The refused one waits, as it is told; it may be the only one that is refused."""
    fake = Poisoned(REFUSALS[kind])
    async with bench(fake) as desk:
        poison = asyncio.create_task(desk.ask(POISON, max_tokens=5))
        await until(lambda: fake.poisons)
        for _ in range(3):
            assert (await asyncio.wait_for(desk.ask(HELLO, max_tokens=5), 30)).text == "".join(ANSWER[:5])
        assert desk.engine.stats().accepts and not poison.done()


@pytest.mark.parametrize("kind", REFUSALS)
async def test_a_server_that_refuses_two_requests_gets_no_more(kind: str) -> None:
    fake = Poisoned(REFUSALS[kind])
    async with bench(fake) as desk:
        poisons = [asyncio.create_task(desk.ask((ChatTurn("user", f"poison {n}"),), max_tokens=5)) for n in range(2)]
        await until(lambda: not desk.engine.stats().accepts)
        assert fake.poisons >= 2 and not any(each.done() for each in poisons)


async def test_a_request_that_is_too_large_for_a_limit_ends_at_once() -> None:
    said = b'{"error":{"message":"Request too large for m on tokens per min (TPM): Limit 30, Requested 41"}}'
    async with bench(Poisoned(Fault(status=429, body=said))) as desk:
        answer = await asyncio.wait_for(desk.ask(POISON, max_tokens=5), 30)
    assert answer.failure is not None and answer.failure.status == 400 and "Limit 30" in answer.failure.message


async def test_a_refusal_shows_that_a_server_is_there() -> None:
    """Failures around it are not in a row."""
    faults = [Fault(status=500), Fault(status=500), Fault(status=400), Fault(status=500), Fault(status=500)]
    async with bench(FakeUpstream("vllm", faults)) as desk:
        answers = [await desk.ask(HELLO, max_tokens=5) for _ in range(2)]
    assert [bool(answer.failure) for answer in answers] == [True, False]
    assert [answer.returns for answer in answers] == [0, 0]


async def test_an_answer_that_must_always_begin_again_ends() -> None:
    """No server continues JSON, and the only one cuts each answer."""
    fake = Poisoned(Fault(after=3, data=b"data: ?\n\n"))
    async with bench(fake) as desk:
        answer = await asyncio.wait_for(desk.ask(POISON, max_tokens=50, json_schema={"type": "object"}), 15)
    assert answer.failure is not None and answer.failure.status == 502
    assert MAX_RESTARTS < fake.poisons <= MAX_RESTARTS + 2


async def test_a_server_that_takes_no_connection_costs_a_request_nothing() -> None:
    """However often it is away."""
    fake = FakeUpstream("vllm", [Fault(reset=True)] * (MAX_BREAKS - 1))
    async with bench(fake) as desk:
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=5))
        (endpoint,) = desk.engine._own.endpoints
        for _ in range(MAX_BREAKS):
            await fake.stop()
            endpoint.breaker.succeed()  # it is sent there, and finds no server
            await until(lambda: not endpoint.breaker.closed)
            await fake.start()
        answer = await asking
    assert answer.failure is None and answer.text == "".join(ANSWER[:5])


@pytest.mark.parametrize("begun", [False, True])
async def test_a_server_that_is_gone_behind_its_proxy_is_waited_for(begun: bool) -> None:
    """The proxy takes each connection and closes it: those of the request, or of calls that prepare the rest of its
    answer."""
    fake, taken = FakeUpstream("vllm", step_s=0.02), 0

    def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        writer.close()

    async with bench(fake) as desk:
        if not begun:
            await fake.stop()
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=20))
        await until(lambda: desk.steps or not begun)
        await fake.stop()
        proxy = await asyncio.start_server(close, "127.0.0.1", fake.port)
        await until(lambda: taken > MAX_BREAKS or asking.done())
        proxy.close()
        await proxy.wait_closed()
        await fake.start()
        answer = await asyncio.wait_for(asking, 15)
    assert answer.failure is None and answer.text == "".join(ANSWER[:20])


def test_counts_are_of_texts_that_wait() -> None:
    texts = BrokenTexts()
    for begins in (True, False):
        texts.keep("a", BreakCounts(1, shown=True, refused=frozenset([Rung.IDS])))
        found = texts.take("a", begins=begins)
        assert (found.breaks, found.restarts, bool(found.refused)) == (1, begins, not begins)
        assert texts.take("a", begins=True) == BreakCounts()
    for number in range(2 * MAX_KNOWN):
        texts.keep(str(number), BreakCounts(1))
    assert len(texts._known) == MAX_KNOWN and texts.take(str(2 * MAX_KNOWN - 1), begins=True).breaks == 1


# --- limits ----------------------------------------------------------------------------------------------------------

WORDS = b'{"error": {"message": "tokens per day are used up", "type": "rate_limit_error"}}'


@pytest.mark.parametrize("fault", [
    Fault(status=429, body=WORDS), Fault(status=429, headers=(("Retry-After", "3000"),), body=WORDS), Fault(status=401),
])  # fmt: skip
async def test_a_request_that_is_always_refused_because_of_a_limit_ends(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After refused_s, with what the server said, also if it asks to wait for longer; and without a flood of tries. A
    key that is refused for it alone is such a limit."""
    monkeypatch.setattr(pool, "HOLD_S", 0.5)
    fake = Poisoned(fault)
    async with bench(fake, refused_s=0.8) as desk:
        answer = await asyncio.wait_for(desk.ask(POISON, max_tokens=5), 15)
    assert answer.failure is not None and answer.returns == 0
    assert (answer.failure.code, answer.failure.status) == ("upstream_busy", 503)
    said = "HTTP 429: tokens per day are used up" if fault.status == 429 else "HTTP 401"
    assert said in answer.failure.message and fake.poisons <= 3


async def test_the_time_of_refusals_goes_on_over_returns_to_the_queue() -> None:
    """The server goes away and comes back meanwhile, so that the request is submitted again."""
    fake = Poisoned(Fault(status=429, body=WORDS))
    async with bench(fake, refused_s=1.5) as desk:
        asking = asyncio.create_task(desk.ask(POISON, max_tokens=5))
        await until(lambda: fake.poisons)
        (endpoint,) = desk.engine._own.endpoints
        endpoint.breaker.fail("it went away", time.monotonic(), "down")
        answer = await asyncio.wait_for(asking, 15)
    assert answer.failure is not None and answer.failure.code == "upstream_busy" and answer.returns > 0


async def test_a_token_between_two_refusals_begins_their_time_anew() -> None:
    """Each is shorter than refused_s, and the answer is whole."""
    limited = Fault(status=429, headers=(("Retry-After", "0.6"),))
    fake = FakeUpstream("vllm", [limited, Fault(after=5, cut=True), limited, Fault(after=5, cut=True), limited])
    async with bench(fake, refused_s=1.0) as desk:
        answer = await asyncio.wait_for(desk.ask(HELLO, max_tokens=40), 15)
    assert answer.failure is None and answer.text == "".join(ANSWER[:40]) and not fake.faults
