"""The engine `upstream` against fake servers: what it finds out, what it sends, what it endures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_upstream import ANSWER, FakeUpstream, Fault, serving
from flow import until
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from otlp_collector import Collector, attributes_of, collector
from upstream_bench import FAST, HELLO, Bench, asked_of, bench, rest

from penstock.config import ConfigError
from penstock.engine import EngineDead, Request, Sampling, Task
from penstock.tools import REASONING, TEXT
from telemetry.process import start_tracing
from workers.engines.upstream.generation import MAX_EXCESS_TOKENS
from workers.engines.upstream.http import MAX_LINE_BYTES, MAX_REPLY_BYTES, UpstreamClient, UpstreamConnection
from workers.engines.upstream.server import ServerProbe
from workers.engines.upstream.settings import UpstreamSettings

pytestmark = pytest.mark.slow

__all__ = ["collector"]  # a fixture


# --- what it finds out -----------------------------------------------------------------------------------------------

CARDS = {  # context, slots, json, logprobs, ids as prompts, raw texts
    "vllm": (2048, 16, True, 20, True, True),
    "sglang": (2048, 8, True, 20, True, True),
    "llama-server": (2048, 4, True, 20, True, True),
    "trtllm": (8192, 16, False, -1, True, True),
    "ollama": (8192, 16, True, -1, False, True),
    "openai": (8192, 16, True, 20, False, False),
    "other": (8192, 16, False, -1, False, True),
}


@pytest.mark.parametrize("kind", CARDS)
async def test_the_card_says_what_the_server_can_do(kind: str) -> None:
    """One fake for each kind."""
    async with bench(FakeUpstream(kind)) as desk:
        can = desk.card.capabilities
        found = (desk.card.context, desk.engine.stats().slots, can.json_schema, can.logprobs, can.token_prompts)
        assert (*found, can.text_prompts) == CARDS[kind]


async def test_a_mixed_pool_can_what_all_can() -> None:
    async with bench(FakeUpstream("vllm"), FakeUpstream("trtllm")) as desk:
        await until(lambda: len(desk.engine._own.ready) == 2)
        can = desk.card.capabilities
        assert (desk.card.context, can.json_schema, can.logprobs) == (2048, False, -1)


UNUSABLE: list[tuple[FakeUpstream, dict[str, Any], str]] = [
    (FakeUpstream("vllm", key="k"), {}, "needs an API key"),
    (FakeUpstream("vllm"), {"name": "another"}, "it has no model 'another': set options.name to one of fake-model"),
]


@pytest.mark.parametrize(("fake", "settings", "said"), UNUSABLE)
async def test_what_only_settings_change_ends_the_start(
    fake: FakeUpstream, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineDead, match=said):
        async with bench(fake, **settings):
            pass


def _settings(url: str, **more: Any) -> UpstreamSettings:
    return UpstreamSettings(**(FAST | {"urls": (url,)} | more))  # type: ignore[arg-type]


# --- continuing ------------------------------------------------------------------------------------------------------


SHOWN = f"{REASONING}{''.join(f' r{number}' for number in range(6))}{TEXT}"
REASONED: dict[str, tuple[Fault, dict[str, Any], str, int]] = {  # how it breaks, what is asked, in front, restarts
    "hidden": (Fault(after=10, cut=True), {}, "", 1),
    "shown": (Fault(after=10, cut=True), {"reasoning": "low"}, SHOWN, 1),
    "shown, replayed": (Fault(after=10, cut=True), {"reasoning": "low", "temperature": 0}, SHOWN, 0),
    "cut before any text, replayed": (Fault(cut=True), {"temperature": 0}, "", 0),
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("case", REASONED)
async def test_reasoning_is_counted_once_and_never_spliced(kind: str, case: str) -> None:
    """A cut in or after it gives the whole answer of one reply, replayed or begun again, and the server is told the
    effort. Nobody who did not ask for it is shown it."""
    fault, asked, shown, restarts = REASONED[case]
    fake = FakeUpstream(kind, [fault])
    fake.hidden = 6
    answer = await asked_of(fake, max_tokens=50, **asked)
    assert (answer.text, answer.tokens, answer.restarts) == (shown + "".join(ANSWER[:50]), 56, restarts)
    assert all("continue_final_message" not in sent.body and not sent.continues for sent in fake.sent)
    assert not shown or all(sent.body["reasoning_effort"] == "low" for sent in fake.sent)


async def test_a_replay_that_differs_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once, and shows nothing of the other text."""
    fake, other = FakeUpstream("other", [Fault(after=30, cut=True)]), [*ANSWER[:20], " other", *ANSWER[21:]]
    complete = fake._complete

    async def differently(*args: Any) -> bool:
        if len(fake.sent) == 2:
            monkeypatch.setattr("fake_upstream.ANSWER", other)
        return await complete(*args)

    fake._complete = differently  # type: ignore[method-assign]
    answer = await asked_of(fake, max_tokens=60, temperature=0)
    assert answer.restarts == 1 and answer.text == "".join(other[:60])
    assert len(fake.sent) == 3


