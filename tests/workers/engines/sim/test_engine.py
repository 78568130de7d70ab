"""The simulated engine: text, time model, slots, cache policies, faults."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from engine_desk import EngineDesk

from penstock.engine import ChatTurn, Piece, Refused, Request, Sampling, Task
from penstock.tools import Tool, Tools, read_answer
from workers.engines.sim.answers import count_tokens, token_text
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings, card_of
from workers.json_check import check


class Bench:
    """An engine and all its steps."""

    def __init__(self, settings: SimSettings) -> None:
        self.engine, self.steps = SimEngine("m", settings), []
        self._news = asyncio.Event()

    def on_step(self, pieces: list[Piece]) -> None:
        self.steps.append(pieces)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looked at in each step."""
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_ended(self, *ids: str) -> dict[str, list[Piece]]:
        await self.until(lambda: set(ids) <= {piece.id for piece in self.pieces() if piece.last})
        by_id: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces():
            by_id[piece.id].append(piece)
        return by_id

    async def until_step(self, number: int) -> None:
        await self.until(lambda: len(self.steps) >= number)

    def pieces(self) -> list[Piece]:
        return [piece for step in self.steps for piece in step]


Start = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    benches: list[Bench] = []

    async def begin(**settings: object) -> Bench:
        bench = Bench(SimSettings(**{"step_ms": 1, "prefill_ms": 0, **settings}))  # type: ignore[arg-type]
        await bench.engine.start(bench.on_step, lambda _: None)
        benches.append(bench)
        return bench

    yield begin
    for bench in benches:
        await bench.engine.stop()


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def expected(prompt: str, tokens: int) -> str:
    return "".join(token_text(prompt, index) for index in range(tokens))


async def test_further_sampling_shows_in_the_text(start: Start) -> None:
    """Each field and value gives another text, and a continuation gives the rest of the same one."""
    bench = await start()
    fields = [
        {}, {"top_k": 0}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 2.0}},
        {"logit_bias": {1: 3.0}},
    ]  # fmt: skip
    for number, asked in enumerate(fields):
        bench.engine.submit(Request(str(number), "p", Sampling(max_tokens=8, **asked)))
    texts = [text(found) for found in (await bench.until_ended(*map(str, range(len(fields))))).values()]
    assert len(set(texts)) == len(fields) and expected("p", 8) in texts
    past = ((token_text("p", 0), (), 1),)
    bench.engine.submit(Request("r", "p", Sampling(max_tokens=8, top_k=5), past))
    whole = text([piece for piece in bench.pieces() if piece.id == "2"])
    assert whole.endswith(text((await bench.until_ended("r"))["r"]))


async def test_the_card_tells_the_context_that_the_cache_holds(start: Start) -> None:
    """What it refuses by: the lesser of context and cache."""
    bench = await start(context=100, kv_tokens=60)
    for settings, context in ((SimSettings(context=100, kv_tokens=60), 60), (SimSettings(context=100), 100)):
        card = card_of("m", settings)
        assert (card.context, card.max_output) == (context, context - 1)
    prompt = "x" * 40
    await bench.engine.check(Request("r", prompt, Sampling(max_tokens=60 - count_tokens(prompt))))
    with pytest.raises(Refused, match="context is 60 tokens"):
        await bench.engine.check(Request("r", prompt, Sampling(max_tokens=61 - count_tokens(prompt))))


async def test_without_eviction_only_what_fits_for_good_is_begun(start: Start) -> None:
    """GUARANTEED_NO_EVICT reserves prompt and answer: the second waits until the first has ended."""
    prompt = "x" * 40
    each = count_tokens(prompt) + 20
    bench = await start(kv_tokens=each + 5, kv_policy="GUARANTEED_NO_EVICT")
    for name in "ab":
        bench.engine.submit(Request(name, prompt, Sampling(max_tokens=20)))
    await bench.until_ended("a", "b")
    assert [piece.id for piece in bench.pieces()] == ["a"] * 20 + ["b"] * 20


async def test_with_full_use_the_youngest_is_evicted_and_comes_back(start: Start) -> None:
    """MAX_UTILIZATION begins both, evicts one when the cache is full, and its text is still exact."""
    prompt = "x" * 40
    each = count_tokens(prompt) + 20
    bench = await start(kv_tokens=each + 15, kv_policy="MAX_UTILIZATION")
    for name in "ab":
        bench.engine.submit(Request(name, prompt, Sampling(max_tokens=20)))
    by_id = await bench.until_ended("a", "b")
    order = "".join(piece.id for piece in bench.pieces())
    stats = bench.engine.stats()
    assert (stats.evicts, stats.evictions) == (True, 1)
    assert order.startswith("ab") and order.rstrip("b").endswith("a" * 2), "b pauses while a goes on alone"
    assert text(by_id["a"]) == text(by_id["b"]) == expected(prompt, 20)


