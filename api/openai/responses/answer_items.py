"""Output items of a response with tools or reasoning: its texts, calls and reasoning, each an item of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.openai.responses.ids import CALL, REASONING, output_item_id
from api.openai.responses.items import call_item, output_item, output_text, reasoned_turn, refusal_part
from api.openai.tool_calls import CallParts, call_id, further
from penstock.engine import ChatTurn
from penstock.extras import Extras, joined_fields
from penstock.tools import REASONED, REFUSED, SAID, AnswerPart, ToolCall
from streaming.jobs.codec import Delta, decode_draft
from streaming.jobs.job import Job


@dataclass(slots=True)
class AnswerItem:
    """One item of an answer: a text, a refusal, reasoning, or a call."""

    number: int
    """Of the call in the answer, from 0; SAID: a text; REASONED: reasoning; REFUSED: a refusal."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    extras: Extras = field(default_factory=dict)
    """Of a call (penstock/extras.py)."""

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)

    def shown(self, job_id: str, output_index: int, status: str, *, begun: bool = False) -> dict[str, Any]:
        """Render the item; one that has just begun is empty."""
        text = "" if begun else self.text
        content = [] if begun else [self.part(text)]
        if self.number == REASONED:
            item_id = output_item_id(job_id, output_index, REASONING)
            return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self.number < 0:
            return output_item(output_item_id(job_id, output_index), status, content)
        item_id = output_item_id(job_id, output_index, CALL)
        item = call_item(item_id, call_id(job_id, 0, self.number, self.extras), self.name, text, status)
        return {**further(self.extras), **item}

    def part(self, text: str) -> dict[str, Any]:
        """Render a text as the content of the item."""
        if self.number == REASONED:
            return {"type": "reasoning_text", "text": text}
        return refusal_part(text) if self.number == REFUSED else output_text(text)

    def turn(self, job_id: str) -> ChatTurn:
        """As a turn of a conversation."""
        if self.number == REASONED:
            return reasoned_turn(self.text)
        if self.number < 0:
            return ChatTurn("assistant", self.text)
        own_id = call_id(job_id, 0, self.number, self.extras)
        kept = {name: value for name, value in self.extras.items() if name != "id"}
        return ChatTurn("assistant", "", (ToolCall(own_id, self.name, self.text, kept),))


class AnswerItems:
    """Reads the items of an answer as its text comes."""

    def __init__(self) -> None:
        self.items: list[AnswerItem] = []
        """The last one is open."""
        self._parts = CallParts()

    def feed(self, row: Delta) -> Iterable[tuple[AnswerItem, AnswerPart, bool]]:
        """Yield the parts of a delta, each with its item and whether the item begins with it."""
        parts = self._parts.of(row)
        if row.extras and isinstance(refused := row.extras.get("delta", {}).get("refusal"), str):
            parts.append(AnswerPart(REFUSED, None, refused))
        for part in parts:
            if part.call >= 0 and part.name is None:  # a call that has begun, perhaps before other items
                item, begins = next(each for each in self.items if each.number == part.call), False
            else:
                begins = not self.items or part.call != self.items[-1].number
                if begins:
                    self.items.append(AnswerItem(part.call, part.name or ""))
                item = self.items[-1]
            item.pieces.append(part.text)
            if part.extras:
                item.extras = joined_fields(item.extras, part.extras)
            yield item, part, begins


def items_of(rows: Iterable[Delta]) -> list[AnswerItem]:
    """Return the items of a whole answer, given in deltas."""
    answer = AnswerItems()
    for row in rows:
        for _ in answer.feed(row):
            pass
    return answer.items


def answer_output(job_id: str, rows: Sequence[Delta], output_index: int, *, completed: bool) -> list[dict[str, Any]]:
    """Render the output of an answer that has ended; only its last item may be incomplete."""
    items = items_of(rows) or ([AnswerItem(SAID)] if completed else [])
    last = "completed" if completed else "incomplete"
    return [
        item.shown(job_id, output_index + place, last if item is items[-1] else "completed")
        for place, item in enumerate(items)
    ]


def answer_turn(job_id: str, rows: Iterable[Delta]) -> ChatTurn:
    """Return a whole answer as one turn of a conversation."""
    turns = [item.turn(job_id) for item in items_of(rows)]
    calls = tuple([call for turn in turns for call in turn.calls])
    extras = {name: value for turn in turns for name, value in turn.extras.items()}
    return ChatTurn("assistant", "".join([turn.content for turn in turns]), calls, extras=extras)


def given_up(job: Job, drafts: Sequence[bytes]) -> int:
    """Return how many items of a response were given up; its answer's first item has this index.

    Raises DecodeError, NewerMessage.
    """
    if not job.parted:
        return len(drafts)
    return sum([len(items_of(decode_draft(draft).rows)) for draft in drafts])
