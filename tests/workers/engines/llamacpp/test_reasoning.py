"""Reasoning on llama.cpp: what its chat templates are told, and how an answer with it is marked and continued."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.engine import ChatTurn, Request, Sampling
from penstock.tools import REASONING, TEXT
from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.prompt import Prompts
from workers.engines.llamacpp.request import Generation

SWITCH = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
EFFORT = """effort:{{ reasoning_effort or 'own' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
OPENS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>\n{# </think> #}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
USER = (ChatTurn("user", "hi"),)


class File:
    """As much of a model file as prompts need."""

    vocabulary = 100

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def special_token(self, name: str) -> None:
        return None

    def control_tokens(self) -> dict[str, int]:
        return {}


def prompts(template: str) -> Prompts:
    return Prompts(cast(Gguf, File(template)))


def asked(reasoning: str, past: Any = ()) -> Request:
    return Request("r", USER, Sampling(), past, reasoning=reasoning)


@pytest.mark.parametrize(
    ("template", "reasons", "told"),
    [(SWITCH, True, True), (EFFORT, False, True), (OPENS, True, False), (PLAIN, False, False)],
)
def test_what_a_template_knows(template: str, reasons: bool, told: bool) -> None:
    found = prompts(template)
    assert (found.reasoning, found.reasoning_effort) == (reasons, told)


def test_a_template_is_told_the_effort() -> None:
    for effort, text in (("none", "[user]hi[assistant]<think></think>"), ("low", "[user]hi[assistant]"),
                         ("default", "[user]hi[assistant]"), ("", "[user]hi[assistant]")):  # fmt: skip
        assert prompts(SWITCH).of(asked(effort)).parts == [text]
    for effort, word in (("high", "high"), ("default", "own"), ("none", "own")):
        assert prompts(EFFORT).of(asked(effort)).parts == [f"effort:{word}[user]hi"]


@pytest.mark.parametrize(("template", "begin"), [(SWITCH, "<think>"), (OPENS, "")])
def test_what_was_shown_is_continued_as_the_model_wrote_it(template: str, begin: str) -> None:
    """With the model's tags for the marks; a tag that the prompt holds is not written again."""
    fresh = prompts(template).of(asked("default"))
    past = ((f"{REASONING}a", (), 1), (" b", (), 1), (f"{TEXT}c", (), 1))
    found = prompts(template).of(asked("default", past))
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


def test_json_has_no_reasoning() -> None:
    """Its grammar forces JSON from the first token, also where the prompt holds the tag."""
    request = Request("r", USER, Sampling(json_schema={}), reasoning="default")
    assert Generation(request, ["hi"], 512, opened=True).take(chunk(0, "{}")).text == "{}"
