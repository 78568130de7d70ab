"""The embedded engine with the real model: mechanics only, never what it knows."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_desk import EngineDesk
from flow import until

from penstock.engine import ChatTurn, EngineDead, Refused, Request, Sampling, token_bytes
from penstock.tools import Tool, Tools, read_answer
from workers.engines.llamacpp import request as tokenizer_module
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.request import Tokenizer
from workers.engines.llamacpp.settings import LlamacppSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SLOTS, CONTEXT = 4, 512
GREEDY: dict[str, Any] = {"temperature": 0.0}
STORY = (ChatTurn("user", "Tell me a long story about a river."),)


ANY: dict[str, Any] = {"type": "object", "additionalProperties": False}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(real_model: Path) -> AsyncIterator[EngineDesk]:
    """One started engine for this file."""
    desk = EngineDesk(LlamacppEngine("smollm2", LlamacppSettings(slots=SLOTS, context=CONTEXT), real_model))
    await desk.start()
    yield desk
    await desk.engine.stop()


@pytest.fixture(autouse=True)
def all_slots_free(desk: EngineDesk) -> Iterator[None]:
    """No test leaves anything running."""
    yield
    stats = desk.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
    assert desk.engine.health().ok


async def test_the_card_says_what_was_loaded(desk: EngineDesk) -> None:
    """Name, context and what may be asked of it."""
    assert (desk.card.name, desk.card.engine, desk.card.context) == ("smollm2", "llamacpp", CONTEXT)
    assert desk.card.capabilities.chat
    assert desk.card.capabilities.json_schema
    assert desk.card.capabilities.forced_tools and not desk.card.capabilities.tools
    assert desk.phases == ["reading the model file", "loading weights"]


async def test_it_says_when_it_had_a_request(desk: EngineDesk) -> None:
    """With the last piece: taken by a slot, first token, last token; one that never ran has no first."""
    began = time.monotonic()
    await desk.ask("Once upon a time", max_tokens=4, **GREEDY)
    times = desk.steps[-1][0].times
    assert times is not None and began <= times.scheduled < times.first < times.last <= time.monotonic()
    waiting = [desk.send(STORY, **GREEDY) for _ in range(SLOTS + 1)]
    desk.engine.cancel(waiting[-1])
    last = await desk.result(waiting[-1])
    assert not any(piece.last for request_id in waiting[:-1] for piece in desk.pieces(request_id))
    assert last.finish == "cancelled" and last.times is not None and (last.times.scheduled, last.times.first) == (0, 0)
    for request_id in waiting[:-1]:
        for _ in range(2):
            desk.engine.cancel(request_id)
        desk.engine.cancel("nobody")
        assert (await desk.result(request_id)).finish == "cancelled"
    await until(lambda: desk.engine.stats().running == 0)


async def test_a_chat_is_streamed_until_max_tokens(desk: EngineDesk) -> None:
    """Tokens come in several steps, and are counted exactly."""
    request_id = desk.send(STORY, max_tokens=12, **GREEDY)
    whole = await desk.result(request_id)
    assert (whole.n, whole.finish, whole.failure) == (12, "length", None)
    assert whole.text
    assert len(desk.pieces(request_id)) > 3
    assert whole.prompt_tokens > 10
    assert [piece.prompt_tokens for piece in desk.pieces(request_id)[1:-1]] == [0] * (len(desk.pieces(request_id)) - 2)
    assert desk.pieces(request_id)[0].prompt_tokens == whole.prompt_tokens


async def test_text_and_token_prompts_are_completed(desk: EngineDesk) -> None:
    """The ids that came out are accepted as a prompt."""
    text = await desk.ask("One, two, three,", max_tokens=6, **GREEDY)
    assert len(text.ids) == text.n == 6
    ids = await desk.ask(text.ids, max_tokens=3, **GREEDY)
    assert (ids.prompt_tokens, ids.n) == (6, 3)
    assert (await desk.ask("", max_tokens=2)).n == 2


async def test_a_stop_string_across_tokens_cuts_exactly(desk: EngineDesk) -> None:
    """The text ends before it, whatever tokens it is made of, and the slot is free at once."""
    whole = (await desk.ask(STORY, max_tokens=24, **GREEDY)).text
    stop = whole[11:19]
    cut = await desk.ask(STORY, max_tokens=24, stop=(stop,), **GREEDY)
    assert (cut.text, cut.finish) == (whole[: whole.index(stop)], "stop")
    assert 0 < cut.n < 24


@pytest.mark.parametrize(
    "schema", [{"type": "nope"}, {"$ref": "#/definitions/none"}, {"type": "string", "pattern": "(("}]
)
async def test_a_schema_without_effect_is_refused(desk: EngineDesk, schema: dict[str, Any]) -> None:
    """llama.cpp would ignore it without a word."""
    for _ in range(2):
        failure = (await desk.ask(STORY, max_tokens=5, json_schema=schema)).failure
        assert (failure.status, failure.param) == (400, "response_format")


async def test_a_schema_whose_grammar_is_dropped_after_its_first_token_is_refused(desk: EngineDesk) -> None:
    """llama.cpp drops one with too many ways to go on, and would end an answer of another form without a word."""
    properties = {f"field_{number}": {"type": "string"} for number in range(600)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    failure = (await desk.ask(STORY, max_tokens=5, json_schema=schema)).failure
    assert (failure.status, failure.param) == (400, "response_format")
    fewer = schema | {"properties": dict(list(properties.items())[:100])}
    assert (await desk.ask(STORY, max_tokens=5, json_schema=fewer, **GREEDY)).failure is None


def chained(link: Callable[[dict[str, str]], dict[str, Any]], length: int) -> dict[str, Any]:
    defs = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    return ANY | {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs | {f"d{length}": {"const": 1}}}


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 10**9}, ""),
        ({"type": "string", "maxLength": 10**18}, ""),
        (chained(lambda each: each, 5000), ""),
        (chained(lambda each: {"allOf": [each]}, 99), ""),
        (chained(lambda each: ANY | {"properties": {"x": each}}, 490), ""),
        (chained(lambda each: {"type": "array", "items": each}, 5000), "levels of schemas"),
        (ANY | {"properties": {"a": {"pattern": "a$b"}}, "required": ["a"]}, "llama.cpp cannot hold its output"),
    ],
)
async def test_a_huge_schema_holds_up_nobody(desk: EngineDesk, schema: dict[str, Any], refused: str) -> None:
    """Counts and chains that would take llama.cpp minutes, or its stack."""
    answer = await desk.ask(STORY, max_tokens=9, json_schema=schema, **GREEDY)
    assert refused in answer.failure.message if refused else answer.failure is None


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_come_with_each_token(desk: EngineDesk, count: int) -> None:
    """One row per token, as many alternatives as asked, and their texts make up the text."""
    answer = await desk.ask("One, two, three,", max_tokens=5, logprobs=count, **GREEDY)
    assert [len(row.top) for row in answer.logprobs] == [count] * 5
    assert "".join(row.token for row in answer.logprobs) == answer.text
    assert all(row.logprob <= 0 for row in answer.logprobs)


EMOJI = "Repeat: 😀 日本 🎉🎉 é\nRepeat: 😀 日本 🎉🎉 é\nRepeat:"


async def test_the_tokens_of_one_character_share_a_row(desk: EngineDesk) -> None:
    """The rows have the bytes of the text."""
    answer = await desk.ask(EMOJI, max_tokens=24, logprobs=2, stop=["eat"], **GREEDY)
    assert b"".join(token_bytes(row.token) for row in answer.logprobs) == answer.text.encode()
    assert 0 < len(answer.logprobs) < answer.n and all(len(row.top) == 2 for row in answer.logprobs)


async def test_a_seed_repeats_a_text(desk: EngineDesk) -> None:
    """Alone in the engine, the same seed gives the same text; negative and large seeds are taken too."""
    for seed in (7, -1, 2**63):
        texts = [(await desk.ask(STORY, max_tokens=6, temperature=1.5, seed=seed)).text for _ in range(2)]
        assert texts[0] == texts[1]


async def test_further_sampling_reaches_the_sampler(desk: EngineDesk) -> None:
    """Each field alone changes or fixes the text as it should."""
    plain = await desk.ask(STORY, max_tokens=5, **GREEDY)
    banned = await desk.ask(STORY, max_tokens=5, logit_bias=dict.fromkeys(plain.ids, -100.0), **GREEDY)
    assert not set(plain.ids) & set(banned.ids)
    forced = await desk.ask(STORY, max_tokens=5, logit_bias={28: 100.0}, **GREEDY)
    assert forced.ids == (28,) * 5
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        assert (await desk.ask(STORY, max_tokens=5, temperature=2.0, seed=5, **narrow)).ids == plain.ids
    varied = await desk.ask(STORY, max_tokens=24, repetition_penalty=2.0, **GREEDY)
    same = await desk.ask(STORY, max_tokens=24, repetition_penalty=0.5, **GREEDY)
    assert len(set(same.ids)) < len(set(varied.ids))


async def test_a_bias_of_a_token_that_is_not_there_is_refused(desk: EngineDesk) -> None:
    """llama.cpp would ignore it."""
    with pytest.raises(Refused) as caught:
        await desk.engine.check(Request("r", STORY, Sampling(logit_bias={49152: 1.0})))
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "logit_bias")
    await desk.engine.check(Request("r", STORY, Sampling(logit_bias={49151: 1.0})))


FURTHER = {"repetition_penalty": 1.3, "logit_bias": {28: -100.0}, "top_k": 20, "min_p": 0.1}


@pytest.mark.parametrize("sampling", [{}, FURTHER], ids=["greedy", "further sampling"])
async def test_a_continuation_goes_on_where_the_first_attempt_stopped(
    desk: EngineDesk, sampling: dict[str, Any]
) -> None:
    """The text is the undisturbed run's, and nothing is emitted twice. Penalties count what an earlier attempt
    generated, since its tokens are part of the prompt."""
    sampling = {"max_tokens": 12, **GREEDY, **sampling}
    request_id = desk.send(STORY, **sampling)
    whole = await desk.result(request_id)
    tokens = [(piece.text, piece.ids, piece.n) for piece in desk.pieces(request_id) if piece.n]
    for at in (1, 7):
        past = tokens[:at]
        rest = await desk.ask(STORY, past, **sampling)
        assert "".join(text for text, _, _ in past) + rest.text == whole.text, at
        assert rest.n == whole.n - sum(n for _, _, n in past)
        assert (rest.finish, rest.prompt_tokens) == (whole.finish, whole.prompt_tokens)


async def test_as_many_requests_as_slots_run_together(desk: EngineDesk) -> None:
    """They share steps, and a fifth one waits for a slot."""
    first = len(desk.steps)
    ids = [desk.send(STORY, max_tokens=12, **GREEDY) for _ in range(SLOTS)]
    late = desk.send(STORY, max_tokens=2, **GREEDY)
    await until(lambda: desk.engine.stats().running == SLOTS)
    assert desk.engine.stats().waiting == 1
    assert desk.engine.stats().kv_tokens == SLOTS * CONTEXT
    results = [await desk.result(request_id) for request_id in [*ids, late]]
    assert [result.n for result in results] == [12] * SLOTS + [2]
    assert max(len(step) for step in desk.steps[first:]) > 1
    await until(lambda: desk.engine.stats().running == 0)


async def test_a_cancel_is_seen_while_the_prompt_is_computed(desk: EngineDesk) -> None:
    """A long prompt need not be finished first."""
    request_id = desk.send("river " * 450)
    await until(lambda: desk.engine.stats().kv_used)
    desk.engine.cancel(request_id)
    result = await desk.result(request_id)
    assert (result.finish, result.n) == ("cancelled", 0)


@pytest.mark.parametrize(
    ("prompt", "param"), [("river " * 600, "prompt"), ((ChatTurn("user", "river " * 600),), "messages")]
)
async def test_a_prompt_over_the_context_fails_with_both_numbers(desk: EngineDesk, prompt: Any, param: str) -> None:
    """Its length and the context, and which field to shorten."""
    failure = (await desk.ask(prompt, max_tokens=5)).failure
    assert (failure.code, failure.status, failure.param) == ("context_length_exceeded", 400, param)
    assert str(CONTEXT) in failure.message
    assert any(int(word) >= 600 for word in failure.message.split() if word.isdigit())


async def test_tokens_of_long_characters_are_counted(desk: EngineDesk) -> None:
    """Of a character made of several tokens not all ids are known; the count is still true, and it can be resumed."""
    prompt = "Repeat: 😀 日本語 😀 日本語 😀 日本語 😀 日本語 😀 日本語"
    request_id = desk.send(prompt, max_tokens=24, **GREEDY)
    whole = await desk.result(request_id)
    assert whole.n == 24
    assert len(whole.ids) < whole.n
    assert "\ufffd" not in whole.text
    assert any(ord(letter) > 0x2FFF for letter in whole.text)
    pieces = [(piece.text, piece.ids, piece.n) for piece in desk.pieces(request_id) if piece.n]
    assert all(len(ids) <= n for _, ids, n in pieces)
    rest = await desk.ask(prompt, pieces[: len(pieces) // 2], max_tokens=24, **GREEDY)
    assert rest.n == 24 - sum(n for _, _, n in pieces[: len(pieces) // 2])


@pytest.mark.parametrize("prompt", [(), (10**6,), (-1,)])
async def test_what_can_never_run_is_refused(desk: EngineDesk, prompt: Any) -> None:
    """At submit, as the requester's fault."""
    with pytest.raises(Refused) as caught:
        desk.send(prompt)
    assert caught.value.failure.status == 400


