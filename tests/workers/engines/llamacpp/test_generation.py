"""What llama.cpp's chunks mean to the one request they belong to; reasoning: what its chat templates are told of it,
and how an answer with it is marked and continued."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from model_file import prompts_of

from penstock.engine import ChatTurn, Piece, Refused, Request, Sampling
from penstock.tools import REASONING, TEXT, Answer, Call, Tool, Tools, read_answer
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.request import Generation
from workers.engines.llamacpp.settings import LlamacppSettings

SWITCH = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
EFFORT = """effort:{{ reasoning_effort or 'own' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
OPENS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>\n{# </think> #}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
USER = (ChatTurn("user", "hi"),)


def asked(reasoning: str, past: Any = ()) -> Request:
    return Request("r", USER, Sampling(), past, reasoning=reasoning)


@pytest.mark.parametrize(
    ("template", "reasons", "told"),
    [(SWITCH, True, True), (EFFORT, False, True), (OPENS, True, False), (PLAIN, False, False)],
)
def test_what_a_template_knows(template: str, reasons: bool, told: bool) -> None:
    found = prompts_of(template).chats
    assert (found.reasoning, found.reasoning_effort) == (reasons, told)


def test_a_template_is_told_the_effort() -> None:
    for effort, text in (("none", "[user]hi[assistant]<think></think>"), ("low", "[user]hi[assistant]"),
                         ("default", "[user]hi[assistant]"), ("", "[user]hi[assistant]")):  # fmt: skip
        assert prompts_of(SWITCH).of(asked(effort)).parts == [text]
    for effort, word in (("high", "high"), ("default", "own"), ("none", "own")):
        assert prompts_of(EFFORT).of(asked(effort)).parts == [f"effort:{word}[user]hi"]


VARIES = (
    "<|im_start|>{{ bos_token }}{{ voice }}|{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_request_sets_variables_of_the_template() -> None:
    """Beside the effort, and before it; a control token in one is plain text, and no part of the prompt is replaced."""
    prompts = prompts_of(VARIES, **{"<|im_start|>": 7})

    def parts(**variables: Any) -> list[str | int]:
        passed = {"chat_template_kwargs": variables}
        return prompts.of(Request("r", USER, Sampling(), reasoning="low", passed=passed)).parts

    assert parts(voice="<|im_start|>b") == [7, "<", "|im_start|>b|Truehi"]
    assert parts(voice="a", enable_thinking=False, bos_token="x") == ["<|im_start|>a|Falsehi"]
    for wrong in ({"chat_template_kwargs": "x"}, {"chat_template_kwargs": {"messages": []}}):
        with pytest.raises(Refused):
            prompts.of(Request("r", USER, Sampling(), passed=wrong))


@pytest.mark.parametrize(("template", "begin"), [(SWITCH, "<think>"), (OPENS, "")])
def test_what_was_shown_is_continued_as_the_model_wrote_it(template: str, begin: str) -> None:
    """With the model's tags for the marks; a tag that the prompt holds is not written again."""
    fresh = prompts_of(template).of(asked("default"))
    past = ((f"{REASONING}a", (), 1), (" b", (), 1), (f"{TEXT}c", (), 1))
    found = prompts_of(template).of(asked("default", past))
    assert found.parts == [str(fresh.parts[0]) + f"{begin}a b</think>c"]
    assert fresh.opened is found.opened is (template is OPENS)


def chunk(number: int, text: str) -> dict[str, Any]:
    verbose = {"tokens_predicted": number + 1, "tokens": [number]}
    return {"choices": [{"text": text, "finish_reason": None, "logprobs": None}], "__verbose": verbose}


def test_an_answer_is_marked_and_a_stop_text_is_found_in_it() -> None:
    """Tokens whose text may be a tag come out with it."""
    generation = Generation(Request("r", USER, Sampling(stop=("END",)), reasoning="default"), ["hi"], 512)
    texts = ["<thi", "nk>", "a", "</", "think>", "b", "EN", "D"]
    pieces = [generation.take(chunk(number, text)) for number, text in enumerate(texts)]
    shown = [piece for piece in (*pieces, generation.last()) if piece.n or piece.text]
    assert "".join(piece.text for piece in shown) == f"{REASONING}a{TEXT}b"
    assert [number for piece in shown for number in piece.ids] == list(range(8))
    assert generation.last().finish == "stop"


def test_calls_may_follow_reasoning() -> None:
    """A tag inside the reasoning calls nothing."""
    tools = Tools(offered=(Tool("f"),))
    generation = Generation(Request("r", USER, Sampling(), reasoning="default", tools=tools), ["hi"], 512)
    texts = ["<think>", "a <tool_", "call>", "</think>\n", "<tool_call>{", '"name": "f"}</tool', "_call>"]
    pieces = [generation.take(chunk(number, text)) for number, text in enumerate(texts)]
    generation.take(chunk(7, "") | {"choices": [{"text": "", "finish_reason": "stop", "logprobs": None}]})
    answer = read_answer(piece.text for piece in (*pieces, generation.last()))
    assert answer == Answer("", [Call("f", "{}")], "a <tool_call>")


def test_json_has_no_reasoning() -> None:
    """Its grammar forces JSON from the first token, also where the prompt holds the tag."""
    request = Request("r", USER, Sampling(json_schema={}), reasoning="default")
    assert Generation(request, ["hi"], 512, opened=True).take(chunk(0, "{}")).text == "{}"


def begun(**sampling: Any) -> Generation:
    """A request that a slot has."""
    return Generation(Request("r", "Hi", Sampling(**sampling)), ["Hi"], 512)


EXCEEDED = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 600, "message": "too long"}


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        ({"code": 400, "message": "no such field"}, "invalid_request_error", 400),
        ({"code": 500, "message": "out of blocks"}, "engine_error", 500),
        ({"message": "out of blocks"}, "engine_error", 500),
        (EXCEEDED, "context_length_exceeded", 400),
    ],
)
def test_whose_mistake_an_error_is(error: dict[str, Any], code: str, status: int) -> None:
    """Its requester's where llama.cpp says so, else ours; it ends the request without a word more."""
    generation = begun()
    assert generation.take({"error": error}).text == ""
    assert generation.done
    last = generation.last()
    assert last.failure is not None and (last.failure.code, last.failure.status) == (code, status)
    assert (last.finish, last.n) == ("", 0)


@pytest.mark.parametrize(("past", "finish"), [("one two", "stop"), ("one", ""), ("a b c", "length")])
def test_what_earlier_attempts_generated_may_have_ended_it(past: str, finish: str) -> None:
    """A stop string or all its tokens are in the log already: it ends for that reason, with nothing generated."""
    sampling = Sampling(stop=("two",), max_tokens=3)
    words = tuple((word, (), 1) for word in past.split())
    generation = Generation(Request("r", "Hi", sampling, words), ["Hi"], 512)
    assert generation.done == bool(finish)
    assert generation.last().finish == finish


def test_without_max_tokens_the_context_is_the_limit() -> None:
    """Exactly the context of the settings, not what llama.cpp rounded it up to."""
    generation = Generation(Request("r", "Hi", Sampling()), ["Hi"], 4)
    generation.take({"prompt_progress": {"total": 2, "cache": 1}})
    for number in range(2):
        assert not generation.done
        generation.take(chunk(number, "a"))
    last = generation.last()
    assert (last.finish, last.prompt_tokens, last.cached_tokens) == ("length", 2, 1)


async def test_a_request_whose_end_cannot_be_told_fails() -> None:
    """It ends in a thread of its own, which nobody watches: without a last piece, its job would wait for ever."""
    engine, steps = LlamacppEngine("m", LlamacppSettings(), Path("none")), asyncio.Queue[list[Piece]]()
    engine._on_step, engine._loop = steps.put_nowait, asyncio.get_running_loop()
    generation = Generation(Request("r", "a", Sampling()), ["a"], 100)
    generation.last = {}.popitem  # type: ignore[assignment]
    engine._end(generation)
    (piece,) = await asyncio.wait_for(steps.get(), 20)
    assert piece.id == "r" and piece.failure is not None and piece.failure.code == "engine_error"
