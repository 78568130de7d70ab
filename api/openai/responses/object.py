"""Response object: a job of the Responses API as its owner sees it, with every field that the standard requires."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from api.openai.errors import from_terminal
from api.openai.rendering import TIER, CallParts, Facts, call_id, further, token_logprobs
from api.openai.responses.items import (
    CALL,
    MESSAGE,
    REASONING,
    call_item,
    message_item,
    output_text,
    reasoned_turn,
    refusal_part,
    response_id,
)
from penstock.engine import ChatTurn
from penstock.extras import Extras, joined_fields
from penstock.loops import ROWS_PER_SLICE, Sliced
from penstock.tools import REASONED, REFUSED, SAID, AnswerPart, ToolCall
from streaming.jobs.codec import Delta, Terminal, Usage, decode_draft
from streaming.jobs.job import Chat, Job, JobState, ResponseForm


@dataclass(slots=True)
class AnswerItem:
    """One item of an answer: a text, a refusal, reasoning, or a call."""

    number: int
    """Of the call in the answer, from 0; SAID: a text; REASONED: reasoning; REFUSED: a refusal."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the tokens of a text, rendered."""
    extras: Extras = field(default_factory=dict)
    """Of a call (penstock/extras.py)."""

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)

    def id(self, job_id: str, output_index: int) -> str:
        kind = REASONING if self.number == REASONED else MESSAGE if self.number < 0 else CALL
        return f"{kind}_{job_id}_out{output_index}"

    def shown(self, job_id: str, output_index: int, status: str, *, begun: bool = False) -> dict[str, Any]:
        """Render the item; one that has just begun is empty."""
        item_id, content = self.id(job_id, output_index), [] if begun else [self.part()]
        if self.number == REASONED:
            return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self.number < 0:
            return message_item(item_id, status, "assistant", content)
        own_id, arguments = call_id(job_id, 0, self.number, self.extras), "" if begun else self.text
        return {**further(self.extras), **call_item(item_id, own_id, self.name, arguments, status)}

    def part(self, *, begun: bool = False) -> dict[str, Any]:
        """Render the content of the item; that of one that has just begun is empty."""
        text = "" if begun else self.text
        if self.number == REASONED:
            return {"type": "reasoning_text", "text": text}
        return refusal_part(text) if self.number == REFUSED else output_text(text, [] if begun else self.logprobs)

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
    """Reads the items of an answer as its text comes. `parted`: the text may hold calls and reasoning."""

    def __init__(self, *, parted: bool) -> None:
        self.items: list[AnswerItem] = []
        """The last one is open."""
        self._parts = CallParts() if parted else None

    def feed(self, row: Delta) -> Iterable[tuple[AnswerItem, AnswerPart, bool]]:
        """Yield the parts of a delta, each with its item and whether the item begins with it."""
        for part in self._parts_of(row):
            if part.call >= 0 and part.name is None:  # a call that has begun, perhaps before other items
                item, begins = next(each for each in self.items if each.number == part.call), False
            else:
                begins = not self.items or part.call != self.items[-1].number
                if begins:
                    self.items.append(AnswerItem(part.call, part.name or ""))
                item = self.items[-1]
            item.pieces.append(part.text)
            if self._parts is None and part.call == SAID:
                item.logprobs += token_logprobs(row.logprobs)
            if part.extras:
                item.extras = joined_fields(item.extras, part.extras)
            yield item, part, begins

    def _parts_of(self, row: Delta) -> list[AnswerPart]:
        refused = row.extras.get("delta", {}).get("refusal") if row.extras else None
        refusal = [AnswerPart(REFUSED, None, refused)] if isinstance(refused, str) and refused else []
        if self._parts is not None:
            return self._parts.of(row) + refusal
        return refusal + ([AnswerPart(SAID, None, row.text)] if row.text or row.logprobs else [])

    def take(self, rows: Iterable[Delta]) -> None:
        """Read several deltas."""
        for row in rows:
            in_text = self._parts is None and self.items and self.items[-1].number == SAID
            if in_text and not row.logprobs and not row.extras:  # nearly always
                self.items[-1].pieces.append(row.text)
                continue
            for _ in self.feed(row):
                pass


def items_of(job: Job, rows: Iterable[Delta]) -> list[AnswerItem]:
    """Return the items of a whole answer, given in deltas."""
    answer = AnswerItems(parted=job.parted)
    answer.take(rows)
    return answer.items


def shown_items(job_id: str, items: Sequence[AnswerItem], first: int, status: Status) -> list[dict[str, Any]]:
    """Render the output of an answer that has ended; only its last item may be incomplete. `first`: its first index."""
    last = "completed" if status == "completed" else "incomplete"
    return [
        item.shown(job_id, first + place, last if item is items[-1] else "completed")
        for place, item in enumerate(items)
    ]


