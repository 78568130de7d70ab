"""Tool calls and reasoning of answers, as OpenAI objects: in whole answers, chunks of a stream and a job's events.

A call's id follows from the job, the choice and the call's number, so that every replay of every process has the same.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from penstock.tools import REASONED, AnswerPart, CallReader, read_answer
from streaming.jobs.frames import Delta


def call_id(job_id: str, choice: int, number: int) -> str:
    """Return the id of a call of a choice; both are counted from 0."""
    return "call_" + hashlib.sha256(f"{job_id}/{choice}/{number}".encode()).hexdigest()[:24]


def message_of(job_id: str, choice: int, texts: Iterable[str]) -> dict[str, Any]:
    """Render an answer's message, given its text in pieces."""
    said, calls, reasoned = read_answer(texts)
    message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
    if reasoned:
        message["reasoning_content"] = reasoned
    if calls:
        message["content"] = said or None
        message["tool_calls"] = [
            {"id": call_id(job_id, choice, number), "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(calls)
        ]  # fmt: skip
    return message


def call_delta(job_id: str, choice: int, part: AnswerPart) -> dict[str, Any]:
    """Render a part of a call: its id, type and name only once, since clients join what they get."""
    shown: dict[str, Any] = {"index": part.call}
    if part.name is None:
        return shown | {"function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": part.text}
    return shown | {"id": call_id(job_id, choice, part.call), "type": "function", "function": function}


class CallParts:
    """Reads the deltas of one job whose answers may hold calls, from its first delta on."""

    def __init__(self) -> None:
        self._readers: defaultdict[int, CallReader] = defaultdict(CallReader)
        """By choice."""

    def of(self, delta: Delta) -> list[AnswerPart]:
        return self._readers[delta.index].feed(delta.text)


def event_data(job_id: str, choice: int, parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """Render the fields of a delta's event: its text, and its parts of calls and of reasoning."""
    said, reasoned, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        if part.call == REASONED:
            reasoned += part.text
        elif part.call < 0:
            said += part.text
        else:
            calls.append(call_delta(job_id, choice, part))
    data: dict[str, Any] = {"text": said}
    if reasoned:
        data["reasoning"] = reasoned
    return data | {"tool_calls": calls} if calls else data