async def test_cancel_frees_the_slot_in_a_step(start: Start) -> None:
    """Running or waiting: the next step ends it, the last piece says cancelled, and the one after it begins in the step
    behind. A second cancel does no harm."""
    bench = await start(slots=1)
    for name in "abc":
        bench.engine.submit(Request(name, name, Sampling(max_tokens=5000 if name < "c" else 1)))
    await bench.until_step(3)
    before = bench.engine.stats().steps
    for name in "abab":
        bench.engine.cancel(name)
    by_id = await bench.until_ended(*"abc")
    assert [by_id[name][-1].finish for name in "abc"] == ["cancelled", "cancelled", "length"]
    assert {piece.id for piece in bench.steps[-2]} == {"a", "b"}
    assert bench.engine.stats().steps == before + 2
    assert bench.engine.stats().running == bench.engine.stats().waiting == 0


async def test_nothing_of_it_goes_on_once_it_has_stopped(start: Start) -> None:
    """Also where it is stopped in the middle of a text."""
    before = asyncio.all_tasks()
    bench = await start()
    bench.engine.submit(Request("a", "a", Sampling(max_tokens=5000)))
    assert asyncio.all_tasks() > before
    await bench.engine.stop()
    assert asyncio.all_tasks() == before and not bench.engine.health().ok


async def test_faults_need_to_be_allowed(start: Start) -> None:
    """The words do nothing in an engine that serves people; where allowed, one request fails and the others live."""
    tame, wild = await start(), await start(faults=True)
    for bench in (tame, wild):
        bench.engine.submit(Request("a", "[[fail@2]]", Sampling(max_tokens=4)))
        bench.engine.submit(Request("b", "b", Sampling(max_tokens=4)))
    assert text((await tame.until_ended("a", "b"))["a"]) == expected("[[fail@2]]", 4)
    by_id = await wild.until_ended("a", "b")
    assert by_id["a"][-1].failure is not None and text(by_id["b"]) == expected("b", 4)


async def test_it_says_when_it_first_ran_a_request(start: Start) -> None:
    """With the last piece. One that waits for a slot is scheduled when it gets it, long after the first."""
    bench = await start(slots=1, step_ms=2)
    for name in ("first", "second"):
        bench.engine.submit(Request(name, name, Sampling(max_tokens=20)))
    ended = await bench.until_ended("first", "second")
    first, second = ended["first"][-1].times, ended["second"][-1].times
    assert first is not None and second is not None and second.scheduled - first.scheduled >= 0.036
    assert all(piece.times is None for pieces in ended.values() for piece in pieces[:-1])


async def test_a_prefill_of_one_step_is_done_with_the_next_step(start: Start) -> None:
    """However late the step came that it waited for; an idle engine begins it at once."""
    bench = await start(step_ms=4, prefill_ms=4)
    bench.engine.submit(Request("long", "long", Sampling(max_tokens=200)))
    begun = []
    for number in range(1, 21):
        await bench.until_step(len(bench.steps) + 1)
        bench.engine.submit(Request(str(number), "p", Sampling(max_tokens=1)))
        begun.append(len(bench.steps))
        if number % 2:
            time.sleep(0.002)  # the next step is late, the one after it is not
    await bench.until_ended(*map(str, range(1, 21)))
    steps = {piece.id: at for at, step in enumerate(bench.steps) for piece in step}
    assert [steps[str(number)] - at for number, at in enumerate(begun, 1)] == [1] * 20


async def test_with_authors_each_token_is_signed_by_the_run_that_gave_it(start: Start) -> None:
    """Four capital letters, the same in one run and others in the next one; the words do not change."""
    bench = await start(authors=True)
    signs = []
    for name in ("a", "b"):
        bench.engine.submit(Request(name, "p", Sampling(max_tokens=3)))
        pieces = (await bench.until_ended(name))[name]
        texts = [piece.text for piece in pieces if piece.n]
        assert [each[:-4] for each in texts] == [token_text("p", number) for number in range(3)]
        (sign,) = {each[-4:] for each in texts}
        assert sign.isupper()
        signs.append(sign)
    assert signs[0] != signs[1]  # by chance alike once in half a million runs


class Clocked(SimEngine):
    """Notes how long each step was to take, in milliseconds."""

    def __init__(self, settings: SimSettings) -> None:
        super().__init__("m", settings)
        self.steps_ms: list[float] = []

    def _step_s(self, now: float) -> float:
        seconds = super()._step_s(now)
        self.steps_ms.append(round(1000 * seconds, 6))
        return seconds


