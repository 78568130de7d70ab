"""Agents on TensorRT-LLM's double: calls of tools, reasoning, template variables and the tokenizer's tasks."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from template_tokenizer import AGENT, END, IDS, PLAIN, TemplateTokenizer
from trtllm_double import DoubleLLM, Rig, params, settle
from trtllm_package import VERSIONS

from penstock.engine import ChatTurn, Piece, Request, Sampling, Task
from penstock.tools import Answer, Call, Tool, Tools, read_answer
from streaming.jobs.codec import Delta
from streaming.jobs.job import Chat, Job
from streaming.order import Priority
from workers.claimer import job_restart_reason
from workers.engines.calls import FoundCalls, check_calls

OLDEST = next(iter(VERSIONS))
USER = (ChatTurn("user", "hi"),)
F = Tool("f", "does f", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, strict=True)
AUTO, NAMED = Tools(offered=(F, Tool("g"))), Tools(offered=(F, Tool("g")), choice="required", named="f")
REQUIRED = Tools(offered=NAMED.offered, choice="required")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoubleLLM, "tokenizer", TemplateTokenizer())


def chat(name: str = "r", tools: Tools | None = None, past: Any = (), **more: Any) -> Request:
    sampling = {each: more.pop(each) for each in tuple(more) if each in Sampling.__struct_fields__}
    return Request(name, USER, Sampling(**sampling), past, tools=tools, **more)


async def answer(rig: Rig, request: Request, reply: str, step: int = 1) -> tuple[Answer, str]:
    """What its reader gets of this reply, in steps of so many tokens; and the finish reason."""
    rig.llm.reply = reply
    await rig.submit(request)
    await rig.finish(request.id, count=step)
    return read_answer(piece.text for piece in rig.pieces(request.id)), rig.pieces(request.id)[-1].finish


# --- what the card says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guided", ["", "xgrammar", "llguidance"])
@pytest.mark.parametrize("template", [AGENT, PLAIN])
async def test_the_card_claims_what_holds(
    rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guided: str, template: str
) -> None:
    """By the template, the grammar library, and the size of the model's output."""
    monkeypatch.setattr(DoubleLLM, "tokenizer", TemplateTokenizer(template))
    can = (await rig(guided_decoding=guided)).card.capabilities
    agent = template == AGENT
    assert (can.tools, can.reasoning, can.reasoning_effort) == (agent, agent, agent)
    assert (can.forced_tools, can.json_schema) == (bool(guided), bool(guided))
    assert can.ignore_eos and can.tokenize and can.tokenize_chats and not can.tool_resume and not can.logit_bias
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    assert (await rig(guided_decoding=guided)).card.capabilities.logit_bias


@pytest.mark.parametrize("version", [OLDEST])
async def test_a_version_without_budgets_of_reasoning_takes_none(rig: Any) -> None:
    """What is not taken is named to the client."""
    started = await rig()
    assert started.card.withheld == ("*",) and started.card.takes == ("chat_template_kwargs",)


class OfBytes(TemplateTokenizer):
    """Its tags are no tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


async def test_no_budget_where_the_end_tag_is_several_tokens(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would force its first one twice."""
    monkeypatch.setattr(DoubleLLM, "tokenizer", OfBytes())
    assert (await rig()).card.takes == ("chat_template_kwargs",)


async def test_fields_of_a_request_reach_the_engine_by_name(rig: Any) -> None:
    eagle = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "hub/eagle"}
    assert (await rig(speculative=eagle)).card.takes == ("chat_template_kwargs",)
    started = await rig()
    assert started.card.takes == ("chat_template_kwargs", "thinking_token_budget")
    passed = {"chat_template_kwargs": {"voice": "calm"}, "thinking_token_budget": 3}
    await started.submit(chat(passed=passed, reasoning="default"))
    assert "[calm]" in TemplateTokenizer().decode(started.llm.calls[-1]["inputs"])
    assert params(started)["logits_processor"].given == (3, [IDS["<think>"]], [IDS["</think>"]])


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("tools", "reply", "said"),
    [(NAMED, '{"x": 1}', ""), (REQUIRED, '{"name": "f", "arguments": {"x": 1}}', ""), (AUTO, f"So: {CALL}", "So: ")],
)
async def test_a_call_is_told_once_and_in_order(rig: Any, tools: Tools, reply: str, said: str, step: int) -> None:
    """Forced, required, or chosen by the model; streamed, or in one step."""
    started = await rig(guided_decoding="xgrammar")
    found, finish = await answer(started, chat(tools=tools, max_tokens=99), reply, step)
    assert (found.text, finish) == (said, "stop")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("f", {"x": 1})]
    texts = ["".join(piece.text for piece in started.pieces("r"))]
    assert check_calls(texts, [finish], tools) == FoundCalls(frozenset({0}), {"f": [found.calls[0].arguments]})
    assert sum(piece.n for piece in started.pieces("r")) == len(reply)


