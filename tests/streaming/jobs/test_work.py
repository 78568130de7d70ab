"""The unit of work: choices times the tokens each may have, and everything that is counted is counted by it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.openai.batch_lines import traits
from api.openai.schemas import parse, to_job
from penstock.engine import MEDIA_KINDS, Capabilities, ChatTurn, ModelCard, Request, Sampling, Task, TaskKind
from streaming.jobs.job import Chat, Inputs, Job, Prompt, Text, Tokens, prompt_count
from streaming.jobs.waiting import (
    JOB_BYTES,
    TOKEN_BYTES,
    UNKNOWN_OUTPUT,
    prompt_sizes,
    reserved_bytes,
    task_bytes,
    work_of,
)
from streaming.order import Priority
from workers.attempt import inputs_of, prompt_of
from workers.engines.sim.answers import task_answer
from workers.engines.sim.settings import SimSettings, card_of
from workers.engines.task_answers import reported_tokens

CARD = ModelCard(
    name="m", engine="sim", context=1000, max_output=900, capabilities=Capabilities(), created=1, default_output=100
)
NO_DEFAULT = ModelCard(
    name="m", engine="llamacpp", context=1000, max_output=1000, capabilities=CARD.capabilities, created=1
)
CHAT = Chat((ChatTurn("user", "hello"),))


@pytest.mark.parametrize(
    ("prompt", "sampling", "card", "work"),
    [
        (CHAT, Sampling(max_tokens=50), CARD, 50),
        (CHAT, Sampling(max_tokens=50, n=8), CARD, 400),
        (Text(("a",) * 16), Sampling(max_tokens=100, n=8), CARD, 12_800),
        (Text(("a",) * 128), Sampling(n=8), CARD, 102_400),
        (CHAT, Sampling(), CARD, 100),
        (CHAT, Sampling(), NO_DEFAULT, 1000),
        (CHAT, Sampling(), None, UNKNOWN_OUTPUT),
        (CHAT, Sampling(max_tokens=5000), None, 5000),
        (CHAT, Sampling(max_tokens=5000), CARD, 900),
        (Tokens(((1,) * 950, (1,) * 20)), Sampling(n=2), CARD, 2 * (50 + 100)),
        (Tokens(((1,) * 2000,)), Sampling(), CARD, 0),
    ],
)
def test_work_is_choices_times_tokens(prompt: Prompt, sampling: Sampling, card: ModelCard | None, work: int) -> None:
    """n, prompt lists, no max_tokens, a model nobody has loaded, and no more than the context leaves."""
    assert work_of(prompt, sampling, card) == work


def test_an_echo_is_written_twice_for_each_choice() -> None:
    """In the log and in the record, in bytes."""
    body = {"model": "m", "prompt": ["\U0001f600" * 100, "a" * 50], "n": 3, "max_tokens": 1}
    plain, echoing = [
        reserved_bytes(
            to_job(
                parse("completion", json.dumps(body | {"echo": echo}).encode()),
                job_id="j",
                tenant="t",
                ceiling=Priority.BATCH,
                reply_to="",
                trace={},
            )
        )
        for echo in (False, True)
    ]
    assert echoing - plain == 2 * 3 * (400 + 50)


BODIES = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "prompt": st.one_of(
            st.text("ab ", min_size=1, max_size=40),
            st.lists(st.text("ab ", min_size=1, max_size=40), min_size=1, max_size=9),
            st.lists(st.integers(0, 9), min_size=1, max_size=9),
            st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=1200), min_size=1, max_size=9),
        ),
    },
    optional={"n": st.integers(1, 8), "max_tokens": st.integers(1, 5000)},
)


@given(BODIES, st.sampled_from([CARD, NO_DEFAULT, None]))
def test_a_line_of_a_batch_and_a_request_weigh_the_same(body: dict[str, object], card: ModelCard | None) -> None:
    """What a tenant's quota counts is what the store's memory is reserved for, besides the prompts of all choices."""
    request = parse("completion", json.dumps(body).encode())
    job = to_job(request, job_id="j", tenant="t", ceiling=Priority.BATCH, reply_to="", trace={})
    work = work_of(job.prompt, job.sampling, card)
    assert traits(request, card).tokens == job.sampling.n * sum(prompt_sizes(job.prompt)) + work
    assert reserved_bytes(job, card) == JOB_BYTES + TOKEN_BYTES * work
    if card is not None and request.max_tokens is None and work:
        assert work <= job.choices * (card.default_output or card.max_output)
    assert request.prompts * job.sampling.n == job.choices


@pytest.mark.parametrize("limit", [{"max_tokens": 1}, {}])
def test_many_choices_of_a_chat_weigh_what_as_many_requests_weigh(limit: dict[str, object]) -> None:
    """A long prompt is no cheaper in a quota for being asked eight times in one request."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "x" * 32_000}], **limit}

    def weight(n: int) -> int:
        return traits(parse("chat", json.dumps({**asked, "n": n}).encode()), CARD).tokens

    prompt = parse("chat", json.dumps(asked).encode()).prompt_asked
    assert weight(8) == 8 * weight(1) > 8 * sum(prompt_sizes(prompt))


