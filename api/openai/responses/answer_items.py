"""Output items of a response with tools or reasoning: its texts, calls and reasoning, each an item of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.openai.responses.ids import CALL, REASONING, output_item_id
from api.openai.responses.items import call_item, output_item, output_text
from api.openai.tool_calls import call_id
from penstock.engine import ChatTurn
from penstock.tools import REASONED, SAID, AnswerPart, CallReader, ToolCall
from streaming.jobs.codec import decode_draft
from streaming.jobs.job import Job


@dataclass(slots=True)
class AnswerItem:
    """One item of an answer: a text, reasoning, or a call."""

    number: int
    """Of the call in the answer, from 0; SAID: a text; REASONED: reasoning."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

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
        return call_item(item_id, call_id(job_id, 0, self.number), self.name, text, status)

    def part(self, text: str) -> dict[str, Any]:
        """Render a text as the content of the item."""
        return {"type": "reasoning_text", "text": text} if self.number == REASONED else output_text(text)

    def turn(self, job_id: str) -> ChatTurn:
        """As a turn of a conversation, in which models do not see earlier reasoning."""
        if self.number == REASONED:
            return ChatTurn("assistant", "")
        if self.number < 0:
            return ChatTurn("assistant", self.text)
        return ChatTurn("assistant", "", (ToolCall(call_id(job_id, 0, self.number), self.name, self.text),))


class AnswerItems:
    """Reads the items of an answer as its text comes."""

    def __init__(self) -> None:
        self.items: list[AnswerItem] = []
        """The last one is open."""
        self._reader = CallReader()

    def feed(self, text: str) -> Iterable[tuple[AnswerItem, AnswerPart, bool]]:
        """Yield the parts of a text, each with its item and whether the item begins with it."""
        for part in self._reader.feed(text):
            begins = not self.items or part.call != self.items[-1].number
            if begins:
                self.items.append(AnswerItem(part.call, part.name or ""))
            item = self.items[-1]
            item.pieces.append(part.text)
            yield item, part, begins


def items_of(texts: Iterable[str]) -> list[AnswerItem]:
    """Return the items of a whole answer, given in pieces."""
    answer = AnswerItems()
    for text in texts:
        for _ in answer.feed(text):
            pass
    return answer.items


def answer_output(job_id: str, texts: Sequence[str], output_index: int, *, completed: bool) -> list[dict[str, Any]]:
    """Render the output of an answer that has ended; only its last item may be incomplete."""
    items = items_of(texts) or ([AnswerItem(SAID)] if completed else [])
    last = "completed" if completed else "incomplete"
    return [
        item.shown(job_id, output_index + place, last if item is items[-1] else "completed")
        for place, item in enumerate(items)
    ]


def answer_turn(job_id: str, texts: Iterable[str]) -> ChatTurn:
    """Return a whole answer as one turn of a conversation."""
    turns = [item.turn(job_id) for item in items_of(texts)]
    calls = tuple([call for turn in turns for call in turn.calls])
    return ChatTurn("assistant", "".join([turn.content for turn in turns]), calls)


def given_up(job: Job, drafts: Sequence[bytes]) -> int:
    """Return how many items of a response were given up; its answer's first item has this index.

    Raises DecodeError, NewerMessage.
    """
    if not job.parted:
        return len(drafts)
    return sum([len(items_of([row.text for row in decode_draft(draft).rows])) for draft in drafts])