async def test_each_choice_has_its_own_calls(rig: Any) -> None:
    started = await rig(guided_decoding="xgrammar")
    started.llm.reply = '{"x": 1}'
    for number in range(3):
        await started.submit(chat(f"r{number}", NAMED))
    await started.finish("r0", "r1", "r2")
    assert [read_answer((started.text(f"r{number}"),)).calls for number in range(3)] == [[Call("f", '{"x": 1}')]] * 3


@pytest.mark.parametrize(("guided", "kind"), [("xgrammar", "structural_tag"), ("llguidance", ""), ("", "")])
async def test_a_chosen_call_is_held_where_the_engine_can(rig: Any, guided: str, kind: str) -> None:
    """By a structural tag, or else by reading it alone."""
    started = await rig(guided_decoding=guided)
    found, _ = await answer(started, chat(tools=AUTO), CALL)
    form = params(started)["guided_decoding"]
    assert [*(form.given if form else {})] == ([kind] if kind else [])
    assert [call.name for call in found.calls] == ["f"]


async def test_a_version_without_structural_tags_reads_calls(rig: Any, library: SimpleNamespace) -> None:
    names = dict(library.facts.names)
    names["GuidedDecodingParams"] -= {"structural_tag"}
    library.facts = replace(library.facts, names=names)
    started = await rig(guided_decoding="xgrammar")
    found, _ = await answer(started, chat(tools=AUTO), CALL)
    assert params(started)["guided_decoding"] is None and len(found.calls) == 1


async def test_a_call_is_not_forced_without_a_grammar(rig: Any) -> None:
    started = await rig()
    await started.submit(chat(tools=NAMED))
    assert (started.failure("r").status, started.failure("r").param) == (400, "tool_choice")
    assert not started.llm.calls


async def test_a_call_that_another_worker_began_begins_again(rig: Any) -> None:
    """Its grammar begins at its root. If all tokens were used, what was shown is the answer: no name comes twice."""
    started = await rig(guided_decoding="xgrammar")
    can, past = started.card.capabilities, [('\x1ef\x1f{"x": ', (), 3)]
    for tools in (NAMED, AUTO):
        job = Job(id="j", model="toy", tenant="t", priority=Priority.STANDARD, prompt=Chat(USER),
                  sampling=Sampling(max_tokens=9), tools=tools)  # fmt: skip
        assert "calls of tools" in job_restart_reason(job, can, [Delta(1, 1, "x", (), n=3)])
        name = f"r{tools.choice}"
        await started.submit(chat(name, tools, past, max_tokens=3))
        (piece,) = started.pieces(name)
        assert (piece.text, piece.finish) == ("", "length")


# --- reasoning -------------------------------------------------------------------------------------------------------

THOUGHT = "<think>I see 🐟</think>\nFine."


async def test_reasoning_is_told_apart_and_goes_on_after_any_token(rig: Any) -> None:
    """What was shown before the loss and what comes after it is the same answer, and each token is counted once."""
    started = await rig()
    found, _ = await answer(started, chat(reasoning="default"), THOUGHT)
    assert found == Answer("Fine.", [], "I see 🐟")
    pieces = [piece for piece in started.pieces("r") if piece.n]
    for done in range(1, len(pieces)):
        past = [(piece.text, piece.ids, piece.n) for piece in pieces[:done]]
        rest = f"r{done}"
        more, _ = await answer(started, chat(rest, reasoning="default", past=past, max_tokens=99), THOUGHT)
        assert "".join(text for text, _, _ in past) + started.text(rest) == started.text("r"), more
        assert sum(n for _, _, n in past) + sum(piece.n for piece in started.pieces(rest)) == len(THOUGHT.encode())


async def test_an_agent_thinks_before_it_calls(rig: Any) -> None:
    started = await rig(guided_decoding="xgrammar")
    found, _ = await answer(started, chat(tools=AUTO, reasoning="default"), f"<think>{CALL}?</think>\n{CALL}")
    assert (found.text, found.reasoning, len(found.calls)) == ("", f"{CALL}?", 1)


async def test_half_a_character_in_a_call_is_no_text_and_ends_nothing(rig: Any) -> None:
    """A model may escape a lone surrogate. What a stop string cuts can be encoded, and so can what comes behind it."""
    started, half = await rig(), CALL.replace("1", '"\\ud83d", "y": 1')
    for stop, shown in (("y",), '{"x": "\ufffd", "'), ((), '{"x": "\ufffd", "y": 1}'):
        found, _ = await answer(started, chat(f"r{len(stop)}", tools=AUTO, stop=stop), half)
        assert found.calls == [Call("f", shown)]
        await started.turn()
    assert started.engine.health().ok