TASKS: dict[TaskKind, tuple[Prompt, int | None]] = {
    "embed": (Inputs((("a", "bc", (1, 2)), ("d",))), 3),
    "rerank": (Inputs((("q", "a", "the q is here"), ("q", "x" * 50))), None),
    "tokenize": (Text(("some text that has a few tokens, ünïcode 😀 too",)), None),
    "detokenize": (Tokens(((1, 2, 2**31 - 1),)), None),
}


@pytest.mark.parametrize("kind", TASKS)
def test_the_answer_to_a_task_fits_into_what_is_reserved(kind: TaskKind) -> None:
    """In log and record; of vectors also where neither request nor card says how long they are."""
    prompt, dimensions = TASKS[kind]
    task = Task(kind=kind, dimensions=dimensions)
    made = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=prompt, task=task)
    written = 0
    for index in range(prompt_count(prompt)):
        request = Request(f"{index}", prompt_of(made, index), Sampling(), task=task, inputs=inputs_of(made, index))
        written += len(task_answer(request, task, 8192))
    assert 0 < written <= task_bytes(made, task) < reserved_bytes(made)
    if kind == "embed":
        unknown = task_bytes(made, Task(kind="embed"))
        assert unknown > task_bytes(made, Task(kind="embed"), replace(card_of("m", SimSettings()), embedding_size=8))


@pytest.mark.parametrize("prompt", [Text(("😀" * 1000,)), Chat((ChatTurn("user", "😀" * 1000),))])
def test_an_id_for_each_byte_fits_into_what_is_reserved(prompt: Prompt) -> None:
    """Such are the tokens of characters that no vocabulary has."""
    made = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=prompt, task=Task(kind="tokenize"))
    assert task_bytes(made, Task(kind="tokenize")) >= len(reported_tokens([100_000] * 4000, 8192))


def test_media_weigh_as_tokens_and_their_answers_are_reserved() -> None:
    """An image counts as 1,024 tokens; what a task draws may have 8 MiB, in log and record, and a transcript one."""
    image = {"type": "image_url", "image_url": {"url": "media:0"}}
    said = ChatTurn("user", "hello", parts=({"type": "text", "text": "hello"}, image, image))
    assert prompt_sizes(Chat((said,)))[0] - prompt_sizes(CHAT)[0] == 2 * 1024
    reserved = {
        kind: reserved_bytes(
            Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=CHAT, task=Task(kind=kind))
        )
        for kind in MEDIA_KINDS
    }
    assert {kind: size >> 20 for kind, size in reserved.items()} == {
        "draw": 16, "edit": 16, "transcribe": 2, "translate": 2,
    }  # fmt: skip


@pytest.mark.parametrize("prompt", [Text(("x" * 100, "y" * 50)), Tokens(((1,) * 100, (2,) * 50))])
def test_the_log_probabilities_of_prompts_are_reserved(prompt: Prompt) -> None:
    """For each token a row as one of the answer has, in every choice."""
    made = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=prompt, echo=True,
               sampling=Sampling(max_tokens=1, n=2, logprobs=3))  # fmt: skip
    asked = replace(made, sampling=replace(made.sampling, prompt_logprobs=True))
    longer = replace(made, sampling=replace(made.sampling, max_tokens=2))
    row = (reserved_bytes(longer) - reserved_bytes(made)) / (2 * prompt_count(prompt))
    assert reserved_bytes(asked) - reserved_bytes(made) == 2 * 150 * row
