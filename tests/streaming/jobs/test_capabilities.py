"""What an engine cannot do is refused by name, never ignored."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.engine import Capabilities, ChatTurn, Sampling, Task, TaskKind
from penstock.tools import Tool, ToolCall, Tools
from streaming.jobs.job import MAX_NUMBERS, Chat, Inputs, Job, Prompt, ResponseForm, TaskForm, Text, Tokens, unsupported
from streaming.order import Priority

CHAT = Chat((ChatTurn("user", "hello"),))
TEXT = Text(("hello",))
TOKENS = Tokens(((1, 2),))
FURTHER = dict.fromkeys(("top_k", "min_p", "repetition_penalty", "logit_bias", "ignore_eos"), True)
ALL = Capabilities(chat=True, logprobs=20, json_schema=True, penalties=True, token_prompts=True, **FURTHER)
NONE = Capabilities(chat=False, logprobs=-1, json_schema=False, penalties=False, token_prompts=False)


def job(prompt: Prompt, sampling: Sampling) -> Job:
    return Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=prompt, sampling=sampling)


WANTED = [
    (CHAT, Sampling(), Capabilities(chat=False), "messages"),
    (TOKENS, Sampling(), Capabilities(), "prompt"),
    (CHAT, Sampling(logprobs=0), Capabilities(logprobs=-1), "logprobs"),
    (CHAT, Sampling(logprobs=3), Capabilities(logprobs=-1), "logprobs"),
    (CHAT, Sampling(logprobs=3), Capabilities(logprobs=2), "top_logprobs"),
    (TEXT, Sampling(logprobs=3), Capabilities(logprobs=2), "logprobs"),
    (CHAT, Sampling(json_schema={}), Capabilities(), "response_format"),
    (CHAT, Sampling(json_schema={"type": "object"}), Capabilities(), "response_format"),
    (CHAT, Sampling(presence_penalty=0.1), Capabilities(), "presence_penalty"),
    (CHAT, Sampling(frequency_penalty=-0.1), Capabilities(), "frequency_penalty"),
    (CHAT, Sampling(top_k=5), Capabilities(**FURTHER | {"top_k": False}), "top_k"),
    (CHAT, Sampling(min_p=0.1), Capabilities(**FURTHER | {"min_p": False}), "min_p"),
    *(
        (TEXT, Sampling(**{name: value}), Capabilities(**FURTHER | {name: False}), name)  # type: ignore[arg-type]
        for name, value in (("repetition_penalty", 1.1), ("ignore_eos", True), ("logit_bias", {5: 1.0}))
    ),
]


TOOL = Tool("f", "", {"type": "object"})
AUTO, FORCED = Tools(offered=(TOOL,)), Tools(offered=(TOOL,), choice="required")
CALLED = Chat((ChatTurn("assistant", "", (ToolCall("c", "f", "{}"),)),))
ANSWERED = Chat((ChatTurn("tool", "4", call_id="c"),))


@pytest.mark.parametrize(
    ("prompt", "tools", "capabilities", "param", "remedy"),
    [
        (CHAT, AUTO, Capabilities(), "tools", "leave tools out"),
        (CHAT, AUTO, Capabilities(forced_tools=True), "tools", "set tool_choice to 'required' or name a function"),
        (CHAT, FORCED, Capabilities(), "tool_choice", "leave tools out"),
        (CHAT, FORCED, Capabilities(tools=True), "tool_choice", "use 'auto'"),
        (CALLED, None, Capabilities(forced_tools=True), "messages", "send the text of each call"),
        (ANSWERED, None, Capabilities(), "messages", "send the text of each call"),
    ],
)
def test_tools_that_a_model_lacks_are_refused_with_the_remedy(
    prompt: Chat, tools: Tools | None, capabilities: Capabilities, param: str, remedy: str
) -> None:
    """And pass where it has them."""
    asked = replace(job(prompt, Sampling()), tools=tools)
    failure = unsupported(asked, capabilities)
    assert failure is not None and (failure.status, failure.param) == (400, param) and remedy in failure.message
    assert unsupported(asked, Capabilities(tools=True, forced_tools=True)) is None


@pytest.mark.parametrize(("prompt", "sampling", "capabilities", "param"), WANTED)
def test_each_refusal_names_its_field(
    prompt: Prompt, sampling: Sampling, capabilities: Capabilities, param: str
) -> None:
    """The failure is a 400 that names the field and the model; an engine that honours everything runs the same job."""
    assert unsupported(job(prompt, sampling), ALL) is None
    failure = unsupported(job(prompt, sampling), capabilities)
    assert failure is not None
    assert (failure.status, failure.code, failure.param) == (400, "invalid_request_error", param)
    assert failure.message.startswith(f"{param}: ")
    assert "'m'" in failure.message


def test_a_schema_beside_tools_needs_an_engine_that_does_both() -> None:
    """The refusal names the field of the endpoint, and says how to get the schema's JSON."""
    asked = replace(job(CHAT, Sampling(json_schema={})), tools=Tools(offered=(Tool("f"),)))
    able = Capabilities(tools=True, forced_tools=True, json_schema=True)
    for form, param in ((None, "response_format"), (ResponseForm(), "text.format")):
        refused = unsupported(replace(asked, response=form), able)
        assert refused is not None and refused.param == param and "force its call" in refused.message
    assert unsupported(asked, replace(able, tools_with_schema=True)) is None