async def test_an_answer_that_cannot_be_read_ends_alone(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on, and the engine is told to forget it."""
    decode = TemplateTokenizer.decode

    def odd(self: TemplateTokenizer, token_ids: Any, **more: Any) -> str:
        if {*b"!a"} <= {*token_ids}:
            raise KeyError("token")
        return decode(self, token_ids, **more)

    started = await rig()
    started.llm.reply = "abc"
    monkeypatch.setattr(TemplateTokenizer, "decode", odd)
    await started.submit(Request("odd", "!", Sampling()))
    await started.submit(Request("good", "?", Sampling()))
    await started.turn()
    failure, output = started.failure("odd"), started.llm.live[0]
    assert (failure.code, failure.status, output.aborts) == ("engine_error", 500, 1)
    await started.finish("good")
    assert started.text("good") == "abc" and started.engine.health().ok
    assert len(started.pieces("odd")) == 1 and started.engine.stats().running == 0


async def test_the_effort_is_told_to_the_template(rig: Any) -> None:
    started = await rig()
    await started.submit(chat(reasoning="none"))
    assert TemplateTokenizer().decode(started.llm.calls[-1]["inputs"]).endswith("<think></think>")


async def test_a_stop_string_that_was_shown_ends_the_answer(rig: Any) -> None:
    """The worker was lost behind it, before the finish reason: the engine is not asked."""
    started = await rig()
    await started.submit(chat(past=[("one END", (), 2)], stop=("END",), max_tokens=9))
    (piece,) = started.pieces("r")
    assert (piece.text, piece.finish, started.llm.calls) == ("", "stop", [])


# --- sampling --------------------------------------------------------------------------------------------------------


async def test_a_text_that_may_not_end_keeps_its_end_tokens(rig: Any) -> None:
    """They count, are known to another attempt, and show nothing."""
    started = await rig()
    started.llm.reply = "a" * 9
    await started.submit(chat(ignore_eos=True, max_tokens=4, logprobs=0))
    assert params(started)["ignore_eos"] is True and params(started)["stop_token_ids"] is None
    output = started.llm.live[0]
    output.outputs[0].logprobs = [-1.0] * 4
    output.respond(lambda: output.outputs[0].token_ids.extend([97, END, 98]))
    await settle()
    (piece,) = started.pieces("r")
    assert (piece.text, piece.n, piece.ids, len(piece.logprobs)) == ("ab", 3, (97, END, 98), 2)


async def test_a_bias_is_a_number_for_each_token(rig: Any, library: SimpleNamespace, tmp_path: Path) -> None:
    """It is made where prompts are, so that no answer waits for it."""
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    zeros, threads = library.torch.zeros, list[str]()

    def noted(*args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return zeros(*args, **more)

    library.torch.zeros = noted
    started = await rig()
    await started.submit(chat(logit_bias={7: -100.0}))
    bias = params(started)["embedding_bias"]
    assert len(bias) == 300 and [token for token, value in enumerate(bias) if value] == [7] and bias[7] == -100
    await started.submit(chat("odd", logit_bias={300: 1.0}))
    assert (started.failure("odd").status, started.failure("odd").param) == (400, "logit_bias")
    assert [name.partition("_")[0] for name in threads] == ["trtllm-prompts"]


# --- the tokenizer's tasks -------------------------------------------------------------------------------------------


async def perform(rig: Rig, name: str, prompt: Any, **task: Any) -> Piece:
    rig.engine.submit(Request(name, prompt, Sampling(), task=Task(**task)))
    for _ in range(200):
        if rig.pieces(name):
            break
        await asyncio.sleep(0.01)
    (piece,) = rig.pieces(name)
    return piece


async def test_ids_of_a_prompt_and_the_text_of_ids(rig: Any) -> None:
    """The ids are those that an answer is computed from, and take no place of a request."""
    started = await rig()
    found = json.loads((await perform(started, "ids", USER, kind="tokenize")).text)
    await started.submit(chat())
    assert found == {"tokens": started.llm.calls[-1]["inputs"], "max_model_len": 4096}
    piece = await perform(started, "text", tuple(found["tokens"]), kind="detokenize")
    assert (piece.text, piece.finish, piece.n) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "stop", 0)
    assert len(started.llm.calls) == 1 and started.engine.stats().running == 1


async def test_a_task_that_fails_ends(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the requester's fault, and for the tokenizer's."""
    started = await rig()
    failure = (await perform(started, "odd", (262,), kind="detokenize")).failure
    assert failure is not None and (failure.status, failure.param) == (400, "tokens")

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("vocabulary")

    monkeypatch.setattr(TemplateTokenizer, "encode", broken)
    failure = (await perform(started, "broken", "a", kind="tokenize")).failure
    assert failure is not None and (failure.code, failure.status) == ("engine_error", 500)
    assert started.engine.health().ok