def answer_turn(job: Job, rows: Iterable[Delta]) -> ChatTurn:
    """Return a whole answer as one turn of a conversation."""
    turns = [item.turn(job.id) for item in items_of(job, rows)]
    calls = tuple([call for turn in turns for call in turn.calls])
    extras = {name: value for turn in turns for name, value in turn.extras.items()}
    return ChatTurn("assistant", "".join([turn.content for turn in turns]), calls, extras=extras)


def given_up(job: Job, drafts: Sequence[bytes]) -> int:
    """Return how many items of a response were given up; its answer's first item has this index.

    Raises DecodeError, NewerMessage.
    """
    return sum([len(items_of(job, decode_draft(draft).rows)) for draft in drafts])


Status: TypeAlias = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

RUNNING: dict[JobState, Status] = {JobState.QUEUED: "queued", JobState.RUNNING: "in_progress"}


class Outcome(NamedTuple):
    """How a response ended."""

    status: Status
    incomplete: dict[str, str] | None = None
    """`incomplete_details`."""
    error: dict[str, str] | None = None


def outcome(terminal: Terminal) -> Outcome:
    """Return how the response of a job ended."""
    match terminal.state:
        case JobState.COMPLETED if "content_filter" in terminal.finishes:
            return Outcome("incomplete", {"reason": "content_filter"})
        case JobState.COMPLETED if "length" in terminal.finishes:
            return Outcome("incomplete", {"reason": "max_output_tokens"})
        case JobState.COMPLETED:
            return Outcome("completed")
        case JobState.CANCELLED:
            return Outcome("cancelled")
        case _:
            failure = from_terminal(terminal)
            return Outcome("failed", error=error_object(failure.status, failure.message))


def error_object(status: int, message: str) -> dict[str, str]:
    """Return the `error` of a failed response: the standard has one code for the request's faults, one for others."""
    return {"code": "invalid_prompt" if status in (400, 413, 422) else "server_error", "message": message}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def form_of(job: Job) -> ResponseForm:
    return job.response or ResponseForm()


def response_object(
    facts: Facts,
    status: Status,
    *,
    output: Sequence[Any] = (),
    terminal: Terminal | None = None,
    ended: Outcome | None = None,
) -> dict[str, Any]:
    """Render the object; once the response has ended, with its `terminal` and how it `ended`."""
    job, form, sampling = facts.job, form_of(facts.job), facts.job.sampling
    turns = job.prompt.turns if isinstance(job.prompt, Chat) else ()
    done_ms = terminal.last_ms if terminal is not None and status == "completed" else 0
    return {
        "id": response_id(job.id),
        "object": "response",
        "created_at": facts.created_ms // 1000,
        "conversation": {"id": form.conversation} if form.conversation else None,
        "completed_at": done_ms // 1000 or None,
        "status": status,
        "background": form.background,
        "error": ended.error if ended else None,
        "incomplete_details": ended.incomplete if ended else None,
        "instructions": turns[0].content if form.instructed and turns else None,
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": form.max_tool_calls,
        "model": job.model,
        "output": output,
        "parallel_tool_calls": form.parallel_tool_calls,
        "previous_response_id": response_id(form.previous) if form.previous else None,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "prompt_cache_key": form.prompt_cache_key,
        "reasoning": {"effort": None if job.reasoning in ("", "default") else job.reasoning, "summary": None},
        "safety_identifier": form.safety_identifier,
        "service_tier": TIER[job.priority],
        "store": form.store,
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "text": {"format": form.format or {"type": "text"}, "verbosity": job.passed.get("verbosity", "medium")},
        "tool_choice": form.tool_choice,
        "tools": form.tools,
        "top_logprobs": form.top_logprobs,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
        "usage": usage_object(terminal.usage) if terminal else None,
        "user": job.user,
        "metadata": job.metadata if form.metadata is None else form.metadata,
        **({"served_by": terminal.served_by[0]} if terminal is not None and terminal.served_by else {}),
        **({"cancelled_by": terminal.cancelled_by} if terminal is not None and terminal.cancelled_by else {}),
    }


def ended_response(
    facts: Facts, terminal: Terminal, rows: Sequence[Delta], drafts: Sequence[bytes] = ()
) -> Sliced[dict[str, Any]]:
    """Render a response that has ended, in slices of `ROWS_PER_SLICE` deltas. `drafts`: the texts that were given up
    before it. Raises DecodeError, NewerMessage."""
    job, answer = facts.job, AnswerItems(parted=facts.job.parted)
    for first in range(0, len(rows), ROWS_PER_SLICE):
        if first:
            yield
        answer.take(rows[first : first + ROWS_PER_SLICE])
    return ended_object(facts, terminal, answer.items, given_up(job, drafts))


def ended_object(facts: Facts, terminal: Terminal, items: list[AnswerItem], first: int) -> dict[str, Any]:
    """Render a response that has ended with these items. `first`: index of the first one."""
    if not items and terminal.state is JobState.COMPLETED:
        items.append(AnswerItem(SAID))
    ended = outcome(terminal)
    output = shown_items(facts.job.id, items, first, ended.status)
    return response_object(facts, ended.status, output=output, terminal=terminal, ended=ended)
