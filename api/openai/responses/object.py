"""Response object: a job of the Responses API as its owner sees it, with every field that the standard requires; and
its server-sent events.

The events are a pure function of a job's log and its terminal record: every replay has the same bytes, whichever
process renders it and however the deltas arrive. Each event has the next number. If the engine must start again, the
item that was open ends as incomplete; the next text is a new item, and the numbers rise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from api.openai.errors import ApiError, from_terminal
from api.openai.rendering import DONE, TIER, CallParts, Facts, call_id, further, to_json, token_logprobs
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


class ItemKind(NamedTuple):
    """What tells an item of an answer from others."""

    prefix: str
    """What its id begins with."""
    events: str
    """What the events of its text are called."""


CALLED = ItemKind(CALL, "response.function_call_arguments")
KINDS = {
    SAID: ItemKind(MESSAGE, "response.output_text"),
    REFUSED: ItemKind(MESSAGE, "response.refusal"),
    REASONED: ItemKind(REASONING, "response.reasoning_text"),
}
"""By the number of an item; every other one is a call."""


@dataclass(slots=True)
class AnswerItem:
    """One item of an answer: a text, a refusal, reasoning, or a call."""

    index: int
    """In the output of the response."""
    number: int
    """Of the call in the answer, from 0; SAID: a text; REASONED: reasoning; REFUSED: a refusal."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the tokens of a text, rendered."""
    extras: Extras = field(default_factory=dict)
    """Of a call (penstock/extras.py)."""

    @property
    def kind(self) -> ItemKind:
        return KINDS.get(self.number, CALLED)

    @property
    def text(self) -> str:
        """The text, or the arguments of the call."""
        return "".join(self.pieces)

    def id(self, job_id: str) -> str:
        return f"{self.kind.prefix}_{job_id}_out{self.index}"

    def shown(self, job_id: str, status: str, *, begun: bool = False) -> dict[str, Any]:
        """Render the item; one that has just begun is empty."""
        item_id, content = self.id(job_id), [] if begun else [self.part()]
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
    """Reads the items of an answer as its text comes. `first`: index of its first item: those before were given up."""

    def __init__(self, job: Job, first: int = 0) -> None:
        self.items: list[AnswerItem] = []
        """The last one is open."""
        self._first = first
        self._parts = CallParts() if job.parted else None

    def begin(self, number: int, name: str = "") -> AnswerItem:
        """Add an item."""
        self.items.append(AnswerItem(self._first + len(self.items), number, name))
        return self.items[-1]

    def feed(self, row: Delta) -> Iterable[tuple[AnswerItem, AnswerPart, bool]]:
        """Yield the parts of a delta, each with its item and whether the item begins with it."""
        for part in self._parts_of(row):
            begins = False
            if part.call >= 0 and part.name is None:  # a call that has begun, perhaps before other items
                item = next(each for each in self.items if each.number == part.call)
            elif begins := not self.items or part.call != self.items[-1].number:
                item = self.begin(part.call, part.name or "")
            else:
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

    def take(self, rows: Iterable[Delta]) -> list[AnswerItem]:
        """Read several deltas, and return the items."""
        for row in rows:
            in_text = self._parts is None and self.items and self.items[-1].number == SAID
            if in_text and not row.logprobs and not row.extras:  # nearly always
                self.items[-1].pieces.append(row.text)
                continue
            for _ in self.feed(row):
                pass
        return self.items


def answer_turn(job: Job, rows: Iterable[Delta]) -> ChatTurn:
    """Return a whole answer as one turn of a conversation."""
    turns = [item.turn(job.id) for item in AnswerItems(job).take(rows)]
    calls = tuple([call for turn in turns for call in turn.calls])
    extras = {name: value for turn in turns for name, value in turn.extras.items()}
    return ChatTurn("assistant", "".join([turn.content for turn in turns]), calls, extras=extras)


