"""What an engine cannot do is refused by name, never ignored."""

from __future__ import annotations

import pytest

from penstock.engine import Capabilities, ChatTurn, Sampling
from streaming.jobs.capabilities import unsupported
from streaming.jobs.job import Chat, Job, Prompt, Text, Tokens
from streaming.priority import Priority

CHAT = Chat((ChatTurn("user", "hello"),))
TEXT = Text(("hello",))
TOKENS = Tokens(((1, 2),))
ALL = Capabilities(chat=True, logprobs=20, json_schema=True, penalties=True, token_prompts=True)
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
]


@pytest.mark.parametrize(("prompt", "sampling", "capabilities", "param"), WANTED)
def test_each_refusal_names_its_field(
    prompt: Prompt, sampling: Sampling, capabilities: Capabilities, param: str
) -> None:
    """The failure is a 400 that names the field and the model."""
    failure = unsupported(job(prompt, sampling), capabilities)
    assert failure is not None
    assert (failure.status, failure.code, failure.param) == (400, "invalid_request_error", param)
    assert failure.message.startswith(f"{param}: ")
    assert "'m'" in failure.message


@pytest.mark.parametrize(("prompt", "sampling", "capabilities", "param"), WANTED)
def test_an_engine_that_can_is_not_refused(
    prompt: Prompt, sampling: Sampling, capabilities: Capabilities, param: str
) -> None:
    """The same jobs pass on an engine that honours everything."""
    assert unsupported(job(prompt, sampling), ALL) is None


def test_asking_for_nothing_is_always_honoured() -> None:
    """A plain text job, and penalties of zero, need no capability at all."""
    zeros = Sampling(presence_penalty=0.0, frequency_penalty=0.0, temperature=0.0, n=8)
    assert unsupported(job(TEXT, Sampling()), NONE) is None
    assert unsupported(job(TEXT, zeros), NONE) is None


def test_the_limit_itself_is_allowed() -> None:
    """As many alternatives as the engine gives, and not one more."""
    assert unsupported(job(CHAT, Sampling(logprobs=5)), Capabilities(logprobs=5)) is None
    assert unsupported(job(CHAT, Sampling(logprobs=6)), Capabilities(logprobs=5)) is not None
