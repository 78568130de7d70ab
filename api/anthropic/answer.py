"""Answers of the Messages API: a job as a message, and its server-sent events.

The events are a pure function of a job's log and its terminal record: every replay has the same bytes, whichever
process renders it. The id of an event is its number. The numbers of a text that the engine began again start at the
next multiple of SPAN, so no event of it has the number of one of the text that was given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from api.anthropic.blocks import tool_use
from api.openai.errors import from_terminal
from api.openai.rendering import Facts, call_id, to_json
from api.openai.responses.object import AnswerItem, AnswerItems
from penstock.loops import ROWS_PER_SLICE, Sliced
from penstock.tools import REASONED, REFUSED, SAID
from streaming.jobs.codec import Delta, Terminal, Usage
from streaming.jobs.job import Job, JobState
from streaming.order import Priority

MESSAGE = "msg_"
TIER = {Priority.INTERACTIVE: "priority", Priority.STANDARD: "standard", Priority.BATCH: "batch"}
"""The `service_tier` reported for each lane."""
STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def message_id(job_id: str) -> str:
    return MESSAGE + job_id


def job_of(message: str) -> str:
    """Return the job of a message; "" if this is no id of a message. The job's id itself is not checked."""
    return message.removeprefix(MESSAGE) if message.startswith(MESSAGE) else ""


def usage_object(job: Job, usage: Usage | None = None) -> dict[str, Any]:
    """Render token counts; 0 before they are known. Tokens of a cached prompt count apart."""
    prompt, cached, completion = (usage.prompt, usage.cached, usage.completion) if usage else (0, 0, 0)
    counts = {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {**counts, "output_tokens": completion, "service_tier": TIER[job.priority]}


def message_object(
    job: Job, content: Sequence[Any], stop: dict[str, Any], usage: Usage | None = None
) -> dict[str, Any]:
    """Render a message with its `stop_reason` and `stop_sequence`."""
    head = {"id": message_id(job.id), "type": "message", "role": "assistant", "model": job.full_model}
    return {**head, "content": content, **stop, "usage": usage_object(job, usage)}


def message_in_slices(facts: Facts, terminal: Terminal, rows: Sequence[Delta]) -> Sliced[dict[str, Any]]:
    """Render the message of a completed job, in slices of `ROWS_PER_SLICE` deltas."""
    job, answer = facts.job, AnswerItems(facts.job)
    for first in range(0, len(rows), ROWS_PER_SLICE):
        if first:
            yield
        answer.take(rows[first : first + ROWS_PER_SLICE])
    stop = _stop(terminal, answer.items, next(filter(None, [_stopped_by(job, row) for row in rows]), None))
    content = [_block(job, item) for item in answer.items if _is_shown(job, item)]
    return message_object(job, content or [{"type": "text", "text": ""}], stop, terminal.usage)


NOT_STOPPED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}


def _stop(terminal: Terminal, items: Iterable[AnswerItem], stopped_by: str | None) -> dict[str, Any]:
    numbers = {item.number for item in items}
    said = "refusal" if REFUSED in numbers else "stop_sequence" if stopped_by else "end_turn"
    ended = "tool_use" if max(numbers, default=SAID) >= 0 else said
    reason = STOP_REASONS.get("".join(terminal.finishes[:1])) or ended
    return {"stop_reason": reason, "stop_sequence": stopped_by if reason == "stop_sequence" else None}


def _stopped_by(job: Job, row: Delta) -> str | None:
    """The stop sequence that ended the text; None if none did, or one that nobody asked for."""
    said = row.extras.get("choice", {}).get("stop_reason") if row.extras else None
    return said if said in job.sampling.stop else None


def _is_shown(job: Job, item: AnswerItem) -> bool:
    return item.number != REASONED or (job.message is not None and job.message.thinking)


def _block(job: Job, item: AnswerItem, *, begun: bool = False) -> dict[str, Any]:
    """Render an item of an answer; one that has just begun is empty. A signature vouches for nothing: it is there
    because clients expect one."""
    text = "" if begun else item.text
    if item.number == REASONED:
        return {"type": "thinking", "thinking": text, "signature": "" if begun else job.id}
    if item.number < 0:
        return {"type": "text", "text": text}
    return tool_use(call_id(job.id, 0, item.number, item.extras), item.name, text)