async def test_ids_that_are_ahead_of_the_text_are_not_continued() -> None:
    """Chunks of several tokens: the server's own decoder is asked whether the ids give the text that was shown."""
    fake = FakeUpstream("vllm", [Fault(after=20, cut=True)])
    fake.batch = 5
    async with bench(fake) as desk:
        answer = await desk.ask(HELLO, max_tokens=60)
        assert (answer.text, answer.restarts) == ("".join(ANSWER[:60]), 0) and "prompt" in fake.sent[1].body
        fake.faults.append(Fault(after=20, cut=True))
        fake._page = _with_other_text(fake._page)  # type: ignore[method-assign]
        answer = await desk.ask(HELLO, max_tokens=60)
    assert (answer.text, answer.restarts) == ("".join(ANSWER[:60]), 0)
    assert fake.sent[3].body["continue_final_message"] is True


def _with_other_text(page: Any) -> Any:
    return lambda path, body: {"prompt": "another text"} if path == "/detokenize" else page(path, body)


async def test_a_stop_string_over_a_break_is_found() -> None:
    fake = FakeUpstream("vllm", [Fault(after=21, cut=True)])
    answer = await asked_of(fake, max_tokens=60, stop=("20 w21 w2",))
    assert (answer.text, answer.finish) == ("".join(ANSWER[:20]) + " w", "stop")
    assert all("stop" not in sent.body for sent in fake.sent)


@pytest.mark.parametrize(("stop", "requests"), [("w20 w21 w2", 1), ("w19 w20", 0)])
async def test_a_stop_string_that_another_engine_has_begun_to_show_is_found(stop: str, requests: int) -> None:
    """What is shown cannot be taken back; nothing of the rest is shown. With all of it there, no server is asked."""
    past, fake = [(text, (1000 + number,), 1) for number, text in enumerate(ANSWER[:21])], FakeUpstream("vllm")
    async with bench(fake) as desk:
        pieces = await rest(desk.begin(Request("r", HELLO, Sampling(max_tokens=60, stop=(stop,)), past)))
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish, len(fake.sent)) == ("", "stop", requests)


async def test_no_id_is_logged_before_its_text() -> None:
    """The cut comes between the id and the text of a token: the next server computes it once more, and it counts
    once."""
    fake = FakeUpstream("vllm", [Fault(after=21, cut=True)])
    fake.late = 20
    answer = await asked_of(fake, max_tokens=60)
    assert (answer.text, answer.tokens, answer.restarts) == ("".join(ANSWER[:60]), 60, 0)
    assert all(piece.text for piece in answer.pieces if piece.ids or piece.n)
    assert fake.sent[1].body["prompt"][-1] == 1019 and fake.sent[1].body["max_tokens"] == 40


# --- time ------------------------------------------------------------------------------------------------------------


