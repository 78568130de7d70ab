"""Reattachment: a generation that goes on at its server is read on, whoever read it before, and no other is begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from fake_upstream import Fault, serving
from flow import until
from keeping_upstream import NAMES, KeepingUpstream, told
from upstream_bench import FAST, HELLO, Bench, bench, rest

from penstock.engine import Piece, Request, Sampling
from penstock.tools import Call, Tool, Tools, read_answer
from workers.engines.upstream import pool
from workers.engines.upstream.settings import UpstreamSettings

pytestmark = pytest.mark.slow

KINDS = tuple(NAMES)
NUMBERS = count(100)
TOOLS = Tools(offered=(Tool("get_weather", "", {"type": "object", "properties": {}}),))
NAMED = {"index": 0, "id": "x1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
DELTAS: list[dict[str, Any]] = [
    {"content": "So "},
    {"tool_calls": [NAMED]},
    *({"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"ci', 'ty": ', '"Bern"', "}")),
]
CALLS = [Call("get_weather", '{"city": "Bern"}')]
SCHEMA: dict[str, Any] = {"type": "object"}
CASES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "once"},
    "chat": {"prompt": HELLO},
    "json": {"prompt": HELLO, "sampling": Sampling(max_tokens=50, json_schema=SCHEMA)},
    "reasoning": {"prompt": HELLO, "reasoning": "low"},
    "tools": {"prompt": HELLO, "tools": TOOLS},
    "penalties": {"prompt": "once", "sampling": Sampling(max_tokens=50, presence_penalty=0.5)},
}


def asked(number: int = 0, past: Any = (), begun_by: str = "a/1", **case: Any) -> Request:
    """Attempt `number` at one text, which is sampled: no second generation is the same."""
    given = {"prompt": "once", "sampling": Sampling(max_tokens=50), "text_id": "job/0"} | case
    return Request(f"r{number}", past=past, begun_by=begun_by, **given)


async def some(queue: asyncio.Queue[Piece], tokens: int) -> list[Piece]:
    """Its first pieces, with at least so many tokens."""
    pieces = list[Piece]()
    while sum(piece.n for piece in pieces) < tokens:
        pieces.append(await asyncio.wait_for(queue.get(), 10))
        assert not pieces[-1].last
    return pieces


def past_of(pieces: list[Piece]) -> list[Any]:
    return [(piece.text, piece.ids, piece.n) for piece in pieces]


def text_of(*parts: list[Piece]) -> str:
    return "".join([piece.text for part in parts for piece in part])


def kill(desk: Bench) -> None:
    """The worker dies: no call tells a server."""
    for running in desk.engine._live.values():
        running.task.cancel()


@asynccontextmanager
async def another(*fakes: KeepingUpstream) -> AsyncIterator[Bench]:
    """The engine of another worker."""
    desk = Bench(UpstreamSettings(**FAST, urls=tuple(fake.url for fake in fakes)))  # type: ignore[arg-type]
    await desk.start()
    try:
        yield desk
    finally:
        await desk.engine.stop()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
async def test_the_next_worker_reads_the_same_generation(kind: str, case: str) -> None:
    """Also what is never spliced: one generation gives the answer, each token once."""
    fake, tools = KeepingUpstream(kind), case == "tools"
    fake.deltas, fake.template = DELTAS if tools else [], "{{ tools }}</think>"
    fake.hidden = 6 if case == "reasoning" and kind == "penstock" else 0
    async with bench(fake) as first:
        first_pieces = await some(first.begin(asked(**CASES[case])), 2 if tools else 9)
        kill(first)
        async with another(fake) as second:
            request = asked(1, past_of(first_pieces), **CASES[case])
            assert second.engine.restart_reason(request) == ""
            rest_pieces = await rest(second.begin(request))
    pieces = [*first_pieces, *rest_pieces]
    assert (pieces[-1].finish, pieces[-1].failure) == ("stop" if tools else "length", None)
    assert len(fake.generations) == 1
    if tools:
        assert read_answer((text_of(pieces),))[:2] == ("So ", CALLS)
        return
    assert text_of(pieces).endswith(told(1, 0, 50)) and text_of(pieces).count("w0") == 1
    assert sum(piece.n for piece in pieces) == 50 + fake.hidden


@pytest.mark.parametrize("kind", KINDS)
async def test_a_broken_connection_is_followed_by_the_same_generation(kind: str) -> None:
    """Twice, and within one attempt."""
    fake = KeepingUpstream(kind, Fault(after=8), Fault(after=20))
    async with bench(fake) as desk:
        answer = await desk.ask(HELLO, max_tokens=50, json_schema=SCHEMA)
    assert (answer.text, answer.tokens, answer.finish) == (told(1, 0, 50), 50, "length")
    assert (len(fake.generations), answer.restarts, answer.returns) == (1, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_generation_that_is_gone_is_begun_again_or_continued(kind: str) -> None:
    """JSON begins again, and its reader is told; a text goes on by the next rung."""
    for schema, restarts in ((None, False), (SCHEMA, True)):
        fake = KeepingUpstream(kind)
        async with bench(fake) as first:
            pieces = await some(first.begin(asked(sampling=Sampling(max_tokens=50, json_schema=schema))), 9)
            kill(first)
            fake.lose()
            past = past_of(pieces)
            request = asked(1, past, sampling=Sampling(max_tokens=50, json_schema=schema))
            async with another(fake) as second:
                (*_, last) = ends = await rest(second.begin(request))
                assert last.finish == ("returned" if restarts else "length")
                assert bool(second.engine.restart_reason(request)) == restarts
                assert not restarts or not text_of(ends)


@pytest.mark.parametrize("kind", KINDS)
async def test_another_generation_is_no_continuation(kind: str) -> None:
    """What was shown is not its beginning, so it is stopped."""
    fake = KeepingUpstream(kind)
    async with bench(fake) as desk:
        await some(desk.begin(asked()), 9)
        kill(desk)
        strange = [(told(7, 0, 9), (), 9)]
        (*_, last) = pieces = await rest(desk.begin(asked(1, strange)))
        await until(lambda: fake.generations[0].stopped)
    assert told(1, 0, 1) not in text_of(pieces) and last.finish in ("length", "returned")


async def test_an_answer_that_begins_again_is_another_job_of_a_penstock() -> None:
    fake = KeepingUpstream("penstock")
    async with bench(fake) as desk:
        for number, run in enumerate(("a/1", "b/2")):
            assert text_of(await rest(desk.begin(asked(number, begun_by=run)))) == told(number + 1, 0, 50)


@pytest.mark.parametrize(
    ("kind", "turns"), [*((kind, None) for kind in KINDS), *(("llama-server", turns) for turns in range(4))]
)
async def test_a_cancelled_request_is_stopped_at_its_server(kind: str, turns: int | None) -> None:
    """Another worker had begun it and is gone. The next one reads it on, or has not come so far, however many turns of
    its loop it had."""
    fake = KeepingUpstream(kind, step_s=0.05)
    async with bench(fake) as desk:
        pieces = await some(desk.begin(asked()), 2)
        kill(desk)
        async with another(fake) as second:
            queue = second.begin(asked(1, past_of(pieces)))
            if turns is None:
                await some(queue, 2)
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            second.engine.cancel("r1")
            assert (await rest(queue))[-1].finish == "cancelled"
            await until(lambda: fake.generations[0].stopped)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_that_waits_for_its_server_is_stopped_there_too(kind: str) -> None:
    fake = KeepingUpstream(kind, Fault(after=8), step_s=0.05)
    async with bench(fake) as desk:
        queue = desk.begin(asked())
        await some(queue, 2)
        fake.faults.extend([Fault(status=500)] * 3)
        await until(lambda: desk.engine._live["r0"].counts.breaks >= 1)
        desk.engine.cancel("r0")
        assert (await rest(queue))[-1].finish == "cancelled"
        await until(lambda: fake.generations[0].stopped)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_leaves_stops_nothing(kind: str) -> None:
    """It hands its job over, and the next worker reads on. A cancel that follows changes nothing."""
    fake = KeepingUpstream(kind)
    async with bench(fake) as first:
        queue = first.begin(asked(**CASES["json"]))
        pieces = await some(queue, 9)
        first.engine.leave("r0")
        first.engine.cancel("r0")
        pieces += (await rest(queue))[:-1]
        await first.engine.stop()
        async with another(fake) as second:
            pieces += await rest(second.begin(asked(1, past_of(pieces), **CASES["json"])))
    assert text_of(pieces) == told(1, 0, 50) and len(fake.generations) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_leaves_stops_a_job_that_nobody_can_find(kind: str) -> None:
    """It has shown nothing, so the next worker begins another one. At a llama-server that one has the same name."""
    fake = KeepingUpstream(kind)
    fake.open.clear()
    async with bench(fake) as first:
        queue = first.begin(asked())
        replies = first.engine._own.endpoints[0].replies
        await until(lambda: "r0" in replies and replies["r0"].status == 200)
        first.engine.leave("r0")
        await rest(queue)
        async with another(fake) as second:
            queue = second.begin(asked(1, begun_by="b/1"))
            await until(lambda: len(fake.generations) == 2)
            await until(lambda: fake.generations[0].over)
            fake.open.set()
            assert text_of(await rest(queue)) == told(2, 0, 50)
    assert [each.stopped for each in fake.generations] == [kind == "penstock", kind == "llama-server"]


async def test_the_server_that_has_the_generation_is_found() -> None:
    """Of several, whichever runs the fewest requests."""
    fakes = [KeepingUpstream("llama-server") for _ in range(3)]
    async with bench(*fakes) as first:
        pieces = await some(first.begin(asked(**CASES["json"])), 9)
        kill(first)
        (has,) = [fake for fake in fakes if fake.generations]
        async with another(*[fake for fake in fakes if fake is not has], has) as second:
            pieces += await rest(second.begin(asked(1, past_of(pieces), **CASES["json"])))
    assert text_of(pieces) == told(1, 0, 50)
    assert sum(len(fake.generations) for fake in fakes) == 1


async def test_a_silent_generation_is_given_up_and_stopped() -> None:
    """It is continued at another server, as one that is lost."""
    silent, other = KeepingUpstream("llama-server", Fault(after=8, stall_s=60)), KeepingUpstream("llama-server")
    async with serving(other), bench(silent, between_tokens_s=0.3) as desk:
        pieces = await some(desk.begin(asked()), 6)
        await until(lambda: silent.generations[0].stopped)
        assert pieces and "r0" in desk.engine._live


async def test_a_reply_is_not_kept_once_it_was_read() -> None:
    """A llama-server would hold its bytes for minutes."""
    fake = KeepingUpstream("llama-server")
    async with bench(fake) as desk:
        await rest(desk.begin(asked()))
        await until(lambda: not fake.kept)


async def test_a_part_of_an_answer_is_kept_under_no_name() -> None:
    """Who read it from its beginning would take the middle of the answer for its begin."""
    fake = KeepingUpstream("llama-server")
    async with bench(fake) as desk:
        past = [(f" w{number}", (1000 + number,), 1) for number in range(9)]
        await rest(desk.begin(asked(1, past)))
    (sent,) = fake.sent
    assert sent.continues and NAMES["llama-server"] not in sent.headers


async def test_a_job_of_a_penstock_goes_on_for_its_reader_s_retry() -> None:
    fake = KeepingUpstream("penstock")
    async with bench(fake) as desk:
        await rest(desk.begin(asked()))
        assert desk.card is not None and desk.card.capabilities.logprobs == 5 and not desk.card.capabilities.top_k
    (sent,) = fake.sent
    assert sent.body["queue"] == {"on_disconnect": "grace:60"} and len(sent.headers["idempotency-key"]) == 64


async def test_jobs_that_ended_at_a_penstock_are_continued_and_no_fault_of_it() -> None:
    """As those of a worker that preempts batch jobs: their keys lead to what is cancelled, each time."""
    fake, numbers = KeepingUpstream("penstock", step_s=0.2), range(4)
    async with bench(fake) as desk:
        begun = [desk.begin(asked(each, text_id=f"job{each}/0")) for each in numbers]
        pieces = [await some(queue, 2) for queue in begun]
        for each in numbers:
            desk.engine.cancel(f"r{each}")
        await until(lambda: all(each.stopped for each in fake.generations) and not desk.engine._live)
        fake.step_s = 0.0
        queues = [desk.begin(asked(10 + each, past_of(pieces[each]), text_id=f"job{each}/0")) for each in numbers]
        for queue in queues:
            assert (await rest(queue))[-1].finish == "length"
        assert len(fake.sent) == 3 * len(numbers)
        assert desk.engine._own.ready and desk.engine._own.endpoints[0].breaker._failures == 0


async def test_a_job_that_failed_at_a_penstock_is_no_answer_to_a_second_try() -> None:
    """Its key leads to the failed one for as long as that is kept."""
    fake = KeepingUpstream("penstock")
    async with bench(fake) as desk:
        fake.failing = 1
        answer = await desk.ask("once", max_tokens=50)
    assert (answer.finish, answer.failure, answer.restarts) == ("length", None, 0)
    assert len(fake.generations) == 2 and "idempotency-key" not in fake.sent[-1].headers


async def test_a_server_that_has_no_room_for_its_reader_is_left_alone_for_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one of several, where the generation goes on."""
    monkeypatch.setattr(pool, "HOLD_S", 0.0)  # one that did not say it would be asked again at once
    busy = Fault(status=429, headers=(("retry-after", "1"),))
    fakes = [KeepingUpstream("penstock", step_s=0.02) for _ in range(2)]
    async with bench(*fakes) as desk:
        for fake in fakes:
            fake.faults.extend([Fault(after=8), busy])
        queue = desk.begin(asked())
        assert (await rest(queue))[-1].finish == "length"
    others, (_, refused, last) = sorted([fake.sent for fake in fakes], key=len)
    assert not others and last.at - refused.at > 0.9
    assert sum(len(fake.generations) for fake in fakes) == 1


async def test_a_penstock_that_has_just_started_can_what_it_could() -> None:
    """Its API process does not know its models' cards yet."""
    fake = KeepingUpstream("penstock")
    async with bench(fake) as desk:
        await fake.stop()
        await until(lambda: not desk.engine._own.ready or desk.begin(asked(next(NUMBERS))))
        fake.capabilities = None  # type: ignore[assignment]
        await fake.start()
        await until(lambda: desk.engine._own.ready)
        (endpoint,) = desk.engine._own.endpoints
        assert endpoint.facts is not None and endpoint.facts.json_schema and endpoint.ready