def model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Render OpenAI's model objects as a page of this API."""
    data = [model_object(model) for model in models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


def model_object(model: Mapping[str, Any]) -> dict[str, Any]:
    made = datetime.fromtimestamp(model["created"], UTC).isoformat()
    named = {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": made}
    return {**named, "lifecycle": "active", "max_input_tokens": model.get("context_length")}


# --- its events ------------------------------------------------------------------------------------------------------


SPAN = 10**9
START = -1
"""The cursor of a reader that has no event."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
PLAIN_END = b"}}\nid: %d\n\n"
"""What follows the text of a delta."""


class MessageEvents:
    """Renders one message for one reader: call `delta` for every delta in order, then `end`.

    Args:
        resets: how often the job's events began anew.
        after: number of the last event that the reader has: earlier ones are counted, and not rendered.
    """

    __slots__ = ("_after", "_answer", "_begun", "_blocks", "_delta_start", "_job", "_open", "_stopped_by", "number",
                 "pieces")  # fmt: skip

    def __init__(self, job: Job, resets: int = 0, after: int = START) -> None:
        self._job, self._after, self._answer = job, after, AnswerItems(job)
        self.number = resets * SPAN
        """Number of the next event."""
        self.pieces = deque[str](maxlen=0)
        """Takes the text that is written past this object: no event repeats it."""
        self._begun, self._blocks = False, 0
        self._open: AnswerItem | None = None
        """The item whose block is open."""
        self._delta_start = b""
        self._stopped_by: str | None = None

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """As that of `EventSequence`."""
        if self._open is None or self._open.number != SAID or self._job.parted or self.number <= self._after:
            return None
        return self._delta_start, PLAIN_END

    def delta(self, row: Delta) -> bytes:
        """Render a delta; b"" while its tokens are only part of a character."""
        data = self._begin()
        for item, part, begins in self._answer.feed(row):
            if not _is_shown(self._job, item):
                continue
            if begins:
                data += self._close() + self._begin_block(item)
            if part.text:
                data += self._event("content_block_delta", index=self._blocks - 1, delta=_delta(item, part.text))
        self._stopped_by = self._stopped_by or _stopped_by(self._job, row)
        return data

    def deltas(self, rows: Iterable[Delta]) -> bytes:
        """Render several deltas."""
        return b"".join([self.delta(row) for row in rows])

    def end(self, terminal: Terminal) -> bytes:
        """Render the last events. Raises ApiError for a job that did not complete."""
        if terminal.state is not JobState.COMPLETED:
            raise from_terminal(terminal)
        data = self._begin()
        if not self._blocks:
            data += self._begin_block(self._answer.begin(SAID))
        stop = _stop(terminal, self._answer.items, self._stopped_by)
        data += self._close() + self._event("message_delta", delta=stop, usage=usage_object(self._job, terminal.usage))
        return data + self._event("message_stop")

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._event("message_start", message=message_object(self._job, [], NOT_STOPPED))

    def _begin_block(self, item: AnswerItem) -> bytes:
        self._open, index = item, self._blocks
        self._blocks += 1
        head = to_json({"type": "content_block_delta", "index": index, "delta": _delta(item, "")})
        self._delta_start = b"event: content_block_delta\ndata: " + head[: -len(b'""}}')]
        return self._event("content_block_start", index=index, content_block=_block(self._job, item, begun=True))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        data, index = b"", self._blocks - 1
        if self._open.number == REASONED:
            signed = {"type": "signature_delta", "signature": self._job.id}
            data = self._event("content_block_delta", index=index, delta=signed)
        self._open = None
        return data + self._event("content_block_stop", index=index)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        number = self.number
        self.number += 1
        if number <= self._after:
            return b""
        return b"event: %b\ndata: %b\nid: %d\n\n" % (event.encode(), to_json({"type": event, **fields}), number)


def _delta(item: AnswerItem, text: str) -> dict[str, str]:
    if item.number == REASONED:
        return {"type": "thinking_delta", "thinking": text}
    if item.number >= 0:
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}
