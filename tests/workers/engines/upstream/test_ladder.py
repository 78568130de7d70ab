"""The continuation ladder, what `penstock doctor` says of it, and request bodies for servers of each kind."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine import ChatTurn, Request, Sampling
from streaming.jobs.job import HINTS
from workers.engines.upstream import continuation, server
from workers.engines.upstream.continuation import Rung, summary
from workers.engines.upstream.settings import UpstreamSettings

CHAT = [ChatTurn("user", "hi")]
KNOWN = ((" a", (1,), 1), (" b", (2,), 1))
PENALTIES = ("presence_penalty", "frequency_penalty")


def way(kind: str, prompt: Any = CHAT, rows: Any = KNOWN, tried: Any = (), **sampling: Any) -> Rung:
    return continuation.choose(server.of(kind), Request("r", prompt, Sampling(**sampling)), rows, tried)[0]


@pytest.mark.parametrize("kind", [*server.KINDS])
@pytest.mark.parametrize("case", ["json", "reasoning"])
def test_json_and_reasoning_are_never_spliced(kind: str, case: str) -> None:
    """They are replayed where that may give the same, and begun again otherwise."""
    rows = KNOWN if case == "json" else (("", (), 3), *KNOWN)
    schema = {"json_schema": {}} if case == "json" else {}
    for prompt in (CHAT, "text", [1, 2]):
        assert way(kind, prompt, rows, temperature=0, **schema) is Rung.REPLAY
        assert way(kind, prompt, rows, seed=4, **schema) is Rung.REPLAY
        assert way(kind, prompt, rows, **schema) is Rung.RESTART
        assert way(kind, prompt, rows, {Rung.REPLAY}, temperature=0, **schema) is Rung.RESTART


GAP = (*KNOWN, (" c", (), 1))
RUNGS: list[tuple[str, Any, Any, dict[str, Any], Rung]] = [  # kind, prompt, rows, sampling, and how it continues
    *[("llama-server", CHAT, KNOWN, {name: 0.5}, Rung.IDS) for name in PENALTIES],
    *[("vllm", CHAT, KNOWN, {name: 0.5}, Rung.RESTART) for name in PENALTIES],
    *[("vllm", CHAT, KNOWN, {name: 0.5, "temperature": 0}, Rung.REPLAY) for name in PENALTIES],
    *[("vllm", CHAT, KNOWN, {name: 0.0}, Rung.IDS) for name in PENALTIES],
    *[(kind, CHAT, KNOWN, {"repetition_penalty": 1.3}, Rung.IDS) for kind in ("llama-server", "vllm")],
    ("trtllm", "text", KNOWN, {"repetition_penalty": 1.3}, Rung.RESTART),
    ("trtllm", "text", KNOWN, {"repetition_penalty": 1.0}, Rung.IDS),
    ("vllm", CHAT, (), {"json_schema": {}}, Rung.FRESH),
    # Ids are continued only if all are known; llama-server takes texts between them.
    ("vllm", CHAT, GAP, {}, Rung.PREFILL),
    ("vllm", "text", GAP, {}, Rung.TEXT),
    ("llama-server", CHAT, GAP, {}, Rung.IDS),
]


@pytest.mark.parametrize(("kind", "prompt", "rows", "sampling", "rung"), RUNGS)
def test_the_best_rung_that_keeps_what_was_shown(
    kind: str, prompt: Any, rows: Any, sampling: dict[str, Any], rung: Rung
) -> None:
    assert way(kind, prompt, rows, **sampling) is rung


@pytest.mark.parametrize("effort", ["default", "low"])
@pytest.mark.parametrize("kind", server.KINDS)
def test_reasoning_is_spliced_only_where_the_model_s_own_tags_are_known(kind: str, effort: str) -> None:
    """llama-server gets a prompt and gives them; the others tell it apart."""
    found = continuation.choose(server.of(kind), Request("r", CHAT, Sampling(), reasoning=effort), KNOWN)[0]
    assert found is (Rung.IDS if kind == "llama-server" else Rung.RESTART)


def test_it_says_how_answers_continue() -> None:
    llama = server.of("llama-server", model="m", context=2048, slots=1)
    said = "llama-server: m; 2048 tokens; runs 1 request at once; continues chats by token ids; texts by token ids"
    assert summary(llama) == said
    assert summary(server.of("llama-server", reattach="stream")).endswith("goes on with answers whose reader is lost")
    assert "goes on" in summary(server.of("penstock")) and "goes on" not in summary(server.of("vllm"))


PLAIN = UpstreamSettings()


def test_a_continued_prompt_holds_texts_where_ids_are_not_known() -> None:
    prompt = continuation.continued("p", Rung.IDS, (*KNOWN, ("😀", (9,), 3), (" d", (4,), 1)))
    assert prompt == ["p", 1, 2, "😀", 4]
    assert continuation.continued("p", Rung.IDS, (("😀", (9,), 3), (" d", (4,), 1))) == ["p😀", 4]


@pytest.mark.parametrize("kind", server.KINDS)
def test_a_strict_server_gets_standard_fields_alone(kind: str) -> None:
    facts = server.of(kind, model="m")
    standard = {
        "model", "stream", "messages", "prompt", "temperature", "top_p", "seed", "presence_penalty", "stream_options",
        "frequency_penalty", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format",
    }  # fmt: skip
    sampling = Sampling(max_tokens=5, temperature=1, top_p=0.5, seed=-1, presence_penalty=1, json_schema={}, logprobs=2)
    hints = dict.fromkeys(HINTS, "x")
    path, body = continuation.build(
        facts, Request("r", CHAT, sampling, passed=hints), Rung.FRESH, (), None, PLAIN, limit=5
    )
    assert path == ("/completions" if kind == "llama-server" else "/chat/completions")
    assert not facts.strict or set(body) <= standard | (HINTS if kind == "openai" else set())
    assert "stop" not in body and body.get("seed", 0) >= 0


FURTHER = Sampling(top_k=0, min_p=0.2, repetition_penalty=1.2, logit_bias={7: -100.0}, ignore_eos=True)
COMMON = {"min_p": 0.2, "logit_bias": {"7": -100.0}, "ignore_eos": True}


@pytest.mark.parametrize(("kind", "sent"), [
    ("llama-server", {"top_k": 0, "repeat_penalty": 1.2}),
    ("vllm", {"top_k": -1, "repetition_penalty": 1.2}),
    ("sglang", {"top_k": -1, "repetition_penalty": 1.2}),
    ("trtllm", {"top_k": 0, "repetition_penalty": 1.2}),
])  # fmt: skip
def test_further_sampling_goes_by_the_names_of_the_kind(kind: str, sent: dict[str, Any]) -> None:
    facts = server.of(kind, model="m")
    can = facts.capabilities()
    assert can.top_k and can.min_p and can.repetition_penalty and can.logit_bias and can.ignore_eos
    without = continuation.build(facts, Request("r", CHAT, Sampling()), Rung.FRESH, (), None, PLAIN)[1]
    body = continuation.build(facts, Request("r", CHAT, FURTHER), Rung.FRESH, (), None, PLAIN)[1]
    assert {name: value for name, value in body.items() if name not in without} == sent | COMMON


@pytest.mark.parametrize("kind", ["tgi", "ollama", "mistral", "deepseek", "openai", "other"])
def test_a_server_gets_no_field_that_it_lacks(kind: str) -> None:
    """Also not its neutral value, which the door lets pass."""
    facts = server.of(kind, model="m")
    assert not (facts.top_k or facts.min_p or facts.repetition_penalty or facts.ignore_eos) and facts.logit_bias is (
        kind == "openai"
    )
    neutral = Sampling(top_k=0, min_p=0.0, repetition_penalty=1.0)
    plain = continuation.build(facts, Request("r", CHAT, Sampling()), Rung.FRESH, (), None, PLAIN)
    assert continuation.build(facts, Request("r", CHAT, neutral), Rung.FRESH, (), None, PLAIN) == plain


def test_the_priority_has_the_servers_sign() -> None:
    request = Request("r", CHAT, Sampling(), priority=0.8)
    settings = UpstreamSettings(send_priority=True)
    sent = {
        kind: continuation.build(server.of(kind), request, Rung.FRESH, (), None, settings)[1].get("priority")
        for kind in ("vllm", "sglang", "trtllm")
    }
    assert sent == {"vllm": 20, "sglang": 80, "trtllm": None}