async def test_a_prompt_is_checked_before_it_is_given(desk: EngineDesk) -> None:
    """Its tokens are counted as the engine counts them when it runs: the longest that fits, and one more token."""
    text = "Once upon a time " * 40
    counted = (await desk.ask(text, max_tokens=1, **GREEDY)).prompt_tokens
    for prompt, tokens in ((text, counted), ((1,) * 60, 60), ((ChatTurn("user", text),), 0)):
        sampling = Sampling(max_tokens=CONTEXT - tokens)
        if tokens:
            await desk.engine.check(Request("r", prompt, sampling))
        with pytest.raises(Refused) as caught:
            await desk.engine.check(Request("r", prompt, Sampling(max_tokens=CONTEXT - tokens + 1)))
        assert caught.value.failure.code == "context_length_exceeded"
    with pytest.raises(Refused):
        await desk.engine.check(Request("r", (10**6,), Sampling()))


async def test_a_count_whose_reply_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole does not."""
    monkeypatch.setattr(tokenizer_module, "TIMEOUT_S", 0.2)
    gone = asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        gone.set()

    async with await asyncio.start_unix_server(drip, tmp_path / "slow.sock"):
        tokenizer = Tokenizer(tmp_path / "slow.sock", "key")
        assert await tokenizer.count(["text"]) is None
        await gone.wait()
    await tokenizer.close()


async def test_no_tcp_port_is_opened(desk: EngineDesk) -> None:
    """The library's listener is a socket file in a folder only this user may enter."""
    sockets = {target for target in map(link, Path("/proc/self/fd").iterdir()) if target.startswith("socket:")}
    listening = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
        listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    assert not sockets & listening
    folder = desk.engine._folder
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_an_engine_ends_its_requests_and_leaves_nothing_behind(real_model: Path) -> None:
    """stop() cancels what runs and what waits, removes its folder, and may be called twice."""
    desk = EngineDesk(LlamacppEngine("m", LlamacppSettings(slots=1, context=256), real_model))
    await desk.start()
    folder, tokenizer = desk.engine._folder, desk.engine._tokenizer
    running = desk.send(STORY, **GREEDY)
    waiting = desk.send(STORY, **GREEDY)
    await until(lambda: desk.pieces(running))
    await desk.engine.stop()
    await desk.engine.stop()
    assert tokenizer._client.is_closed
    assert [(await desk.result(request_id)).finish for request_id in (running, waiting)] == ["cancelled"] * 2
    assert not folder.exists()
    with pytest.raises(EngineDead):
        desk.send(STORY)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(RuntimeError("out of memory"), "engine_error", 500), (ValueError("bad field"), "invalid_request_error", 400)],
)
async def test_what_llama_cpp_raises_fails_the_request_alone(
    desk: EngineDesk, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, status: int
) -> None:
    """Its requester hears of it, and its slot serves the next one."""

    class Broken:
        def handle_completions(self, *_: object) -> None:
            raise error

    with monkeypatch.context() as broken:
        broken.setattr(desk.engine, "_server", Broken())
        failure = (await desk.ask(STORY, max_tokens=5)).failure
    assert (failure.code, failure.status) == (code, status)
    answers = [desk.send(STORY, max_tokens=2, **GREEDY) for _ in range(SLOTS)]
    assert [(await desk.result(each)).n for each in answers] == [2] * SLOTS


