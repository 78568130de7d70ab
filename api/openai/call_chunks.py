"""Chunk renderer of chats with tools or reasoning: renders a stream whose text may hold both."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from api.openai.logprobs import chat_logprobs
from api.openai.rendering import ChunkRenderer, Facts, to_json
from api.openai.tool_calls import CallParts, call_delta
from penstock.engine import Logprob
from penstock.tools import REASONED, SAID, AnswerPart
from streaming.jobs.codec import Delta


class CallChunkRenderer(ChunkRenderer):
    """Renders the stream of a chat whose text is read in parts."""

    def __init__(self, facts: Facts, *, include_usage: bool = False) -> None:
        super().__init__(facts, include_usage=include_usage)
        self._parts = CallParts()

    def delta(self, delta: Delta) -> bytes:
        if delta.served_by:
            self._servers[delta.index] = delta.served_by
        parts = self._parts.of(delta)
        further = self._extras(replace(delta, text="", logprobs=())) if delta.extras else b""
        if not self._logprobs:
            return b"".join([self._part(delta, part) for part in parts]) + further
        rest = [self._part(delta, part) for part in parts[:-1]]
        last = parts[-1] if parts else AnswerPart(SAID, None, "")
        return b"".join([*rest, self._part(delta, last, delta.logprobs), further])

    @property
    def plain(self) -> None:
        """None: what a text means depends on those before it."""
        return None

    def _part(self, delta: Delta, part: AnswerPart, logprobs: tuple[Logprob, ...] = ()) -> bytes:
        """Render a part of a delta; its last one has the log-probabilities of all of it."""
        index = delta.index
        if part.call == SAID:
            return super().delta(replace(delta, text=part.text, logprobs=logprobs, served_by="", extras={}))
        first = self._prefix[index] is not self._later[index]
        self._prefix[index] = self._later[index]
        said: dict[str, Any] = {"role": "assistant", "content": None} if first else {}
        if part.call == REASONED:
            said["reasoning_content"] = part.text
        else:
            said["tool_calls"] = [call_delta(self._facts.job, index, part)]
        shown = chat_logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": said, "logprobs": shown, "finish_reason": None}
        return self._head + to_json(choice) + self._tail_of(index)
