"""Event sequence of a response with tools or reasoning: texts, calls and reasoning are items, one after the other."""

from __future__ import annotations

from typing import Any

from api.openai.rendering import DONE
from api.openai.responses.answer_items import AnswerItem, AnswerItems
from api.openai.responses.events import LAST_EVENT, START, EventSequence
from api.openai.responses.object import ResponseFacts, outcome
from penstock.tools import REASONED, REFUSED, SAID
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import JobState


class CallEventSequence(EventSequence):
    """Renders a response whose answer is read in parts. A delta of the log may give several events."""

    __slots__ = ("_answer", "_first")

    def __init__(self, facts: ResponseFacts, after: int = START) -> None:
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
        found = self._facts.object(status, output=output, terminal=terminal, ended=ended)
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


def sequence_of(facts: ResponseFacts, after: int = START) -> EventSequence:
    """Return the event sequence of a response for a reader that has its events up to number `after`."""
    return (CallEventSequence if facts.job.parted else EventSequence)(facts, after)