async def stepped(settings: SimSettings, *requests: Request) -> tuple[list[float], list[list[str]]]:
    """How long each step took, and whose tokens came in it."""
    engine = Clocked(settings)
    given: list[list[str]] = []
    ended = asyncio.Event()

    def on_step(pieces: list[Piece]) -> None:
        given.append([piece.id for piece in pieces])
        if pieces[-1].id == requests[-1].id and pieces[-1].last:
            ended.set()

    await engine.start(on_step, lambda _: None)
    try:
        for request in requests:
            engine.submit(request)
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        await engine.stop()
    return engine.steps_ms, given


def asked(*texts: tuple[str, int]) -> list[Request]:
    """A request for each prompt, with so many tokens."""
    return [Request(name, text, Sampling(max_tokens=count)) for name, (text, count) in zip("abc", texts, strict=False)]


@pytest.mark.parametrize(("settings", "texts", "steps_ms"), [
    # Prompts in portions, the oldest first; whoever already writes waits for each: 20, 20, then 10 and all 10 of b.
    ({"prefill_ms_per_1k_tokens": 100, "prefill_batch": 20}, [("x" * 200, 2), ("y" * 40, 3)], [3, 3, 3, 1]),
    ({"step_ms_per_text": 2}, [("a", 1), ("b", 1), ("c", 3)], [7, 3, 3]),
    ({}, [("a", 1), ("b", 1), ("c", 3)], [1, 1, 1]),
    # A fault makes each step behind it longer, for all texts: the scheduler replaces a worker for that.
    ({"faults": True}, [("[[slow@1]]", 4)], [1, 1, 5, 5]),
    # What is cached of a prompt costs no prefill.
    ({"prefill_ms_per_1k_tokens": 100, "slots": 1, "cache_prompts": 4}, [("x" * 400, 1)] * 2, [11, 1]),
], ids=["prompts", "texts", "fixed", "fault", "cache"])  # fmt: skip
async def test_what_a_step_costs(settings: dict[str, Any], texts: list[tuple[str, int]], steps_ms: list[float]) -> None:
    found, given = await stepped(SimSettings(**{"step_ms": 1, "prefill_ms": 0, "slots": 4} | settings), *asked(*texts))
    assert found[: len(steps_ms)] == steps_ms
    if "prefill_batch" in settings:
        assert given == [["a", "b"], ["a", "b"], ["b"]]


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
async def test_the_inputs_of_a_task_are_computed_one_after_another(start: Start, policy: str) -> None:
    """Together they may be larger than the cache, which holds one at a time, also one as large as itself."""
    bench = await start(kv_tokens=50, kv_policy=policy)
    rows = tuple(tuple(range(size)) for size in (40, 40, 50, 30))
    bench.engine.submit(Request("a", "", Sampling(), task=Task(kind="embed"), inputs=rows))
    bench.engine.submit(Request("b", "", Sampling(), task=Task(kind="embed"), inputs=rows[:2]))
    ended = await bench.until_ended("a", "b")
    assert [ended[each][-1].finish for each in "ab"] == ["stop", "stop"]
    assert (ended["a"][-1].prompt_tokens, ended["b"][-1].prompt_tokens) == (160, 80)


OBJECT = {"type": "object", "additionalProperties": False}
POINTING: dict[str, dict[str, Any]] = {
    "a place": OBJECT | {"properties": {"a": {"anyOf": [{"const": 1}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}},
    "the root": OBJECT | {"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    "a list of itself": OBJECT | {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    "a chain": OBJECT | {"properties": {"a": {"$ref": "#/definitions/N"}}, "definitions": {
        "N": {"$ref": "#/definitions/M"}, "M": {"const": 2}}},
    "an anchor": OBJECT | {"properties": {"a": {"$ref": "#here"}}, "$defs": {"N": {"$anchor": "here", "const": "y"}}},
    "an id": OBJECT | {"$id": "https://a.example/x", "properties": {"a": {"$ref": "n.json#/$defs/M"}}, "$defs": {
        "N": {"$id": "n.json", "$defs": {"M": {"const": 3}}}}},
    "escaped": OBJECT | {"properties": {"a": {"$ref": "#/$defs/a%20b~1c~0d"}}, "$defs": {"a b/c~d": {"const": "z"}}},
    "ten levels": functools.reduce(
        lambda inner, _: OBJECT | {"properties": {"a": inner}, "required": ["a"]}, range(10), {"type": "string"}),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTING)
async def test_one_tool_and_two_have_the_same_references(start: Start, name: str) -> None:
    """The arguments follow the schema, also beside a function whose definitions have the same names."""
    schema = POINTING[name] | {"required": [*POINTING[name]["properties"]]}
    other = Tool("g", "", OBJECT | {"properties": {"q": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"const": "q"}}})
    bench, found = await start(), list[str]()
    for number, offered in enumerate(((Tool("f", "", schema),), (Tool("f", "", schema), other))):
        tools = Tools(offered=offered, choice="required")
        bench.engine.submit(Request(f"r{number}", (ChatTurn("user", "hi"),), Sampling(), tools=tools))
        ended = await bench.until_ended(f"r{number}")
        (call,) = read_answer([piece.text for piece in ended[f"r{number}"]]).calls
        assert call.name == "f" and check(schema, [call.arguments]) == {"violation": ""}
        found.append(call.arguments)
    assert found[0] == found[1]


