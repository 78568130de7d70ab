"""Event sequence of one response: its log and its terminal record as server-sent events.

A pure function of both, fed in steps: every replay has the same bytes, whichever process renders it and however the
deltas arrive. Each event has the next number. If the engine must start again, `begin_again` ends the item that was open
as incomplete; the next text is a new item, and the numbers rise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from api.openai.errors import ApiError
from api.openai.rendering import DONE, Facts, to_json, token_logprobs
from api.openai.responses.object import (
    AnswerItem,
    AnswerItems,
    Outcome,
    Status,
    ended_object,
    error_object,
    form_of,
    outcome,
    response_object,
)
from penstock.tools import REASONED, REFUSED, SAID
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import JobState

DELTA = b"response.output_text.delta"
PLAIN_END = b',"logprobs":[],"sequence_number":%d}\n\n'
"""What follows the text of a delta without log-probabilities."""
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

    __slots__ = ("_after", "_answer", "_delta_start", "_facts", "_first", "_running", "number", "pieces")

    def __init__(self, facts: Facts, after: int = START) -> None:
        self._facts, self._after = facts, after
        self.number = 0
        """Number of the next event."""
        self._answer = AnswerItems(parted=facts.job.parted)
        self._first = 0
        """Index of the answer's first item: those before it were given up."""
        self.pieces: list[str] = []
        """Those of the open item."""
        self._running = False
        self._delta_start = b""

    @property
    def has(self) -> int:
        """The number of the last event that the reader has."""
        return max(self._after, self.number - 1)

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """The constant bytes before the text of every further delta, and those after it, with %d for the number; None
        if they are not constant: the text may hold calls, or has log-probabilities."""
        job, items = self._facts.job, self._answer.items
        if not items or items[-1].number != SAID or self.number <= self._after:
            return None
        return None if job.parted or job.sampling.logprobs is not None else (self._delta_start, PLAIN_END)

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
        data = b""
        for item, part, begins in self._answer.feed(row):
            if begins:
                data += self._begin(item)
            logprobs = [] if self._facts.job.parted else token_logprobs(row.logprobs)
            if part.text or logprobs:
                shown = {"logprobs": logprobs} if item.number == SAID else {}
                data += self._event(f"{_kind(item)}.delta", **self._place(item), delta=part.text, **shown)
        return data

    def deltas(self, rows: Iterable[Delta]) -> bytes:
        """Render several deltas."""
        return b"".join([self.delta(row) for row in rows])

    def begin_again(self) -> bytes:
        """Render what ends a text that was given up: the engine starts again, and its text is other items."""
        items = self._answer.items
        if not items:
            return b""
        data = self._close(items[-1], "incomplete")
        self._first += len(items)
        self._answer = AnswerItems(parted=self._facts.job.parted)
        return data

    def end(self, terminal: Terminal) -> bytes:
        """Render what ends the stream, [DONE] included."""
        status, data, items = outcome(terminal).status, self.running(), self._answer.items
        if not items and terminal.state is JobState.COMPLETED:
            items.append(AnswerItem(SAID))
            data += self._begin(items[-1])
        if items:
            data += self._close(items[-1], "completed" if status == "completed" else "incomplete")
        found = ended_object(self._facts, terminal, items, self._first)
        return data + self._event(LAST_EVENT[status], response=found) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Render the end of a stream that this process cannot continue, though its job may go on. Items stay as they
        are: what is known here of the open one may not be what the reader has."""
        self.number = max(self.number, self._after + 1)
        failed = Outcome("failed", error=error_object(error.status, error.message))
        return self._event("response.failed", response=response_object(self._facts, "failed", ended=failed)) + DONE

    # --- items -------------------------------------------------------------------------------------------------------

    def _begin(self, item: AnswerItem) -> bytes:
        """Render what ends the item before, and what begins this one."""
        data, before = self.running(), self._answer.items[:-1]
        if before:
            data += self._close(before[-1], "completed")
        place, self.pieces = self._place(item), item.pieces
        shown = item.shown(self._facts.job.id, place["output_index"], "in_progress", begun=True)
        data += self._event("response.output_item.added", output_index=place["output_index"], item=shown)
        if item.number < 0:
            data += self._event("response.content_part.added", **place, part=item.part(begun=True))
        head = to_json({"type": DELTA.decode(), **place, "delta": ""})
        self._delta_start = b"event: " + DELTA + b"\ndata: " + head[: -len(b'""}')]
        return data

    def _close(self, item: AnswerItem, status: str) -> bytes:
        place = self._place(item)
        if item.number < 0:
            part = item.part()
            said = {name: value for name, value in part.items() if name in ("text", "logprobs", "refusal")}
            data = self._event(f"{_kind(item)}.done", **place, **said)
            data += self._event("response.content_part.done", **place, part=part)
        else:
            data = self._event(f"{_kind(item)}.done", **place, name=item.name, arguments=item.text)
        index = place["output_index"]
        shown = item.shown(self._facts.job.id, index, status)
        return data + self._event("response.output_item.done", output_index=index, item=shown)

    def _place(self, item: AnswerItem) -> dict[str, Any]:
        """The fields that say where an item is."""
        index = self._first + next(at for at, each in enumerate(self._answer.items) if each is item)
        found = {"item_id": item.id(self._facts.job.id, index), "output_index": index}
        return found | ({"content_index": 0} if item.number < 0 else {})

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self.number
        self.number += 1
        if number <= self._after:
            return b""
        data = to_json({"type": name, **fields, "sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _kind(item: AnswerItem) -> str:
    """What the events of an item's text are called."""
    if item.number == REFUSED:
        return "response.refusal"
    if item.number == REASONED:
        return "response.reasoning_text"
    return "response.output_text" if item.number == SAID else "response.function_call_arguments"