async def test_a_server_that_can_do_less_than_the_others_gets_nothing() -> None:
    """It was away when the card was made, so nobody was told what it lacks. It is asked again: once it can do the same,
    it gets requests."""
    good, poor = FakeUpstream("vllm"), FakeUpstream("trtllm")
    async with serving(poor):
        pass
    async with serving(good):
        desk = Bench(_settings(good.url, urls=(good.url, poor.url)))
        await desk.start()
        async with serving(poor):
            await until(lambda: any("lacks" in each for each in desk.engine._own.away()))
            await asyncio.gather(*(desk.ask(HELLO, max_tokens=5) for _ in range(4)))
            assert (len(good.sent), len(poor.sent)) == (4, 0)
            poor.kind = "vllm"
            await until(lambda: not desk.engine._own.away())
            await asyncio.gather(*(desk.ask(HELLO, max_tokens=5) for _ in range(4)))
        await desk.engine.stop()
    assert poor.sent


async def test_no_log_repeats_what_a_server_says(caplog: pytest.LogCaptureFixture) -> None:
    """It may repeat the prompt; the job's owner gets its words."""
    caplog.set_level(logging.DEBUG)
    echo = b'{"error": {"message": "canary", "code": 500}}'
    frame = Fault(after=2, data=b"data: " + echo + b"\n\n")
    refusal = Fault(status=422, body=b'{"detail": "canary"}')
    fake = FakeUpstream("vllm", [Fault(status=500, body=echo), frame, refusal, refusal, refusal])
    failed = await asked_of(fake, max_tokens=5)
    assert failed.failure is not None and "canary" in failed.failure.message and failed.failure.status == 422
    assert "canary" not in caplog.text


# --- leaving ---------------------------------------------------------------------------------------------------------


async def test_a_place_that_comes_as_its_request_is_cancelled_goes_to_the_next() -> None:
    async with bench(FakeUpstream("vllm"), max_in_flight=1) as desk:
        pool = desk.engine._own
        place = await pool._wait(0.5, 1)
        cancelled, follows = (asyncio.create_task(pool._wait(0.5, 1)) for _ in range(2))
        await asyncio.sleep(0)
        assert place is not None and pool.running == 1
        pool._leave(place, 0)
        cancelled.cancel()  # it has the place, and has not seen it yet
        assert await asyncio.wait_for(follows, 30) is not None
        assert cancelled.cancelled() and pool.running == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_cancel_closes_the_connection(kind: str) -> None:
    """And calls abort where there is one. No conversation id is sent, with which llama-server would go on."""
    fake = FakeUpstream(kind, step_s=0.02)
    async with bench(fake) as desk:
        queue = desk.begin(Request("mine", HELLO, Sampling(max_tokens=80)))
        await queue.get()
        desk.engine.cancel("mine")
        desk.engine.cancel("mine")
        assert (await rest(queue))[-1].finish == "cancelled"
        await until(lambda: fake.running == 0)
        await until(lambda: fake.aborted == (["mine"] if kind == "sglang" else []))
    assert "x-conversation-id" not in fake.sent[0].headers


async def test_cancels_are_no_failures_of_the_server() -> None:
    """Also those that come while it renders a prompt."""
    fake = FakeUpstream("llama-server")
    answer = fake._answer

    async def slowly(writer: Any, method: str, path: str, *rest: Any) -> bool:
        rendering.set()
        await asyncio.sleep(30 if path == "/apply-template" else 0)
        return await answer(writer, method, path, *rest)

    async with bench(fake) as desk:
        fake._answer, rendering = slowly, asyncio.Event()  # type: ignore[method-assign]
        for name in "abcde":
            rendering.clear()
            queue = desk.begin(Request(name, HELLO, Sampling()))
            await rendering.wait()
            desk.engine.cancel(name)
            assert (await queue.get()).finish == "cancelled"
        assert desk.engine.stats().accepts and desk.engine.stats().running == 0


async def test_a_server_that_never_has_room_counts_as_away() -> None:
    """A gateway may say 503 for a server that is gone: the jobs go back, and to whom has room."""
    fake = FakeUpstream("vllm", [Fault(status=503, headers=(("retry-after-ms", "1"),))] * 8)
    answer = await asked_of(fake, max_tokens=5)
    assert answer.returns >= 1 and answer.text == "".join(ANSWER[:5])


