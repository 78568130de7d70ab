"""What `penstock doctor` says of a server."""

from __future__ import annotations

from workers.engines.upstream import server
from workers.engines.upstream.continuation import summary


def test_it_says_how_answers_continue() -> None:
    llama = server.of("llama-server", model="m", context=2048, slots=1)
    said = "llama-server: m; 2048 tokens; runs 1 request at once; continues chats by token ids; texts by token ids"
    assert summary(llama) == said
    assert summary(server.of("llama-server", reattach="stream")).endswith("goes on with answers whose reader is lost")
    assert "goes on" in summary(server.of("penstock")) and "goes on" not in summary(server.of("vllm"))