async def test_silence_is_taken_for_a_hang(real_model: Path) -> None:
    """Requests run and nothing is heard for hang_s: the process should be restarted."""
    desk = EngineDesk(LlamacppEngine("m", LlamacppSettings(slots=1, context=512, batch=512, hang_s=0.001), real_model))
    await desk.start()
    assert desk.engine.health().ok
    request_id = desk.send("river " * 150, max_tokens=1)
    assert "silent" in await until(lambda: desk.engine.health().reason)
    await desk.result(request_id)
    await desk.engine.stop()


GGUF_HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD_CONTEXT = (
    gguf_text(b"general.architecture") + struct.pack("<I", 8) + gguf_text(b"llama")
    + gguf_text(b"llama.context_length") + struct.pack("<I", 8) + gguf_text(b"many")
)  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Check the path"),
        (b"not a model", "not a GGUF file.*Delete it and get it again"),
        (GGUF_HEAD + BAD_CONTEXT, "Get it again"),
    ],
)
async def test_a_file_that_is_no_model_is_named_with_the_fix(tmp_path: Path, content: bytes | None, words: str) -> None:
    """Before llama.cpp is asked."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    engine = LlamacppEngine("m", LlamacppSettings(), path)
    with pytest.raises(EngineDead, match=rf"model\.gguf.*{words}"):
        await engine.start(lambda _pieces: None, lambda _phase: None)
    await engine.stop()


def link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""  # the descriptor of the listing itself


PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["weir", "dam"]}},
}
SILENT = {"type": "object", "properties": {"silent": {"type": "boolean"}}, "required": ["silent"]}
OFFERED = (Tool("visit", "Visit a place.", PLACE), Tool("wait", "Wait.", SILENT))


@pytest.mark.parametrize("named", ["visit", ""])
async def test_a_forced_call_is_held_to_its_function(desk: EngineDesk, named: str) -> None:
    """By our own grammar: a named function, or one of several, whose definitions are kept apart."""
    tools = Tools(offered=OFFERED, choice="required", named=named)
    request = desk.send(STORY, tools=tools, max_tokens=60, **GREEDY)
    answer = await desk.result(request)
    said, calls, _ = read_answer(piece.text for piece in desk.pieces(request))
    assert (answer.failure, answer.finish, said) == (None, "stop", "") and len(calls) == 1
    name, arguments = calls[0].name, json.loads(calls[0].arguments)
    assert name in ((named,) if named else ("visit", "wait"))
    if name == "visit":
        assert arguments["place"] in ("weir", "dam") and 1 <= arguments["days"] <= 9 and len(arguments) == 2
    else:
        assert arguments["silent"] in (True, False)
