"""Tool calls and reasoning of answers, as OpenAI objects: in whole answers, chunks of a stream and a job's events.

A call has the id that the model's server gave it, which some servers want back. Else its id follows from the job, the
choice and the call's number, so that every replay of every process has the same.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from penstock.extras import Extras
from penstock.tools import REASONED, AnswerPart, CallReader, read_answer
from streaming.jobs.codec import Delta


def call_id(job_id: str, choice: int, number: int, extras: Extras) -> str:
    """Return the id of a call of a choice; both are counted from 0. `extras`: of the call."""
    made = "call_" + hashlib.sha256(f"{job_id}/{choice}/{number}".encode()).hexdigest()[:24]
    return str(extras.get("id") or made)


def further(extras: Extras) -> Extras:
    """The extras of a call that are fields beside its function."""
    return {name: value for name, value in extras.items() if name not in ("id", "function")}


def message_of(job_id: str, choice: int, texts: Iterable[str], extras: Extras) -> dict[str, Any]:
    """Render an answer's message, given its text in pieces, and its extras."""
    said, calls, reasoned = read_answer(texts)
    message = plain_message(said, extras)
    if reasoned:
        message["reasoning_content"] = reasoned
    if calls:
        message["content"] = said or None
        message["tool_calls"] = []
    for number, call in enumerate(calls):
        own = extras.get("calls", {}).get(str(number), {})
        function = {**own.get("function", {}), "name": call.name, "arguments": call.arguments}
        found = {"id": call_id(job_id, choice, number, own), "type": "function", "function": function}
        message["tool_calls"].append({**further(own), **found})
    return message


def plain_message(text: str, extras: Extras) -> dict[str, Any]:
    """Render the message of an answer without calls. One that refuses has no content."""
    fields = extras.get("delta", {})
    content = None if fields.get("refusal") and not text else text
    return {"role": "assistant", "content": content, "refusal": None, **fields}


def call_delta(job_id: str, choice: int, part: AnswerPart) -> dict[str, Any]:
    """Render a part of a call: its id, type and name only once, since clients join what they get."""
    shown: dict[str, Any] = {"index": part.call, **further(part.extras)}
    function = {**part.extras.get("function", {}), "arguments": part.text}
    if part.name is None:
        return shown | {"function": function}
    named = {"id": call_id(job_id, choice, part.call, part.extras), "type": "function"}
    return shown | named | {"function": {"name": part.name, **function}}


class CallParts:
    """Reads the deltas of one job whose answers may hold calls, from its first delta on."""

    def __init__(self) -> None:
        self._readers: defaultdict[int, CallReader] = defaultdict(CallReader)
        """By choice."""
        self._early: dict[int, Extras] = {}
        """By choice: extras of calls that have not begun yet."""

    def of(self, delta: Delta) -> list[AnswerPart]:
        reader = self._readers[delta.index]
        parts = reader.feed(delta.text)
        calls = {**self._early.pop(delta.index, {}), **delta.extras.get("calls", {})} if self._has(delta) else {}
        if not calls:
            return parts
        parts = [part._replace(extras=calls.pop(str(part.call), {})) for part in parts]
        begun = [number for number in calls if int(number) < reader.calls]
        parts += [AnswerPart(int(number), None, "", calls.pop(number)) for number in begun]
        if calls:
            self._early[delta.index] = calls
        return parts

    def _has(self, delta: Delta) -> bool:
        return bool(delta.extras) or delta.index in self._early


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