async def test_a_request_whose_stale_connection_is_replaced_is_cancelled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has closed it, and takes no new one."""
    fake, connecting = FakeUpstream("vllm"), asyncio.Event()

    async def connected(_: UpstreamClient) -> UpstreamConnection:
        connecting.set()
        return await asyncio.get_running_loop().create_future()

    async with bench(fake) as desk:
        await desk.ask(HELLO, max_tokens=2)
        monkeypatch.setattr(UpstreamClient, "_connected", connected)
        fake.faults.append(Fault(reset=True))
        queue = desk.begin(Request("r", HELLO, Sampling(max_tokens=2)))
        async with asyncio.timeout(30):
            await connecting.wait()
            desk.engine.cancel("r")
            assert (await queue.get()).finish == "cancelled"
        assert desk.engine.stats().running == 0


async def test_a_request_that_waits_is_cancelled_at_once() -> None:
    fake = FakeUpstream("llama-server", step_s=0.02)
    fake.slots = 1
    async with bench(fake) as desk:
        running = desk.begin(Request("running", HELLO, Sampling()))
        await running.get()
        waiting = desk.begin(Request("waiting", HELLO, Sampling()))
        await until(lambda: desk.engine.stats().waiting == 1)
        desk.engine.cancel("waiting")
        assert (await asyncio.wait_for(waiting.get(), 30)).finish == "cancelled"
        assert fake.most_running == 1
        desk.engine.cancel("running")


# --- load ------------------------------------------------------------------------------------------------------------


async def test_waiting_requests_in_the_server_lower_the_budget() -> None:
    """Until its gauges show none."""
    fake = FakeUpstream("vllm", step_s=0.02)
    fake.waiting = 3
    async with bench(fake, gauges_s=0.02) as desk:
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=80))
        await until(lambda: desk.engine.stats().slots <= 1)
        fake.waiting = 0
        await until(lambda: desk.engine.stats().slots > 1)
        await asking


async def test_requests_go_to_the_server_that_runs_the_fewest() -> None:
    fakes = [FakeUpstream("vllm", step_s=0.005) for _ in range(3)]
    async with bench(*fakes) as desk:
        await asyncio.gather(*(desk.ask(HELLO, max_tokens=20) for _ in range(12)))
    assert [len(fake.sent) for fake in fakes] == [4, 4, 4]


async def test_the_most_urgent_request_goes_first() -> None:
    fake = FakeUpstream("llama-server")
    fake.slots = 1
    async with bench(fake) as desk:

        def ended() -> list[str]:
            return [piece.id for step in desk.steps for piece in step if piece.last]

        fake.open.clear()
        desk.begin(Request("first", HELLO, Sampling(max_tokens=5), priority=0.5))
        await until(lambda: fake.running == 1)
        for name, priority in (("batch", 0.2), ("standard", 0.5), ("chat", 0.8)):
            desk.begin(Request(name, HELLO, Sampling(max_tokens=2), priority=priority))
        fake.open.set()
        await until(lambda: len(ended()) == 4)
        assert ended() == ["first", "chat", "standard", "batch"]


async def test_chunks_of_one_read_are_one_piece() -> None:
    """Of many streams that are read in one turn of the event loop, one step."""
    fake = FakeUpstream("vllm")
    fake.burst = True
    async with bench(fake) as desk:
        answer = await desk.ask(HELLO, max_tokens=60)
        assert answer.text == "".join(ANSWER[:60]) and len(answer.pieces) == 2
        desk.steps.clear()
        await asyncio.gather(*(desk.ask(HELLO, max_tokens=60) for _ in range(16)))
        assert len(desk.steps) < sum(len(step) for step in desk.steps)


async def test_workers_share_a_server() -> None:
    """Each has an equal part of what it runs at once."""
    fake = FakeUpstream("llama-server", step_s=0.002)
    async with bench(fake) as desk:
        desk.engine.share(2)
        assert desk.engine.stats().slots == 2
        await asyncio.gather(*(desk.ask(HELLO, max_tokens=10) for _ in range(10)))
        assert fake.most_running == 2
        desk.engine.share(1)
        assert desk.engine.stats().slots == 4


async def test_tenants_have_salts_of_their_own() -> None:
    """The same in every request."""
    fake = FakeUpstream("vllm")
    async with bench(fake) as desk:
        for name, tenant in (("a", "one"), ("b", "two"), ("c", "one")):
            await rest(desk.begin(Request(name, HELLO, Sampling(max_tokens=2), tenant=tenant)))
    first, second, third = (sent.body["cache_salt"] for sent in fake.sent)
    assert first == third != second and "one" not in first


@pytest.mark.parametrize(("kind", "cached"), [("vllm", 2), ("sglang", 0), ("openai", 0)])
async def test_cached_tokens_are_told_only_where_tenants_are_told_apart(kind: str, cached: int) -> None:
    """Elsewhere the number would tell what others have asked."""
    async with bench(FakeUpstream(kind)) as desk:
        answer = await desk.ask(HELLO, max_tokens=2)
    assert answer.prompt_tokens == 3 and max(piece.cached_tokens for piece in answer.pieces) == cached


# --- keys and limits -------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("KEY_A", "sk-secret-one")
    monkeypatch.setenv("KEY_B", "sk-secret-two")
    return "KEY_A", "KEY_B"


async def test_keys_are_used_in_turn_and_shown_nowhere(keys: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Two keys of few requests each; no key is in a log, in the card or in the settings."""
    caplog.set_level(logging.DEBUG)
    fake = FakeUpstream("vllm", [Fault(after=3, cut=True), Fault(status=500)])
    fake.headers = {"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": "50"}
    async with bench(fake, key_env=keys) as desk:
        for _ in range(8):
            await desk.ask(HELLO, max_tokens=5)
        shown = f"{caplog.text}{desk.card}{vars(desk.engine._own)}{vars(desk.engine)}"
    used = Counter(sent.headers["authorization"] for sent in fake.sent)
    assert set(used) == {"Bearer sk-secret-one", "Bearer sk-secret-two"} and min(used.values()) >= 3
    assert "sk-secret" not in shown