def given_up(job: Job, drafts: Sequence[bytes]) -> int:
    """Return how many items of a response were given up. Raises DecodeError, NewerMessage."""
    return sum([len(AnswerItems(job).take(decode_draft(draft).rows)) for draft in drafts])


# --- the object ------------------------------------------------------------------------------------------------------


Status: TypeAlias = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]


class Outcome(NamedTuple):
    """How a response stands, or how it ended."""

    status: Status
    incomplete: dict[str, str] | None = None
    """`incomplete_details`."""
    error: dict[str, str] | None = None


QUEUED, IN_PROGRESS = Outcome("queued"), Outcome("in_progress")
RUNNING = {JobState.QUEUED: QUEUED, JobState.RUNNING: IN_PROGRESS}


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
            return failed(from_terminal(terminal))


def failed(error: ApiError) -> Outcome:
    """The outcome of a failed response: the standard has one code for the request's faults, one for all others."""
    code = "invalid_prompt" if error.status in (400, 413, 422) else "server_error"
    return Outcome("failed", error={"code": code, "message": error.message})


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
    facts: Facts, stands: Outcome, terminal: Terminal | None = None, output: Sequence[Any] = ()
) -> dict[str, Any]:
    """Render the object; once the response has ended, with its `terminal`."""
    job, form, sampling = facts.job, form_of(facts.job), facts.job.sampling
    turns = job.prompt.turns if isinstance(job.prompt, Chat) else ()
    done_ms = terminal.last_ms if terminal is not None and stands.status == "completed" else 0
    return {
        "id": response_id(job.id),
        "object": "response",
        "created_at": facts.created_ms // 1000,
        "conversation": {"id": form.conversation} if form.conversation else None,
        "completed_at": done_ms // 1000 or None,
        "status": stands.status,
        "background": form.background,
        "error": stands.error,
        "incomplete_details": stands.incomplete,
        "instructions": turns[0].content if form.instructed and turns else None,
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": form.max_tool_calls,
        "model": job.full_model,
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
    answer = AnswerItems(facts.job, given_up(facts.job, drafts))
    for first in range(0, len(rows), ROWS_PER_SLICE):
        if first:
            yield
        answer.take(rows[first : first + ROWS_PER_SLICE])
    return ended_object(facts, terminal, answer)


def ended_object(facts: Facts, terminal: Terminal, answer: AnswerItems) -> dict[str, Any]:
    """Render a response that has ended with these items; only the last one may be incomplete."""
    if not answer.items and terminal.state is JobState.COMPLETED:
        answer.begin(SAID)
    ended, items = outcome(terminal), answer.items
    output = [item.shown(facts.job.id, "completed" if item is not items[-1] else ended_item(ended)) for item in items]
    return response_object(facts, ended, terminal, output)


def ended_item(ended: Outcome) -> str:
    """The status of the last item of a response."""
    return "completed" if ended.status == "completed" else "incomplete"


# --- its events ------------------------------------------------------------------------------------------------------


PLAIN_END = b',"logprobs":[],"sequence_number":%d}\n\n'
"""What follows the text of a delta without log-probabilities."""
START = -1
"""The cursor of a reader that has no event: the first has the number 0."""


class EventSequence:
    """Renders one response for one reader: call `opening`, then `delta` for every delta in order, then `end`.

    `after` is the number of the last event that the reader has: earlier ones are counted, and not rendered.
    """

    __slots__ = ("_after", "_answer", "_delta_start", "_facts", "_running", "number", "pieces")

    def __init__(self, facts: Facts, after: int = START) -> None:
        self._facts, self._after = facts, after
        self.number = 0
        """Number of the next event."""
        self._answer = AnswerItems(facts.job)
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
        stands = QUEUED if form_of(self._facts.job).background else IN_PROGRESS
        shown = response_object(self._facts, stands)
        created = self._event("response.created", response=shown)
        return created + (self._event("response.queued", response=shown) if stands is QUEUED else self.running())

    def running(self) -> bytes:
        """Render the event of a response that a worker has started. Idempotent."""
        if self._running:
            return b""
        self._running = True
        return self._event("response.in_progress", response=response_object(self._facts, IN_PROGRESS))

    def delta(self, row: Delta) -> bytes:
        """Render a delta; b"" while its tokens are only part of a character."""
        data = b""
        for item, part, begins in self._answer.feed(row):
            if begins:
                data += self._begin(item)
            logprobs = [] if self._facts.job.parted else token_logprobs(row.logprobs)
            if part.text or logprobs:
                shown = {"logprobs": logprobs} if item.number == SAID else {}
                data += self._event(f"{item.kind.events}.delta", **self._place(item), delta=part.text, **shown)
        return data

    def deltas(self, rows: Iterable[Delta]) -> bytes:
        """Render several deltas."""
        return b"".join([self.delta(row) for row in rows])

    def begin_again(self) -> bytes:
        """Render what ends a text that was given up: the engine starts again, and its text is other items."""
        items = self._answer.items
        if not items:
            return b""
        self._answer = AnswerItems(self._facts.job, items[-1].index + 1)
        return self._close(items[-1], "incomplete")

    def end(self, terminal: Terminal) -> bytes:
        """Render what ends the stream, [DONE] included."""
        ended, data, items = outcome(terminal), self.running(), self._answer.items
        if not items and terminal.state is JobState.COMPLETED:
            data += self._begin(self._answer.begin(SAID))
        if items:
            data += self._close(items[-1], ended_item(ended))
        # a stream knows no event for a cancelled response
        name = "incomplete" if ended.status == "cancelled" else ended.status
        return data + self._event(f"response.{name}", response=ended_object(self._facts, terminal, self._answer)) + DONE

    def fail(self, error: ApiError) -> bytes:
        """Render the end of a stream that this process cannot continue, though its job may go on. Items stay as they
        are: what is known here of the open one may not be what the reader has."""
        self.number = max(self.number, self._after + 1)
        return self._event("response.failed", response=response_object(self._facts, failed(error))) + DONE

    def _begin(self, item: AnswerItem) -> bytes:
        """Render what ends the item before, and what begins this one."""
        data, before = self.running(), self._answer.items[:-1]
        if before:
            data += self._close(before[-1], "completed")
        place, self.pieces = self._place(item), item.pieces
        shown = item.shown(self._facts.job.id, "in_progress", begun=True)
        data += self._event("response.output_item.added", output_index=item.index, item=shown)
        if item.number < 0:
            data += self._event("response.content_part.added", **place, part=item.part(begun=True))
        delta = KINDS[SAID].events + ".delta"
        head = to_json({"type": delta, **place, "delta": ""})
        self._delta_start = b"event: %b\ndata: %b" % (delta.encode(), head[: -len(b'""}')])
        return data

    def _close(self, item: AnswerItem, status: str) -> bytes:
        place, name = self._place(item), f"{item.kind.events}.done"
        if item.number < 0:
            part = item.part()
            said = {name: value for name, value in part.items() if name in ("text", "logprobs", "refusal")}
            data = self._event(name, **place, **said) + self._event("response.content_part.done", **place, part=part)
        else:
            data = self._event(name, **place, name=item.name, arguments=item.text)
        shown = item.shown(self._facts.job.id, status)
        return data + self._event("response.output_item.done", output_index=item.index, item=shown)

    def _place(self, item: AnswerItem) -> dict[str, Any]:
        """The fields that say where an item is."""
        found = {"item_id": item.id(self._facts.job.id), "output_index": item.index}
        return found | ({"content_index": 0} if item.number < 0 else {})

    def _event(self, event: str, /, **fields: Any) -> bytes:
        number = self.number
        self.number += 1
        if number <= self._after:
            return b""
        data = to_json({"type": event, **fields, "sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
