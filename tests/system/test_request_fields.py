"""Fields of requests that not every engine has, through real processes: each reaches the engine by every endpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, ended, line
from house import House, serving
from openai import OpenAI

from penstock.engine import Sampling
from workers.engines.sim.answers import sampling_text, token_text

pytestmark = pytest.mark.slow

FIELDS: dict[str, Any] = {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "logit_bias": {"50256": -100, "7": 2}}
SAMPLED = Sampling(top_k=40, min_p=0.05, repetition_penalty=1.1, logit_bias={7: 2.0, 50256: -100.0})


def expected(question: str, tokens: int) -> str:
    """What the simulated engine says to a chat with FIELDS: its text depends on each of them."""
    prompt = f"user: {question}{sampling_text(SAMPLED)}"
    return "".join([token_text(prompt, index) for index in range(tokens)])


@pytest.fixture(scope="module")
def openai(house: House) -> OpenAI:
    house.start("offline")
    return client(house)


def test_further_sampling_reaches_the_engine_from_every_endpoint(openai: OpenAI) -> None:
    """Chat, stream, job, response and line of a batch; the job shows the fields as they were sent."""
    messages: Any = [{"role": "user", "content": "q"}]
    whole = openai.chat.completions.create(model="sim", messages=messages, max_tokens=5, n=2, extra_body=FIELDS)
    assert [choice.message.content for choice in whole.choices] == [expected("q", 5)] * 2
    stream = openai.chat.completions.create(
        model="sim", messages=messages, max_tokens=5, stream=True, extra_body=FIELDS
    )
    assert "".join([chunk.choices[0].delta.content or "" for chunk in stream]) == expected("q", 5)
    response = openai.responses.create(model="sim", input="q", max_output_tokens=5, extra_body=FIELDS)
    assert response.output_text == expected("q", 5)
    asked = {"model": "sim", "messages": messages, "max_tokens": 5, **FIELDS}
    made = openai.post("/jobs", body=asked, cast_to=dict[str, Any])
    job = openai.get(f"/jobs/{made['id']}?wait=30&include=input", cast_to=dict[str, Any])
    assert job["result"]["choices"][0]["message"]["content"] == expected("q", 5)
    assert FIELDS.items() <= job["input"].items()
    batch = ended(openai, begin(openai, [line(1, "q", max_tokens=5, **FIELDS)]))
    assert batch.output_file_id
    row = json.loads(openai.files.content(batch.output_file_id).text)
    assert row["response"]["body"]["choices"][0]["message"]["content"] == expected("q", 5)


# --- reasoning -------------------------------------------------------------------------------------------------------


def tokens(question: str, first: int, last: int) -> str:
    return "".join([token_text(f"user: {question}", index) for index in range(first, last)])


def reasoned(question: str) -> tuple[str, str]:
    """The reasoning and the text of an answer of twelve tokens with the effort `low`, which is four tokens."""
    return tokens(question, 0, 4), tokens(question, 4, 12).lstrip()


def asked(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "sim", "messages": messages, "max_tokens": 12, "reasoning_effort": "low"} | more


def test_reasoning_stands_beside_the_answer(openai: OpenAI) -> None:
    """Whole and streamed, with n = 2; its tokens are counted, and none of it is in the content."""
    reasoning, said = reasoned("q")
    whole: Any = openai.chat.completions.create(**asked("q", n=2))
    for choice in whole.choices:
        assert (choice.message.reasoning_content, choice.message.content) == (reasoning, said)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 10 and whole.usage.completion_tokens == 24
    found = [["", ""], ["", ""]]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in openai.chat.completions.create(**asked("q", n=2, **options)):
        for choice in chunk.choices:
            found[choice.index][0] += getattr(choice.delta, "reasoning_content", None) or ""
            found[choice.index][1] += choice.delta.content or ""
    assert found == [[reasoning, said]] * 2
    assert chunk.usage.completion_tokens_details.reasoning_tokens == 10
    plain: Any = openai.chat.completions.create(**asked("q", reasoning_effort="none"))
    assert not hasattr(plain.choices[0].message, "reasoning_content")


def test_a_response_has_an_item_of_reasoning(openai: OpenAI) -> None:
    """Whole, streamed with every event in order, replayed with the same bytes, and sent back by a client."""
    reasoning, said = reasoned("q")
    fields: dict[str, Any] = {"model": "sim", "input": "q", "max_output_tokens": 12, "reasoning": {"effort": "low"}}
    whole = openai.responses.create(**fields)
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.output_text == said
    thought: Any = whole.output[0]
    assert (thought.content[0].text, thought.summary) == (reasoning, []) and whole.reasoning.effort == "low"
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 5
    events = list(openai.responses.create(**fields, stream=True, background=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join([event.delta for event in events if event.type == "response.reasoning_text.delta"])
    assert deltas == reasoning
    last: Any = events[-1]
    again = list(openai.responses.retrieve(last.response.id, stream=True))
    assert [event.to_json() for event in again] == [event.to_json() for event in events]
    with openai.responses.stream(**fields) as stream:
        for _ in stream:
            pass
    history: Any = [{"role": "user", "content": "q"}, *[item.to_dict() for item in whole.output]]
    shorter: Any = [each for each in history if each.get("type") != "reasoning"]
    question: Any = {"role": "user", "content": "more"}
    answers = [
        openai.responses.create(model="sim", input=[*each, question], max_output_tokens=3).output_text
        for each in (history, shorter)
    ]
    assert answers[0] == answers[1]
    next_one = openai.responses.create(model="sim", input="more", previous_response_id=whole.id, max_output_tokens=3)
    assert next_one.output_text == answers[0]


def test_a_worker_killed_in_its_reasoning_is_not_seen(tmp_path: Path) -> None:
    """kill -9: the reasoning and the text are those of an unbroken answer."""
    with serving(tmp_path, "workers", PENSTOCK_SIM_STEP_MS="20") as house:
        openai = client(house)
        victim, found = house._processes[0], ["", ""]
        for number, chunk in enumerate(openai.chat.completions.create(**asked("q", stream=True)), 1):
            for choice in chunk.choices:
                found[0] += getattr(choice.delta, "reasoning_content", None) or ""
                found[1] += choice.delta.content or ""
            if number == 2:
                house.start("workers")
                os.kill(victim.pid, signal.SIGKILL)
        assert tuple(found) == reasoned("q")
        job = openai.get(f"/jobs/{chunk.id.removeprefix('chatcmpl-')}", cast_to=dict[str, Any])
        assert job["attempts"] == 2 and job["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