async def test_a_key_that_is_refused_is_left_out(keys: tuple[str, str]) -> None:
    """The other one goes on."""
    fake = FakeUpstream("vllm", key="sk-secret-one")
    async with bench(fake, key_env=keys) as desk:
        fake.key = "sk-secret-two"
        for _ in range(4):
            answer = await desk.ask(HELLO, max_tokens=5)
            assert answer.failure is None and answer.text == "".join(ANSWER[:5])


async def test_a_key_that_is_not_set_is_a_mistake_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY_A", raising=False)
    with pytest.raises(ConfigError, match="the variable KEY_A is not set"):
        Bench(_settings("http://h/v1", key_env=("KEY_A",)))
    with pytest.raises(ValueError, match="names of environment variables"):
        _settings("http://h/v1", key_env=("sk-proj-1",))


async def test_servers_that_are_away_are_named_until_one_is_back() -> None:
    """With the reason in words, and for how long."""
    fake = FakeUpstream("vllm")
    async with bench(fake) as desk:
        assert (desk.engine.stats().away, desk.engine.stats().away_s) == ((), 0.0)
        await fake.stop()
        asking = asyncio.create_task(desk.ask(HELLO, max_tokens=5))
        await until(lambda: desk.engine.stats().away_s > 0.3)
        assert desk.engine.stats().away == (f"{fake.url} (connection refused)",)
        await fake.start()
        assert (await asking).failure is None
        await until(lambda: desk.engine.stats().away == ())
        assert desk.engine.stats().away_s == 0.0


# --- a server that lies ----------------------------------------------------------------------------------------------


def said(text: str) -> Fault:
    """A chunk of a chat, with more in it."""
    return Fault(data=b'data: {"choices":[{"index":0,"delta":{"content":"x"}' + text.encode("latin-1") + b"\n\n")