def embedding(inputs: int, dimensions: int | None = None, *, base64: bool = True) -> Job:
    prompt, task = Inputs((("x",) * inputs,)), Task(kind="embed", dimensions=dimensions)
    return replace(job(prompt, Sampling()), task=task, task_form=TaskForm(base64=base64))


def test_vectors_are_refused_where_an_answer_would_have_too_many_numbers() -> None:
    """The refusal says how many inputs fit, and so many do."""
    able = Capabilities(embed=True, embedding_dimensions=True)
    for size, most in ((1024, 4096), (4096, 1024), (3, MAX_NUMBERS // 3)):
        assert unsupported(embedding(most), able, size) is None
        refused = unsupported(embedding(most + 1), able, size)
        assert refused is not None and (refused.status, refused.param) == (400, "input")
        assert f"at most {most} inputs" in refused.message
    floats = unsupported(embedding(2048, 4096, base64=False), able)
    assert floats is not None and "at most 512 inputs, or 1024 with encoding_format base64" in floats.message
    assert unsupported(embedding(512, 4096, base64=False), able) is None
    assert unsupported(embedding(1, 65_536), able) is None
    assert unsupported(embedding(10**6), able) is None  # of a model whose size nobody knows


def test_asking_for_nothing_is_always_honoured() -> None:
    """A plain text job, and penalties of zero, need no capability at all."""
    zeros = Sampling(presence_penalty=0.0, frequency_penalty=0.0, temperature=0.0, n=8, top_k=0, min_p=0.0)
    assert unsupported(job(TEXT, Sampling()), NONE) is None
    assert unsupported(job(TEXT, zeros), NONE) is None
    assert unsupported(job(TEXT, Sampling(repetition_penalty=1.0)), NONE) is None


def test_the_limit_itself_is_allowed() -> None:
    """As many alternatives as the engine gives, and not one more."""
    assert unsupported(job(CHAT, Sampling(logprobs=5)), Capabilities(logprobs=5)) is None
    assert unsupported(job(CHAT, Sampling(logprobs=6)), Capabilities(logprobs=5)) is not None


def test_a_response_is_refused_by_the_names_of_its_own_fields() -> None:
    """A client of the Responses API has sent no response_format."""
    for prompt, sampling, capabilities, param in (
        (CHAT, Sampling(json_schema={}), Capabilities(), "text.format"),
        (CHAT, Sampling(logprobs=0), Capabilities(logprobs=-1), "include"),
        (CHAT, Sampling(logprobs=3), Capabilities(logprobs=2), "top_logprobs"),
        (CHAT, Sampling(), Capabilities(chat=False), "input"),
    ):
        found = unsupported(replace(job(prompt, sampling), response=ResponseForm()), capabilities)
        assert found is not None and found.param == param and found.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("reasoning", "capabilities", "refused"),
    [
        ("default", Capabilities(), False), ("low", Capabilities(), True), ("none", Capabilities(), False),
        ("none", Capabilities(reasoning=True), True), ("low", Capabilities(reasoning=True), True),
        ("low", Capabilities(reasoning_effort=True), False),
        ("none", Capabilities(reasoning=True, reasoning_effort=True), False),
    ],
)  # fmt: skip
def test_an_effort_needs_a_model_that_can_be_told_it(reasoning: str, capabilities: Capabilities, refused: bool) -> None:
    for form, param in ((None, "reasoning_effort"), (ResponseForm(), "reasoning.effort")):
        failure = unsupported(replace(job(CHAT, Sampling()), reasoning=reasoning, response=form), capabilities)
        assert (failure is not None) is refused and (failure is None or failure.param == param)


def test_a_response_has_no_logprobs_of_reasoning() -> None:
    asked = replace(job(CHAT, Sampling(logprobs=0)), reasoning="low", response=ResponseForm())
    failure = unsupported(asked, Capabilities(reasoning_effort=True))
    assert failure is not None and failure.param == "include"


# --- tasks -----------------------------------------------------------------------------------------------------------

GROUP = Inputs((("a", "b"),))
CAN = {"embed": True, "rerank": True, "tokenize": True}


def task_job(kind: TaskKind, prompt: Prompt, dimensions: int | None = None) -> Job:
    return replace(job(prompt, Sampling()), task=Task(kind=kind, dimensions=dimensions))


@pytest.mark.parametrize(
    ("asked", "lacking", "param", "words"),
    [
        (task_job("embed", GROUP), "embed", "model", "shows with embed"),
        (task_job("rerank", GROUP), "rerank", "model", "shows with rerank"),
        (task_job("tokenize", TEXT), "tokenize", "model", "the usage of an answer counts them"),
        (task_job("detokenize", TOKENS), "tokenize", "model", "no text for token ids"),
        (task_job("embed", GROUP, 5), "embedding_dimensions", "dimensions", "leave dimensions out"),
        (task_job("embed", Inputs((("a", (1,)),))), "token_prompts", "input", "texts only"),
        (task_job("tokenize", CHAT), "chat", "messages", "no chat template"),
    ],
)
def test_a_task_that_an_engine_cannot_do_is_refused_with_the_remedy(
    asked: Job, lacking: str, param: str, words: str
) -> None:
    """And done by one that has all of it."""
    every = replace(ALL, embedding_dimensions=True, **CAN)
    assert unsupported(asked, every) is None
    failure = unsupported(asked, replace(every, **{lacking: False}))
    assert failure is not None and (failure.status, failure.param) == (400, param) and words in failure.message
