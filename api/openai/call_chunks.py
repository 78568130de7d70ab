"""Chunk renderer of chats with tools: renders a stream whose text may hold calls."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from api.openai.rendering import ChunkRenderer, Facts, to_json
from api.openai.tool_calls import CallParts, call_delta
from penstock.tools import AnswerPart
from streaming.jobs.frames import Delta


class CallChunkRenderer(ChunkRenderer):
    """Renders the stream of a chat with tools."""

    def __init__(self, facts: Facts, *, include_usage: bool = False) -> None:
        super().__init__(facts, include_usage=include_usage)
        self._parts = CallParts()

    def delta(self, delta: Delta) -> bytes:
        if delta.served_by:
            self._servers[delta.index] = delta.served_by
        return b"".join([self._part(delta, part) for part in self._parts.of(delta)])

    @property
    def plain(self) -> None:
        """None: what a text means depends on those before it."""
        return None

    def _part(self, delta: Delta, part: AnswerPart) -> bytes:
        index = delta.index
        if part.call < 0:
            return super().delta(replace(delta, text=part.text, logprobs=(), served_by=""))
        first = self._prefix[index] is not self._later[index]
        self._prefix[index] = self._later[index]
        said: dict[str, Any] = {"role": "assistant", "content": None} if first else {}
        said["tool_calls"] = [call_delta(self._facts.job, index, part)]
        choice = {"index": index, "delta": said, "logprobs": None, "finish_reason": None}
        return self._head + to_json(choice) + self._tail_of(index)