LIES = {
    "a line without an end": Fault(data=b"data: " + b"x" * (MAX_LINE_BYTES + 99)),
    "comments": Fault(data=b":\n" * (MAX_REPLY_BYTES // 2)),
    "a deep object": Fault(data=b"data: " + b'{"error":' * 5000 + b"\n\n"),
    "many ids": said(f',"token_ids":{json.dumps([7] * 10**5)}}}]}}'),
    "huge numbers": said('}],"usage":{"prompt_tokens":1e300,"completion_tokens":1e300}}'),
    "negative counts": said('}],"usage":{"completion_tokens":-9}}'),
    "no UTF-8": said(',"text":"\xff\xfe"}]}'),
    "a huge error": Fault(status=500, body=b"x" * 10**6),
    "a long header": Fault(status=500, headers=tuple((f"x-{n}-{'y' * 900}", "z") for n in range(100))),
    "no HTTP": Fault(status=99),
    "a digit that is no number": Fault(status=500, body='{"error": {"message": "m", "code": "\u00b2"}}'.encode()),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_server_hurts_no_worker(lie: str) -> None:
    """The request is continued or ends, the engine is well, and the next one is answered."""
    fake = FakeUpstream("vllm", [LIES[lie]])
    async with bench(fake) as desk:
        first = await desk.ask(HELLO, max_tokens=10)
        assert first.finish == "length" or first.failure is not None
        assert first.tokens <= 10 + MAX_EXCESS_TOKENS + 1
        assert desk.engine.health().ok
        fake.faults.clear()
        assert (await desk.ask(HELLO, max_tokens=10)).text == "".join(ANSWER[:10])
        assert desk.engine.stats().running == 0


async def test_an_answer_without_an_end_is_cut() -> None:
    """A server that ignores max_tokens."""
    fake = FakeUpstream("ollama")
    fake._refusal = lambda _path, body: body.pop("max_tokens", None) and None  # type: ignore[method-assign]
    many = [f" x{number}" for number in range(500)]
    async with bench(fake) as desk:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fake_upstream.ANSWER", many)
            answer = await desk.ask(HELLO, max_tokens=10)
    assert answer.finish == "length" and answer.tokens < 500


PAGES = {  # what stands in the place of the model list ("": a bug of ours), and what is said of it
    "without an end": ("x" * (MAX_REPLY_BYTES + 1), "a reply of more than"),
    "of brackets": ("[" * 100_000, "not that of an OpenAI-compatible server"),
    "that no code foresaw": ("", "its pages cannot be read (RecursionError)"),
}


@pytest.mark.parametrize("what", PAGES)
async def test_a_page_that_cannot_be_read_is_a_failed_probe(what: str) -> None:
    """Said as such, within bounds of memory and stack; the next probe finds the server well."""
    fake, page, phases = FakeUpstream("vllm"), FakeUpstream._page, list[str]()
    text, said = PAGES[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "_page", lambda path, body: (text if "models" in path else None) or page(fake, path, body))
        if not text:
            patch.setattr(ServerProbe, "facts", AsyncMock(side_effect=RecursionError))
        async with serving(fake):
            desk = Bench(_settings(fake.url))
            starting = asyncio.create_task(desk.engine.start(desk._on_step, phases.append))
            await until(lambda: any(said in phase for phase in phases))
            patch.undo()
            await starting
            assert (await desk.ask(HELLO, max_tokens=5)).text == "".join(ANSWER[:5])
            await desk.engine.stop()


async def test_the_key_reaches_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server repeats it in its errors."""
    monkeypatch.setenv("K", "sk-operator-42")
    said = json.dumps({"error": {"message": "headers: Bearer sk-operator-42", "param": "sk-operator-42"}}).encode()
    faults = [Fault(status=400, body=said), Fault(data=b"data: " + said.replace(b"{", b'{"code":400,', 1) + b"\n\n")]
    faults.append(Fault(finish="sk-operator-42"))
    caplog.set_level(logging.DEBUG)
    async with bench(FakeUpstream("vllm", faults, key="sk-operator-42"), key_env=("K",)) as desk:
        answers = [await desk.ask(HELLO, max_tokens=5) for _ in range(3)]
    assert answers[0].failure is not None and answers[0].failure.status == 400
    assert "sk-operator" not in str([answer.failure for answer in answers]) + caplog.text


@pytest.mark.parametrize("text", ["z", "z" * 60_000])
async def test_text_without_tokens_is_bounded(text: str) -> None:
    """A server may count wrongly, for itself or for us."""
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "token_ids": []}]}).encode()
    fake = FakeUpstream("vllm", [Fault(data=(b"data: " + chunk + b"\n\n") * 300)])
    async with bench(fake) as desk:
        answer = await asyncio.wait_for(desk.ask(HELLO, max_tokens=4), 10)
    assert answer.finish == "length" and len(fake.sent) == 1
    assert len(answer.text) <= max(300, (64 << 10) + 2 * len(text))


# --- traces ----------------------------------------------------------------------------------------------------------


async def test_each_call_is_a_span_of_its_operation_and_carries_it_on(collector: Collector) -> None:
    """One for each request to a server, under the attempt's; a server that fails has one that says so. Token ids are a
    text, not a conversation; a task is called like a text. Nothing that the server said is in a span, and no tracestate
    leaves the deployment."""
    tracing = start_tracing("worker", collector.url)
    attempt = tracing.enter("chat m", {"traceparent": "00-" + "4b" * 16 + "-" + "f0" * 8 + "-01", "tracestate": "a=b"})
    words = json.dumps({"error": {"message": "words of the server"}}).encode()
    fake = FakeUpstream("vllm", [Fault(status=500, body=words)])
    fake.vector = [0.5]
    asked: list[Any] = [{"prompt": HELLO}, {"prompt": "a"}, {"prompt": [1, 2]}]
    asked.append({"prompt": "", "task": Task(kind="embed"), "inputs": ("a",)})
    async with bench(fake) as desk:
        desk.engine.trace_calls(tracing)
        for number, each in enumerate(asked):
            trace = attempt.carrier()["traceparent"]
            await rest(desk.begin(Request(f"r{number}", sampling=Sampling(max_tokens=3), trace=trace, **each)))
    attempt.end()
    tracing.close()
    calls = [span for span in collector.sent if span.kind == SentSpan.SPAN_KIND_CLIENT]
    assert [attributes_of(call).get("error.type") for call in calls] == ["500", None, None, None, None]
    operations = [attributes_of(call)["gen_ai.operation.name"] for call in calls]
    assert operations == ["chat", "chat", "text_completion", "text_completion", "embeddings"]
    assert all(call.name.startswith(f"{name} ") for call, name in zip(calls, operations, strict=True))
    assert {call.parent_span_id.hex() for call in calls} == {attempt.span_id}
    assert [sent.headers.get("traceparent") for sent in fake.sent] == [
        f"00-{attempt.trace_id}-{call.span_id.hex()}-01" for call in calls
    ]
    assert not any("tracestate" in sent.headers for sent in fake.sent)
    known = attributes_of(calls[1])
    assert known["gen_ai.provider.name"] == "vllm" and known["server.address"] == "127.0.0.1"
    assert known["gen_ai.response.finish_reasons"] == ["length"]
    assert b"words of the server" not in b"".join(collector.received)


async def test_a_trace_that_is_not_recorded_is_passed_on_as_it_is() -> None:
    """So that a server that records it is not cut off; a request without one has no header."""
    fake, known = FakeUpstream("vllm"), "00-" + "4b" * 16 + "-" + "f0" * 8 + "-00"
    async with bench(fake) as desk:
        for number, trace in enumerate((known, "")):
            await rest(desk.begin(Request(f"r{number}", HELLO, Sampling(max_tokens=2), trace=trace)))
    assert [sent.headers.get("traceparent") for sent in fake.sent] == [known, None]