@pytest.mark.parametrize("properties", [["x", "y"], ["x"]])
async def test_a_schema_of_too_many_values_holds_up_nobody(start: Start, properties: list[str]) -> None:
    """References that double the arguments with each level, or lead round for ever."""
    levels = 25 if len(properties) > 1 else 1
    defs: dict[str, Any] = {f"d{at}": OBJECT | {
        "properties": {name: {"$ref": f"#/$defs/d{(at + 1) % levels}"} for name in properties}, "required": properties,
    } for at in range(levels)} | {f"d{levels}": {"type": "string"}}  # fmt: skip
    schema = OBJECT | {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    bench, began = await start(), time.process_time()
    tools = Tools(offered=(Tool("f", "", schema),), choice="required")
    bench.engine.submit(Request("r", (ChatTurn("user", "hi"),), Sampling(), tools=tools))
    ended = await bench.until_ended("r")
    assert [call.arguments for call in read_answer([piece.text for piece in ended["r"]]).calls] == ["{}"]
    assert time.process_time() - began < 2


def with_adapter(number: int, adapter: str, tenant: str = "") -> Request:
    return Request(f"r{number}", "hello", Sampling(max_tokens=4), tenant=tenant, adapter=adapter)


async def test_adapters_are_loaded_a_few_at_a_time() -> None:
    """The one that was used longest ago makes room, and one that a running text needs does not: the next text waits."""
    desk = EngineDesk(SimEngine("m", SimSettings(step_ms=1, prefill_ms=0, max_adapters=2), ("a", "b", "c")))
    await desk.start()
    assert desk.card.adapters == ("a", "b", "c")
    texts = {}
    for number, adapter in enumerate(("a", "b", "", "a", "c", "b")):
        texts[adapter] = (await desk.result(desk.submit(with_adapter(number, adapter)))).text
    assert len(set(texts.values())) == 4
    assert (desk.engine.stats().adapters, desk.engine.stats().swaps) == (("c", "b"), 4)
    together = [desk.submit(with_adapter(10 + number, adapter)) for number, adapter in enumerate("abc")]
    await asyncio.gather(*map(desk.result, together))
    ends = [max(at for at, step in enumerate(desk.steps) for piece in step if piece.id == each) for each in together]
    starts = [min(at for at, step in enumerate(desk.steps) for piece in step if piece.id == each) for each in together]
    assert starts[2] > min(ends[:2]), "two are loaded at a time"
    await desk.engine.stop()


async def test_a_text_that_waits_for_its_adapter_is_passed_by_those_without_one() -> None:
    """And by none with an adapter, or its place would never be free."""
    desk = EngineDesk(SimEngine("m", SimSettings(step_ms=1, prefill_ms=0, max_adapters=1), ("a", "b")))
    await desk.start()
    texts = (("a", 60), ("b", 4), ("", 4), ("a", 4))
    for number, (adapter, tokens) in enumerate(texts):
        desk.submit(Request(f"r{number}", "hello", Sampling(max_tokens=tokens), adapter=adapter))
    await asyncio.gather(*[desk.result(f"r{number}") for number in range(len(texts))])
    ended = [piece.id for step in desk.steps for piece in step if piece.last]
    assert ended == ["r2", "r0", "r1", "r3"]
    await desk.engine.stop()


async def test_a_load_delays_its_text_and_a_cached_prompt_is_of_one_adapter() -> None:
    settings = SimSettings(step_ms=1, prefill_ms=0, adapter_load_ms=80, cache_prompts=4)
    desk = EngineDesk(SimEngine("m", settings, ("a", "b")))
    await desk.start()
    took, cached = list[bool](), list[bool]()
    for number, adapter in enumerate(("a", "a", "b", "", "b")):
        began = time.monotonic()
        cached.append((await desk.result(desk.submit(with_adapter(number, adapter, "red")))).cached_tokens > 0)
        took.append(time.monotonic() - began > 0.07)
    assert (took[0], took[2], cached) == (True, True, [False, True, False, False, True])
    assert desk.engine.stats().swaps == 2
    await desk.engine.stop()
