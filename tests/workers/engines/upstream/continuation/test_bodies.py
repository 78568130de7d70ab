"""Request bodies for servers of each kind."""

from __future__ import annotations

import pytest

from penstock.engine import ChatTurn, Request, Sampling
from workers.engines.upstream.continuation import bodies
from workers.engines.upstream.continuation.ladder import Rung
from workers.engines.upstream.server import kinds

CHAT = [ChatTurn("user", "hi")]
KNOWN = ((" a", (1,), 1), (" b", (2,), 1))


def test_a_continued_prompt_holds_texts_where_ids_are_not_known() -> None:
    prompt = bodies.continued("p", Rung.IDS, (*KNOWN, ("😀", (9,), 3), (" d", (4,), 1)))
    assert prompt == ["p", 1, 2, "😀", 4]
    assert bodies.continued("p", Rung.IDS, (("😀", (9,), 3), (" d", (4,), 1))) == ["p😀", 4]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_strict_server_gets_standard_fields_alone(kind: str) -> None:
    facts = kinds.of(kind, model="m")
    standard = {
        "model", "stream", "messages", "prompt", "temperature", "top_p", "seed", "presence_penalty", "stream_options",
        "frequency_penalty", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "response_format",
    }  # fmt: skip
    sampling = Sampling(max_tokens=5, temperature=1, top_p=0.5, seed=-1, presence_penalty=1, json_schema={}, logprobs=2)
    path, body = bodies.build(facts, Request("r", CHAT, sampling), Rung.FRESH, (), None, limit=5)
    assert path == ("/completions" if kind == "llama-server" else "/chat/completions")
    assert not facts.strict or set(body) <= standard
    assert "stop" not in body and body.get("seed", 0) >= 0


def test_the_priority_has_the_servers_sign() -> None:
    request = Request("r", CHAT, Sampling(), priority=0.8)
    sent = {
        kind: bodies.build(kinds.of(kind), request, Rung.FRESH, (), None, send_priority=True)[1].get("priority")
        for kind in ("vllm", "sglang", "trtllm")
    }
    assert sent == {"vllm": 20, "sglang": 80, "trtllm": None}
