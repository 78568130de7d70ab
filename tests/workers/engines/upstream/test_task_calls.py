"""Tasks through the engine `upstream`: what each kind of server is sent, what becomes of its replies, and what the
engine endures."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from typing import Any

import pytest
from fake_upstream import ANSWER, FIRST_ID, FakeUpstream, Fault
from upstream_bench import HELLO, Answer, bench

from penstock.engine import Task
from workers.engines.upstream.server import ServerFacts, card_of, lacking
from workers.engines.upstream.settings import UpstreamSettings

pytestmark = pytest.mark.slow

KINDS = ("vllm", "sglang", "llama-server", "trtllm", "ollama", "other")
VECTOR = [0.5, -0.25, 1.0]
EMBED, RERANK = Task(kind="embed"), Task(kind="rerank")
TEXTS = ("one", "two", (1, 2, 3))


def fake(kind: str = "vllm", *faults: Fault) -> FakeUpstream:
    found = FakeUpstream(kind, faults)
    found.vector = VECTOR
    return found


def vectors_of(answer: Answer) -> list[list[float]]:
    assert answer.failure is None and answer.finish == "stop" and answer.tokens == 0, answer
    return [array("f", base64.b64decode(each)).tolist() for each in answer.text.split(",")]


@pytest.mark.parametrize("kind", KINDS)
async def test_vectors_and_scores_come_through(kind: str) -> None:
    """Each in the order of its text, with the tokens that the server counts; token ids are passed on."""
    upstream = fake(kind)
    async with bench(upstream) as desk:
        assert desk.card is not None and desk.card.embedding_size == 3
        assert desk.card.capabilities.embed and desk.card.capabilities.rerank
        made = await desk.perform(EMBED, inputs=TEXTS)
        ranked = await desk.perform(RERANK, inputs=("q", "d1", "d2", "d3"))
    assert vectors_of(made) == [VECTOR] * 3 and made.prompt_tokens == 15
    assert json.loads(ranked.text) == [0.0, 0.125, 0.25] and ranked.prompt_tokens == 21
    embedded, sent = upstream.sent
    assert embedded.path == "/v1/embeddings" and embedded.body["input"] == ["one", "two", [1, 2, 3]]
    assert embedded.body.get("encoding_format") == ("base64" if kind in ("vllm", "sglang", "llama-server") else None)
    assert sent.path == "/v1/rerank" and sent.body["documents"] == ["d1", "d2", "d3"] and sent.body["query"] == "q"


def vectors(*rows: tuple[int, Any]) -> Fault:
    """A reply with these vectors, each with its number."""
    return Fault(data=json.dumps({"data": [{"index": index, "embedding": each} for index, each in rows]}).encode())


BREAKS = {
    "500": Fault(status=500),
    "503": Fault(status=503),
    "429": Fault(status=429, headers=()),
    "cut": Fault(cut=True),
    "no JSON": Fault(data=b"<html>"),
    "too few": vectors((0, VECTOR)),
    "of two lengths": vectors((0, [1.0]), (1, [1.0] * 2), (2, [1.0] * 3)),
    "of another length": vectors(*((number, [1.0, 2.0]) for number in range(3))),
    "of one input twice": vectors((0, VECTOR), (0, VECTOR), (2, VECTOR)),
    "too deep": Fault(data=b"[" * 100_000),
    "no base64": vectors(*((number, "%%%") for number in range(3))),
    "empty": vectors(),
}


@pytest.mark.parametrize("what", BREAKS)
async def test_a_reply_that_breaks_is_asked_for_again(what: str) -> None:
    """Nothing of it comes out, and the next one is whole."""
    upstream = fake("vllm", BREAKS[what])
    async with bench(upstream) as desk:
        answer = await desk.perform(EMBED, inputs=TEXTS)
    assert vectors_of(answer) == [VECTOR] * 3 and len(upstream.sent) == 2


@pytest.mark.parametrize("usage", [
    {"prompt_tokens": 10**30}, {"prompt_tokens": -5}, {"prompt_tokens": None, "total_tokens": "9"}, "many",
])  # fmt: skip
@pytest.mark.parametrize("task", [EMBED, RERANK], ids=["embed", "rerank"])
async def test_an_answer_whose_count_cannot_be_true_counts_none(task: Task, usage: object) -> None:
    """It is whole, so it is not asked for again."""
    data = [{"index": n, "embedding": VECTOR} for n in range(3)]
    results = [{"index": n, "relevance_score": 0.5} for n in range(2)]
    upstream = fake("vllm", Fault(data=json.dumps({"data": data, "results": results, "usage": usage}).encode()))
    async with bench(upstream) as desk:
        answer = await desk.perform(task, inputs=TEXTS)
        counted = desk.engine.stats().miscounted
    assert answer.failure is None and answer.finish == "stop" and answer.text
    assert (answer.prompt_tokens, counted, len(upstream.sent)) == (0, 1, 1)


async def test_servers_with_vectors_of_different_lengths_make_none_together() -> None:
    """The groups of one request would get vectors that cannot be compared."""
    long, short = fake(), fake()
    short.vector = VECTOR[:2]
    async with bench(long, short) as desk:
        assert desk.card is not None and not desk.card.capabilities.embed and desk.card.capabilities.rerank


def test_a_server_that_comes_with_vectors_of_another_length_does_not_stand_in() -> None:
    known, other = (ServerFacts(kind="vllm", model="m", embed=True, embedding_size=size) for size in (3, 2))
    card = card_of("m", UpstreamSettings(urls=("http://localhost:1/v1",)), [known])
    assert card.capabilities.embed and not lacking(card, known)
    assert lacking(card, other) == "its vectors have 2 numbers, and the others' have 3"


@pytest.mark.parametrize("fault", [
    Fault(status=400, body=b'{"error": {"message": "no such dimensions", "param": "dimensions"}}'),
    Fault(status=500, body=b'{"error": {"message": "input (900 tokens) is too large to process. no such dimensions"}}'),
])  # fmt: skip
async def test_what_the_server_refuses_fails_with_its_words(fault: Fault) -> None:
    """Once, also where llama-server says 500 of a text that is too long."""
    upstream = fake("vllm", fault)
    async with bench(upstream) as desk:
        answer = await desk.perform(Task(kind="embed", dimensions=7), inputs=TEXTS)
    assert answer.failure is not None and answer.failure.status == 400
    assert "no such dimensions" in answer.failure.message and len(upstream.sent) == 1
    assert upstream.sent[0].body["dimensions"] == 7


async def test_no_other_model_makes_the_vectors() -> None:
    """They would not be comparable: the task waits for its own model."""
    own, other = fake(), fake()
    async with bench(own, fallbacks={"other": other}, fallback_after_s=0.1) as desk:
        await own.stop()
        asking = asyncio.create_task(desk.perform(EMBED, inputs=TEXTS))
        await asyncio.sleep(0.6)
        assert not other.sent and not asking.done()
        await own.start()
        assert vectors_of(await asking) == [VECTOR] * 3
    assert not other.sent


# --- token ids -------------------------------------------------------------------------------------------------------


async def test_token_ids_are_those_of_the_server() -> None:
    """Of a text and of a conversation, and back."""
    async with bench(FakeUpstream("vllm")) as desk:
        assert desk.card is not None and desk.card.capabilities.tokenize
        for prompt in ("a text", HELLO):
            told = json.loads((await desk.perform(Task(kind="tokenize"), prompt)).text)
            assert told == {"tokens": [1, 2, 3], "max_model_len": 2048}
        back = await desk.perform(Task(kind="detokenize"), (FIRST_ID, FIRST_ID + 1))
        assert back.text == "".join(ANSWER[:2]) and back.prompt_tokens == 0


async def test_a_conversation_that_a_server_cannot_render_is_refused() -> None:
    async with bench(FakeUpstream("sglang")) as desk:
        told = await desk.perform(Task(kind="tokenize"), "a text")
        assert json.loads(told.text)["tokens"] == [1, 2, 3]
        refused = await desk.perform(Task(kind="tokenize"), HELLO)
    assert refused.failure is not None and (refused.failure.status, refused.failure.param) == (400, "messages")
    assert "send its text as prompt" in refused.failure.message
