"""Event sequence of one response: its log and its terminal record as server-sent events.

A pure function of both, fed in steps: every replay has the same bytes, whichever process renders it and however the
deltas arrive. One delta of the log gives at most one event, and each event has the next number. If the engine must
start again, `begin_again` ends the item that was open as incomplete; the next text is a new item, and the numbers rise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.openai.errors import ApiError
from api.openai.rendering import DONE, Facts, to_json, token_logprobs
from api.openai.responses.items import output_item, output_item_id, output_text, refusal_part
from api.openai.responses.object import (
    AnswerItem,
    AnswerItems,
    Outcome,
    Status,
    error_object,
    form_of,
    outcome,
    response_object,
)
from penstock.extras import Extras
from penstock.tools import REASONED, REFUSED, SAID
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import JobState

DELTA = b"response.output_text.delta"
DELTA_END = b',"logprobs":%b,"sequence_number":%d}\n\n'
PLAIN_END = DELTA_END.replace(b"%b", b"[]")
"""What follows the text of a delta, and that of one without log-probabilities."""
START = -1
"""The cursor of a reader that has no event: the first has the number 0."""

LAST_EVENT: dict[Status, str] = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
}
"""The last event by the status of the response; a stream knows no event for a cancelled one."""


class EventSequence:
    """Renders one response for one reader: call `opening`, then `delta` for every delta in order, then `end`.

    `after` is the number of the last event that the reader has: earlier ones are counted, and not rendered.
    """

    __slots__ = (
        *("_after", "_delta_start", "_facts", "_logprobs", "_open", "_parts", "_refusal", "_running", "number"),
        *("output_index", "text"),
    )

    def __init__(self, facts: Facts, after: int = START) -> None:
        self._facts, self._after = facts, after
        self.number = 0
        """Number of the next event."""
        self.output_index = 0
        """Index of the item that is open, or comes next."""
        self.text = bytearray()
        """The open item's text as JSON, without its quotes: encoded once, though the end of an item repeats it."""
        self._logprobs = bytearray()
        """Likewise, its tokens' log-probabilities without the brackets."""
        self._refusal = ""
        """The open item's refusal."""
        self._parts: list[str] = []
        """Kinds of the open item's parts, in their order."""
        self._open = self._running = False
        self._delta_start = b""

    @property
    def has(self) -> int:
        """The number of the last event that the reader has."""
        return max(self._after, self.number - 1)

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """The constant bytes before the text of every further delta, and those after it, with %d for the number; None
        if they are not constant."""
        if (
            "output_text" not in self._parts
            or self.number <= self._after
            or self._facts.job.sampling.logprobs is not None
        ):
            return None
        return self._delta_start, PLAIN_END

    def opening(self) -> bytes:
        """Render the events of an accepted response; one in the background waits for a worker as `queued`."""
        if not form_of(self._facts.job).background:
            created = self._event("response.created", response=response_object(self._facts, "in_progress"))
            return created + self.running()
        queued = response_object(self._facts, "queued")
        return self._event("response.created", response=queued) + self._event("response.queued", response=queued)

    def running(self) -> bytes:
        """Render the event of a response that a worker has started. Idempotent."""
        if self._running:
            return b""
        self._running = True
        return self._event("response.in_progress", response=response_object(self._facts, "in_progress"))

    def delta(self, row: Delta) -> bytes:
        """Render a delta; b"" while its tokens are only part of a character."""
        refused = self._refuse(row.extras) if row.extras else b""
        if not row.text and not row.logprobs:
            return refused
        data = refused if "output_text" in self._parts else refused + self._begin_text()
        text, logprobs = to_json(row.text), b"[]"
        self.text += text[1:-1]
        if row.logprobs:
            logprobs = to_json(token_logprobs(row.logprobs))
            self._logprobs += (b"," if self._logprobs else b"") + logprobs[1:-1]
        number = self.number
        self.number += 1
        return data if number <= self._after else data + self._delta_start + text + DELTA_END % (logprobs, number)

    def _refuse(self, extras: Extras) -> bytes:
        """Render the refusal of a delta, which is a part of its own."""
        said = extras.get("delta", {}).get("refusal")
        if not isinstance(said, str) or not said:
            return b""
        data = b"" if self._open else self._begin_item()
        if not self._refusal:
            data += self._begin_part("refusal")
        self._refusal += said
        return data + self._event("response.refusal.delta", **self._place("refusal"), delta=said)

    def deltas(self, rows: Iterable[Delta]) -> bytes:
        """Render several deltas."""
        return b"".join([self.delta(row) for row in rows])

    def begin_again(self) -> bytes:
        """Render what ends a text that was given up: the engine starts again, and its text is another item."""
        if not self._open:
            return b""
        data = self._end_item("incomplete")
        self.output_index += 1
        self._open, self._parts, self._refusal = False, [], ""
        self.text, self._logprobs = bytearray(), bytearray()
        return data

    def end(self, terminal: Terminal) -> bytes:
        """Render what ends the stream, [DONE] included."""
        ended = outcome(terminal)
        data = self.running()
        if not self._open and terminal.state is JobState.COMPLETED:
            data += self._begin_text()
        output = list[Any]()
        if self._open:
            status = "completed" if ended.status == "completed" else "incomplete"
            data += self._end_item(status)
            output.append(self._item(status, self._content()))
        found = response_object(self._facts, ended.status, output=output, terminal=terminal, ended=ended)
        return data + self._event(LAST_EVENT[ended.status], response=found) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Render the end of a stream that this process cannot continue, though its job may go on. Items stay as they
        are: what is known here of the open one may not be what the reader has."""
        self.number = max(self.number, self._after + 1)
        failed = Outcome("failed", error=error_object(error.status, error.message))
        return self._event("response.failed", response=response_object(self._facts, "failed", ended=failed)) + DONE

    # --- items -------------------------------------------------------------------------------------------------------

    def _begin_item(self) -> bytes:
        running, self._open = self.running(), True
        item, index = self._item("in_progress", ()), self.output_index
        return running + self._event("response.output_item.added", output_index=index, item=item)

    def _begin_part(self, kind: str) -> bytes:
        self._parts.append(kind)
        part = output_text("") if kind == "output_text" else refusal_part("")
        return self._event("response.content_part.added", **self._place(kind), part=part)

    def _begin_text(self) -> bytes:
        data = (b"" if self._open else self._begin_item()) + self._begin_part("output_text")
        head = to_json({"type": DELTA.decode(), **self._place("output_text"), "delta": ""})
        self._delta_start = b"event: " + DELTA + b"\ndata: " + head[: -len(b'""}')]
        return data

    def _end_item(self, status: str) -> bytes:
        item, data = self._item(status, self._content()), b""
        for kind, part in zip(self._parts, self._content(), strict=True):
            done = {name: value for name, value in part.items() if name in ("text", "logprobs", "refusal")}
            data += self._event(f"response.{kind}.done", **self._place(kind), **done)
            data += self._event("response.content_part.done", **self._place(kind), part=part)
        return data + self._event("response.output_item.done", output_index=self.output_index, item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        item_id, index = output_item_id(self._facts.job.id, self.output_index), self._parts.index(kind)
        return {"item_id": item_id, "output_index": self.output_index, "content_index": index}

    def _content(self) -> list[dict[str, Any]]:
        return [self._part() if kind == "output_text" else refusal_part(self._refusal) for kind in self._parts]

    def _part(self) -> dict[str, Any]:
        return output_text(msgspec.Raw(b'"%b"' % bytes(self.text)), msgspec.Raw(b"[%b]" % bytes(self._logprobs)))

    def _item(self, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return output_item(output_item_id(self._facts.job.id, self.output_index), status, content)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self.number
        self.number += 1
        if number <= self._after:
            return b""
        data = to_json({"type": name, **fields, "sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class CallEventSequence(EventSequence):
    """Renders a response whose answer is read in parts. A delta of the log may give several events."""

    __slots__ = ("_answer", "_first")

    def __init__(self, facts: Facts, after: int = START) -> None:
        super().__init__(facts, after)
        self._answer = AnswerItems()
        self._first = 0
        """Index of the answer's first item: those before it were given up."""

    @property
    def plain(self) -> None:
        """None: what a text means depends on those before it."""
        return None

    def delta(self, row: Delta) -> bytes:
        data = b""
        for item, part, begins in self._answer.feed(row):
            if begins:
                data += self._begin(item)
            if part.text:
                data += self._event(
                    f"{_kind(item)}.delta", **self._at(item), delta=part.text, **self._logprobs_of(item)
                )
        return data

    def begin_again(self) -> bytes:
        items = self._answer.items
        if not items:
            return b""
        data = self._close(items[-1], "incomplete")
        self._first += len(items)
        self._answer = AnswerItems()
        return data

    def end(self, terminal: Terminal) -> bytes:
        ended = outcome(terminal)
        status, data, items = ended.status, self.running(), self._answer.items
        if not items and terminal.state is JobState.COMPLETED:
            items.append(AnswerItem(SAID))
            data += self._begin(items[-1])
        last = "completed" if status == "completed" else "incomplete"
        if items:
            data += self._close(items[-1], last)
        output = [
            item.shown(self._facts.job.id, self._first + place, last if item is items[-1] else "completed")
            for place, item in enumerate(items)
        ]
        found = response_object(self._facts, status, output=output, terminal=terminal, ended=ended)
        return data + self._event(LAST_EVENT[status], response=found) + DONE

    def _begin(self, item: AnswerItem) -> bytes:
        """Render what ends the item before, and what begins this one."""
        data, before = self.running(), self._answer.items[:-1]
        if before:
            data += self._close(before[-1], "completed", at=len(before) - 1)
        index = self._first + len(before)
        shown = item.shown(self._facts.job.id, index, "in_progress", begun=True)
        data += self._event("response.output_item.added", output_index=index, item=shown)
        if item.number < 0:
            data += self._event("response.content_part.added", **self._at(item), part=item.part(""))
        return data

    def _close(self, item: AnswerItem, status: str, at: int | None = None) -> bytes:
        at = len(self._answer.items) - 1 if at is None else at
        place, text = self._at(item, at), item.text
        if item.number < 0:
            said = {"refusal" if item.number == REFUSED else "text": text}
            data = self._event(f"{_kind(item)}.done", **place, **said, **self._logprobs_of(item))
            data += self._event("response.content_part.done", **place, part=item.part(text))
        else:
            data = self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        shown = item.shown(self._facts.job.id, self._first + at, status)
        return data + self._event("response.output_item.done", output_index=self._first + at, item=shown)

    def _at(self, item: AnswerItem, at: int | None = None) -> dict[str, Any]:
        """The fields that say where an item is; None: it is the last one."""
        index = self._first + (len(self._answer.items) - 1 if at is None else at)
        item_id = item.shown(self._facts.job.id, index, "", begun=True)["id"]
        return {"item_id": item_id, "output_index": index} | ({"content_index": 0} if item.number < 0 else {})

    @staticmethod
    def _logprobs_of(item: AnswerItem) -> dict[str, Any]:
        return {"logprobs": []} if item.number == SAID else {}


def _kind(item: AnswerItem) -> str:
    """What the events of an item's text are called."""
    if item.number == REFUSED:
        return "response.refusal"
    if item.number == REASONED:
        return "response.reasoning_text"
    return "response.output_text" if item.number == SAID else "response.function_call_arguments"


def sequence_of(facts: Facts, after: int = START) -> EventSequence:
    """Return the event sequence of a response for a reader that has its events up to number `after`."""
    return (CallEventSequence if facts.job.parted else EventSequence)(facts, after)
