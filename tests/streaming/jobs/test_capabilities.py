"""What an engine cannot do is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.engine import Capabilities, ChatTurn, ModelCard, Sampling, Task, TaskKind
from penstock.tools import Tool, ToolCall, Tools
from streaming.jobs.job import MAX_NUMBERS, Chat, Inputs, Job, Prompt, ResponseForm, TaskForm, Text, Tokens, unsupported
from streaming.order import Priority

CHAT, TEXT, TOKENS = Chat((ChatTurn("user", "hello"),)), Text(("hello",)), Tokens(((1, 2),))
CALLED = Chat((ChatTurn("assistant", "", (ToolCall("c", "f", "{}"),)),))
ANSWERED = Chat((ChatTurn("tool", "4", call_id="c"),))
TOOL = Tool("f", "", {"type": "object"})
AUTO, FORCED = Tools(offered=(TOOL,)), Tools(offered=(TOOL,), choice="required")
GROUP = Inputs((("a", "b"),))
FLAGS = (
    *(
        "chat",
        "json_schema",
        "penalties",
        "seed",
        "token_prompts",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
    ),
    *("ignore_eos", "tools", "forced_tools", "tools_with_schema", "reasoning", "reasoning_effort"),
    *("embed", "rerank", "tokenize", "embedding_dimensions"),
)


def card(can: Capabilities, embedding_size: int = 0) -> ModelCard:
    return ModelCard(
        name="m", engine="e", context=9, max_output=9, capabilities=can, created=1, embedding_size=embedding_size
    )


CAN = Capabilities(logprobs=20, **dict.fromkeys(FLAGS, True))
ALL, NONE = card(CAN), card(Capabilities(logprobs=-1, **dict.fromkeys(FLAGS, False)))


def job(prompt: Prompt, sampling: Sampling = Sampling(), **changes: Any) -> Job:  # noqa: B008 - it is frozen
    return Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=prompt, sampling=sampling, **changes)


def response(sampling: Sampling = Sampling(), **changes: Any) -> Job:  # noqa: B008 - it is frozen
    return job(CHAT, sampling, response=ResponseForm(), **changes)


def task(kind: TaskKind, prompt: Prompt, dimensions: int | None = None) -> Job:
    return job(prompt, task=Task(kind=kind, dimensions=dimensions))


REFUSED: list[tuple[Job, dict[str, Any], str, str]] = [
    (job(CHAT), {"chat": False}, "messages", "/v1/completions"),
    (job(TOKENS), {"token_prompts": False}, "prompt", "text prompts only"),
    (job(CHAT, Sampling(logprobs=0)), {"logprobs": -1}, "logprobs", ""),
    (job(CHAT, Sampling(logprobs=3)), {"logprobs": -1}, "logprobs", ""),
    (job(CHAT, Sampling(logprobs=3)), {"logprobs": 2}, "top_logprobs", "at most 2"),
    (job(TEXT, Sampling(logprobs=3)), {"logprobs": 2}, "logprobs", "at most 2"),
    (job(CHAT, Sampling(json_schema={})), {"json_schema": False}, "response_format", ""),
    (
        job(CHAT, Sampling(json_schema={}), tools=AUTO),
        {"tools_with_schema": False},
        "response_format",
        "force its call",
    ),
    (job(CHAT, Sampling(presence_penalty=0.1)), {"penalties": False}, "presence_penalty", ""),
    (job(CHAT, Sampling(frequency_penalty=-0.1)), {"penalties": False}, "frequency_penalty", ""),
    (job(CHAT, Sampling(seed=7)), {"seed": False}, "seed", "temperature 0"),
    *(
        (job(TEXT, Sampling(**{name: value})), {name: False}, name, "leave it out")
        for name, value in (("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.1), ("ignore_eos", True))
    ),
    (job(TEXT, Sampling(logit_bias={5: 1.0})), {"logit_bias": False}, "logit_bias", ""),
    (job(CHAT, tools=AUTO), {"tools": False, "forced_tools": False}, "tools", "leave tools out"),
    (job(CHAT, tools=AUTO), {"tools": False}, "tools", "leave tools out, or force a call with tool_choice"),
    (job(CHAT, tools=FORCED), {"tools": False, "forced_tools": False}, "tool_choice", "leave tools out"),
    (job(CHAT, tools=FORCED), {"forced_tools": False}, "tool_choice", "use 'auto'"),
    (job(CALLED), {"tools": False}, "messages", "send the text of each call"),
    (job(ANSWERED), {"tools": False}, "messages", "send the text of each call"),
    (job(CHAT, reasoning="low"), {"reasoning_effort": False}, "reasoning_effort", ""),
    (job(CHAT, reasoning="none"), {"reasoning_effort": False}, "reasoning_effort", ""),
    # A client of the Responses API has sent no response_format.
    (response(Sampling(json_schema={})), {"json_schema": False}, "text.format", ""),
    (response(Sampling(logprobs=0)), {"logprobs": -1}, "include", ""),
    (response(Sampling(logprobs=3)), {"logprobs": 2}, "top_logprobs", ""),
    (response(), {"chat": False}, "input", ""),
    (response(reasoning="low"), {"reasoning_effort": False}, "reasoning.effort", ""),
    (task("embed", GROUP), {"embed": False}, "model", "shows with embed"),
    (task("rerank", GROUP), {"rerank": False}, "model", "shows with rerank"),
    (task("tokenize", TEXT), {"tokenize": False}, "model", "the usage of an answer counts them"),
    (task("detokenize", TOKENS), {"tokenize": False}, "model", "no text for token ids"),
    (task("embed", GROUP, 5), {"embedding_dimensions": False}, "dimensions", "leave dimensions out"),
    (task("embed", Inputs((("a", (1,)),))), {"token_prompts": False}, "input", "texts only"),
    (task("tokenize", CHAT), {"chat": False}, "messages", "no chat template"),
]


@pytest.mark.parametrize(("asked", "lacking", "param", "words"), REFUSED)
def test_fields_and_tools_that_an_engine_lacks_are_refused_by_name(
    asked: Job, lacking: dict[str, Any], param: str, words: str
) -> None:
    """The failure is a 400 that names field, model and remedy; an engine that honours everything runs the same job."""
    assert unsupported(asked, ALL) is None
    failure = unsupported(asked, card(replace(CAN, **lacking)))
    assert failure is not None
    assert (failure.status, failure.code, failure.param) == (400, "invalid_request_error", param)
    assert failure.message.startswith(f"{param}: ") and "'m'" in failure.message and words in failure.message


def test_a_response_has_no_logprobs_of_reasoning() -> None:
    failure = unsupported(response(Sampling(logprobs=0), reasoning="low"), ALL)
    assert failure is not None and failure.param == "include"


def test_asking_for_nothing_is_always_honoured() -> None:
    """A plain text job, penalties of zero, and the reasoning that an engine does anyway, need no capability at all."""
    zeros = Sampling(presence_penalty=0.0, frequency_penalty=0.0, temperature=0.0, n=8, top_k=0, min_p=0.0)
    for sampling in (Sampling(), zeros, Sampling(repetition_penalty=1.0)):
        for reasoning in ("", "default", "none"):
            assert unsupported(job(TEXT, sampling, reasoning=reasoning), NONE) is None


def test_vectors_are_refused_where_an_answer_would_have_too_many_numbers() -> None:
    """The refusal says how many inputs fit, and so many do."""

    def embedding(inputs: int, dimensions: int | None = None, *, base64: bool = True) -> Job:
        return replace(task("embed", Inputs((("x",) * inputs,)), dimensions), task_form=TaskForm(base64=base64))

    for size, most in ((1024, 4096), (4096, 1024), (3, MAX_NUMBERS // 3)):
        assert unsupported(embedding(most), card(CAN, size)) is None
        refused = unsupported(embedding(most + 1), card(CAN, size))
        assert refused is not None and (refused.status, refused.param) == (400, "input")
        assert f"at most {most} inputs" in refused.message
    floats = unsupported(embedding(2048, 4096, base64=False), ALL)
    assert floats is not None and "at most 512 inputs, or 1024 with encoding_format base64" in floats.message
    assert unsupported(embedding(512, 4096, base64=False), ALL) is None
    assert unsupported(embedding(10**6), ALL) is None  # of a model whose size nobody knows
