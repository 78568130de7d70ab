"""The continuation ladder, and what `penstock doctor` says of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine import ChatTurn, Request, Sampling
from workers.engines.upstream import continuation, server
from workers.engines.upstream.continuation import Rung, summary

CHAT = [ChatTurn("user", "hi")]
KNOWN = ((" a", (1,), 1), (" b", (2,), 1))


def way(kind: str, prompt: Any = CHAT, rows: Any = KNOWN, tried: Any = (), **sampling: Any) -> Rung:
    return continuation.choose(server.of(kind), Request("r", prompt, Sampling(**sampling)), rows, tried).rung


def test_nothing_is_continued_before_anything_was_shown() -> None:
    assert way("vllm", rows=(), json_schema={}) is Rung.FRESH


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


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_continue_only_where_they_span(penalty: str) -> None:
    assert way("llama-server", **{penalty: 0.5}) is Rung.IDS
    assert way("vllm", **{penalty: 0.5}) is Rung.RESTART
    assert way("vllm", **{penalty: 0.5}, temperature=0) is Rung.REPLAY
    assert way("vllm", **{penalty: 0.0}) is Rung.IDS


def test_a_repetition_penalty_continues_where_it_counts_the_prompt() -> None:
    assert way("llama-server", repetition_penalty=1.3) is way("vllm", repetition_penalty=1.3) is Rung.IDS
    assert way("trtllm", "text", repetition_penalty=1.3) is Rung.RESTART
    assert way("trtllm", "text", repetition_penalty=1.0) is way("trtllm", "text") is not Rung.RESTART


@pytest.mark.parametrize("kind", server.KINDS)
def test_reasoning_is_spliced_only_where_the_model_s_own_tags_are_known(kind: str) -> None:
    """llama-server gets a prompt and gives them; the others tell it apart."""
    for effort in ("default", "low"):
        request = Request("r", CHAT, Sampling(), reasoning=effort)
        found = continuation.choose(server.of(kind), request, KNOWN).rung
        assert found is (Rung.IDS if kind == "llama-server" else Rung.RESTART)


def test_ids_are_continued_only_if_all_are_known() -> None:
    """llama-server takes texts between them."""
    gap = (*KNOWN, (" c", (), 1))
    assert way("vllm", rows=gap) is Rung.PREFILL and way("vllm", "text", gap) is Rung.TEXT
    assert way("llama-server", rows=gap) is Rung.IDS


def test_it_says_how_answers_continue() -> None:
    llama = server.of("llama-server", model="m", context=2048, slots=1)
    said = "llama-server: m; 2048 tokens; runs 1 request at once; continues chats by token ids; texts by token ids"
    assert summary(llama) == said
    assert summary(server.of("llama-server", reattach="stream")).endswith("goes on with answers whose reader is lost")
    assert "goes on" in summary(server.of("penstock")) and "goes on" not in summary(server.of("vllm"))
