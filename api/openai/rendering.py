"""Response rendering: a job's tokens and end as OpenAI objects and stream chunks, and the job object.

It does no I/O. JSON output escapes every line separator, also those at which only some clients split lines (U+0085,
U+2028, U+2029), so an event is always one line.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import isnan
from typing import Any, NamedTuple

import msgspec

from api.openai import cursor
from api.openai.errors import ApiError, Wait, from_terminal, wait_fields
from penstock.engine import Logprob, ModelCard, token_bytes
from penstock.extras import Extras, merged
from penstock.loops import ROWS_PER_SLICE, Sliced
from penstock.tools import REASONED, SAID, AnswerPart, CallReader, read_answer
from streaming.fleet.process import without_host
from streaming.jobs.codec import Delta, Terminal, Usage
from streaming.jobs.job import Chat, Job, JobState, PastAttempt
from streaming.jobs.records import JobRecord
from streaming.jobs.waiting import QueuePosition
from streaming.order import Priority

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express; OpenAI uses the same value."""


def token_logprobs(logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """Render one object per token, as chats and responses have them."""
    return [
        {**_token(each.token, each.logprob), "top_logprobs": [_token(token, value) for token, value in each.top]}
        for each in logprobs
    ]


def _token(token: str, logprob: float) -> dict[str, Any]:
    """Render a token. Its bytes are null if the engine gave only U+FFFD for a part of a character."""
    data = None if "\ufffd" in token else list(token_bytes(token))
    return {"token": token, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": data}


def characters(logprobs: Iterable[Logprob]) -> int:
    """Characters that begin in these tokens."""
    return sum([_begun(each.token) for each in logprobs])


def _begun(token: str) -> int:
    return sum([each & 0xC0 != 0x80 for each in token_bytes(token)]) if token.startswith("bytes:") else len(token)


def text_logprobs(logprobs: Iterable[Logprob], offset: int) -> dict[str, Any]:
    """Render the columns; `offset` is the number of characters of this choice before these tokens. The NaN of a
    prompt's first token is null in JSON, as OpenAI has it."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        columns["tokens"].append(each.token)
        columns["token_logprobs"].append(max(each.logprob, LOWEST_LOGPROB))
        top = {token: max(value, LOWEST_LOGPROB) for token, value in each.top}
        columns["top_logprobs"].append(None if isnan(each.logprob) else top)
        columns["text_offset"].append(offset)
        offset += _begun(each.token)
    return columns


def call_id(job_id: str, choice: int, number: int, extras: Extras) -> str:
    """Return the id of a call of a choice; both are counted from 0. `extras`: of the call.

    A call has the id that the model's server gave it, which some servers want back. Else its id follows from the job,
    the choice and the call's number, so that every replay of every process has the same.
    """
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
        shown = call_delta(job_id, choice, AnswerPart(number, call.name, call.arguments, own))
        message["tool_calls"].append({name: value for name, value in shown.items() if name != "index"})
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
        calls = self._early.pop(delta.index, {}) if self._early else {}
        if delta.extras:
            calls = {**calls, **delta.extras.get("calls", {})}
        if not calls:
            return parts
        parts = [part._replace(extras=calls.pop(str(part.call), {})) for part in parts]
        begun = [number for number in calls if int(number) < reader.calls]
        parts += [AnswerPart(int(number), None, "", calls.pop(number)) for number in begun]
        if calls:
            self._early[delta.index] = calls
        return parts


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


DONE = b"data: [DONE]\n\n"
NO_EXTRAS: Extras = {}

TIER = {Priority.INTERACTIVE: "priority", Priority.STANDARD: "default", Priority.BATCH: "flex"}
"""The `service_tier` reported for each lane."""

LOGPROBS_PER_SLICE = 100
"""Tokens rendered in one slice, each with up to twenty alternatives: one or two milliseconds."""

encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""Encodes JSON without escaping line separators; `on_one_line` does that."""


class Facts(msgspec.Struct, frozen=True):
    """What is constant in every rendering of one job's answer. `created_ms` is Redis time."""

    job: Job
    created_ms: int
    fingerprint: str | None = None

    @property
    def chat(self) -> bool:
        """Whether it is a chat; else a plain completion."""
        return isinstance(self.job.prompt, Chat)

    @property
    def logprobs(self) -> bool:
        return self.job.sampling.logprobs is not None

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields before `choices` of an OpenAI object."""
        made = {"id": ("chatcmpl-" if self.chat else "cmpl-") + self.job.id, "created": self.created_ms // 1000}
        return {**_head(kind, self.job.full_model, self.job.priority, self.fingerprint), **made}

    @property
    def chunk_head(self) -> bytes:
        """The bytes of a chunk before its choices."""
        chat = self.chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        start = _chunk_start(chat, kind, self.job.full_model, self.job.priority, self.fingerprint)
        return start % (self.job.id.encode(), self.created_ms // 1000)

    def logprobs_object(self, logprobs: Iterable[Logprob], offset: int = 0) -> dict[str, Any]:
        """Render a choice's `logprobs`; `offset` is the number of its characters before these tokens."""
        if self.chat:
            return {"content": token_logprobs(logprobs), "refusal": None}
        return text_logprobs(logprobs, offset)


def _head(kind: str, model: str, priority: Priority, fingerprint: str | None) -> dict[str, Any]:
    named = {"id": "", "object": kind, "created": 0, "model": model}
    return {**named, "service_tier": TIER[priority], "system_fingerprint": fingerprint}


@lru_cache(maxsize=256)
def _chunk_start(chat: bool, kind: str, model: str, priority: Priority, fingerprint: str | None) -> bytes:
    """What precedes the choices in each chunk of many jobs, with places for the id and the time."""
    head = to_json(_head(kind, model, priority, fingerprint)).replace(b"%", b"%%")
    head = head.replace(b'"id":"', b'"id":"chatcmpl-%b' if chat else b'"id":"cmpl-%b', 1)
    return b"data: " + head.replace(b'"created":0', b'"created":%d', 1)[:-1] + b',"choices":['


def fingerprint(card: ModelCard) -> str:
    """Return the `system_fingerprint`: constant while the model runs on the same engine with the same limits."""
    return _digest(f"{card.name}\0{card.engine}\0{card.context}\0{card.max_output}")


@lru_cache(maxsize=64)
def _digest(identity: str) -> str:
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]


def to_json(value: Any) -> bytes:
    """Encode a value as one line of JSON, whatever its strings hold."""
    data = encode_json(value)
    return data if data.isascii() else on_one_line(data)


def on_one_line(data: bytes) -> bytes:
    """Escape the line separators in JSON that some clients take for the end of a line."""
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def counted(error: ApiError, count: Callable[[str], object]) -> dict[str, Any]:
    """Return an error's body, and count its code in `penstock_errors_total`: once for each time that it is told to a
    client. The error in a job's record counts when /result tells it, not when the job is shown.

    Args:
        error: What to tell.
        count: `Metrics.count_error`.
    """
    count(error.code)
    return error.body


def error_body(error: ApiError, count: Callable[[str], object]) -> bytes:
    """Return the body of an error's answer."""
    return to_json(counted(error, count))


def error_event(error: ApiError, count: Callable[[str], object]) -> bytes:
    """Return the last event of a stream that failed after its 200; the connection closes after it, without [DONE]."""
    return b"data: " + error_body(error, count) + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    return found | {"completion_tokens_details": {"reasoning_tokens": usage.reasoning}} if usage.reasoning else found


def servers_of(model: str, terminal: Terminal) -> str:
    """The names of the models that gave the answer's choices, in their order."""
    return ", ".join(dict.fromkeys(terminal.served_by)) or model


def _other_servers(facts: Facts, terminal: Terminal) -> dict[str, Any]:
    """The field `served_by`, where another model gave a part of the answer."""
    return {"served_by": servers_of(facts.job.full_model, terminal)} if terminal.served_by else {}


# --- whole answers -------------------------------------------------------------------------------------------------


def completion_in_slices(facts: Facts, terminal: Terminal, deltas: Sequence[Delta]) -> Sliced[dict[str, Any]]:
    """Render the chat.completion or text_completion of a completed job, in slices of `ROWS_PER_SLICE` deltas, so that
    a long answer does not block the event loop."""
    texts: list[list[str]] = [[] for _ in range(facts.job.choices)]
    logprobs: list[list[Logprob]] = [[] for _ in texts]
    extras: list[list[Extras]] = [[] for _ in texts]
    for first in range(0, len(deltas), ROWS_PER_SLICE):
        if first:
            yield
        for delta in deltas[first : first + ROWS_PER_SLICE]:
            texts[delta.index].append(delta.text)
            if delta.logprobs:
                logprobs[delta.index].extend(delta.logprobs)
            if delta.extras:
                extras[delta.index].append(delta.extras)
    choices, of_chunks = [], NO_EXTRAS
    joined = 0
    for index, parts in enumerate(texts):
        joined += len(parts)
        if joined > ROWS_PER_SLICE:
            joined = 0
            yield
        found = merged(extras[index]) if extras[index] else NO_EXTRAS
        of_chunks = {**of_chunks, **found.get("chunk", NO_EXTRAS)}
        content = {**found.get("choice", NO_EXTRAS), **_content(facts, index, parts, found)}
        detail = (yield from _logprobs(facts, logprobs[index])) if facts.logprobs else None
        choices.append({"index": index, **content, "logprobs": detail, "finish_reason": _finish(terminal, index)})
    head = facts.head("chat.completion" if facts.chat else "text_completion")
    own = {"choices": choices, "usage": usage_object(terminal.usage), **_other_servers(facts, terminal)}
    return {**of_chunks, **head, **own}


def _content(facts: Facts, index: int, texts: Sequence[str], extras: Extras) -> dict[str, Any]:
    """Render what a choice says, given in pieces."""
    if facts.job.parted:
        return {"message": message_of(facts.job.id, index, texts, extras)}
    text = "".join(texts)
    return {"message": plain_message(text, extras)} if facts.chat else {"text": text}


def _logprobs(facts: Facts, logprobs: Sequence[Logprob]) -> Sliced[dict[str, Any]]:
    """Render a choice's `logprobs`; long lists are encoded to JSON in slices."""
    if len(logprobs) <= LOGPROBS_PER_SLICE:
        return facts.logprobs_object(logprobs)
    offset, found = 0, facts.logprobs_object(())
    lists: dict[str, list[bytes]] = {name: [] for name, value in found.items() if isinstance(value, list)}
    for first in range(0, len(logprobs), LOGPROBS_PER_SLICE):
        yield
        part = logprobs[first : first + LOGPROBS_PER_SLICE]
        for name, value in facts.logprobs_object(part, offset).items():
            if name in lists:
                lists[name].append(to_json(value)[1:-1])
        offset += characters(part)
    return found | {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in lists.items()}


def _finish(terminal: Terminal, index: int) -> str:
    """Return a choice's finish reason; "stop" if the engine gave none."""
    return terminal.finishes[index] if index < len(terminal.finishes) else "stop"


# --- streamed answers ----------------------------------------------------------------------------------------------


TEXT_END = b',"logprobs":null,"finish_reason":null}]'
"""What follows the text in every chunk of a plain completion."""
CHAT_FRAME = (
    b'{"index":%d,"delta":{"role":"assistant","content":',
    b'{"index":%d,"delta":{"content":',
    b"}" + TEXT_END,
)
"""What precedes the text in the first chunk of a chat's choice, in each further one, and what follows it."""
TEXT_FRAME = (b'{"index":%d,"text":', b'{"index":%d,"text":', TEXT_END)
"""The same of a plain completion."""


class ChunkRenderer:
    """Renders one job's stream. Its constant parts are module constants; a delta costs its text, one format and three
    joins.

    Pass it every delta in order, including those inside the Terminal, and then the Terminal. Only the Terminal yields
    finish reasons: a reader that has one has an answer that is stored.
    """

    def __init__(self, facts: Facts, *, include_usage: bool = False) -> None:
        self._facts, self._include_usage, self._logprobs = facts, include_usage, facts.logprobs
        self._chat, self._head, choices = facts.chat, facts.chunk_head, facts.job.choices
        self._tail = (b',"usage":null}' if include_usage else b"}") + b"\n\n"
        self._first_start, self._text_start, text_end = CHAT_FRAME if self._chat else TEXT_FRAME
        self._text_end = text_end + self._tail
        self._begun = [False] * choices
        self._offset = [0] * choices
        self._servers: dict[int, str] = {}
        """By choice: the model that gives it, until a chunk has said so."""
        self._parts = CallParts() if facts.job.parted else None

    @property
    def plain(self) -> tuple[bytes, bytes] | None:
        """Return the constant bytes before and after every further delta's text; None if they are not constant, or if
        what a text means depends on those before it."""
        if len(self._begun) > 1 or not self._begun[0] or self._logprobs or self._servers or self._parts is not None:
            return None
        return self._head + self._text_start % 0, self._text_end

    def delta(self, delta: Delta) -> bytes:
        """Render the `data:` block of a delta; b"" while its tokens are only part of a character."""
        if delta.served_by:
            self._servers[delta.index] = delta.served_by
        if self._parts is None and not delta.extras:
            return self._text(delta.index, delta.text, delta.logprobs)
        parts = [AnswerPart(SAID, None, delta.text)] if self._parts is None else self._parts.of(delta)
        *before, last = parts or [AnswerPart(SAID, None, "")]
        blocks = [self._part(delta.index, part) for part in before]
        logprobs = delta.logprobs if self._logprobs else ()
        return b"".join([*blocks, self._part(delta.index, last, logprobs, delta.extras or NO_EXTRAS)])

    def _text(self, index: int, text: str, logprobs: Sequence[Logprob]) -> bytes:
        if not text and not logprobs:
            return b""
        if not self._logprobs and not self._servers:
            start = self._text_start if self._begun[index] else self._first_start
            self._begun[index] = True
            return self._head + start % index + to_json(text) + self._text_end
        detail = self._detail(index, logprobs) if self._logprobs else None
        return self._chunk(index, {"content" if self._chat else "text": text}, detail)

    def _part(
        self, index: int, part: AnswerPart, logprobs: Sequence[Logprob] = (), extras: Extras = NO_EXTRAS
    ) -> bytes:
        """Render a part of a delta. The last one has the log-probabilities of all of it, and its extras."""
        fields = extras.get("delta", NO_EXTRAS) if self._chat else NO_EXTRAS
        of_choice, of_chunk = extras.get("choice", NO_EXTRAS), extras.get("chunk", NO_EXTRAS)
        said: dict[str, Any] = {}
        if part.call == SAID:
            if not (fields or of_choice or of_chunk):
                return self._text(index, part.text, logprobs)
            if part.text or not self._chat:
                said["content" if self._chat else "text"] = part.text
        else:
            if not self._begun[index]:
                said["content"] = None
            if part.call == REASONED:
                said["reasoning_content"] = part.text
            else:
                said["tool_calls"] = [call_delta(self._facts.job.id, index, part)]
        detail = self._detail(index, logprobs) if logprobs else None
        return self._chunk(index, {**said, **fields}, detail, of_choice=of_choice, of_chunk=of_chunk)

    def _detail(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        detail = self._facts.logprobs_object(logprobs, self._offset[index])
        self._offset[index] += characters(logprobs)
        return detail

    def _chunk(
        self,
        index: int,
        said: dict[str, Any],
        detail: dict[str, Any] | None,
        finish: str | None = None,
        *,
        of_choice: Extras = NO_EXTRAS,
        of_chunk: Extras = NO_EXTRAS,
    ) -> bytes:
        """Render a chunk of a choice. `said`: of its delta, or of a completion's choice. The first one has the role and
        the model that gives the choice if that is another one."""
        if self._chat:
            said = {"delta": said if self._begun[index] else {"role": "assistant", **said}}
        self._begun[index] = True
        choice = {**of_choice, "index": index, **said, "logprobs": detail, "finish_reason": finish}
        if name := self._servers.pop(index, ""):
            of_chunk = {**of_chunk, "served_by": name}
        beside = b"]," + to_json(of_chunk)[1:-1] if of_chunk else b"]"
        return self._head + to_json(choice) + beside + self._tail

    def end(self, terminal: Terminal) -> bytes:
        """Render the last blocks: finish reasons, token counts if requested, [DONE]. Raises ApiError for a job that
        did not complete."""
        if terminal.state is not JobState.COMPLETED:
            raise from_terminal(terminal)
        blocks = []
        for index, begun in enumerate(self._begun):
            said = {"text": ""} if not self._chat else {} if begun else {"content": ""}
            blocks.append(self._chunk(index, said, None, _finish(terminal, index)))
        if self._include_usage:
            last = {"usage": usage_object(terminal.usage)} | _other_servers(self._facts, terminal)
            blocks.append(self._head + b"]," + to_json(last)[1:] + b"\n\n")
        return b"".join([*blocks, DONE])


# --- jobs ------------------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """Where a job stands that no worker has yet."""

    position: QueuePosition | None = None
    """Its position in the order of the queue; None: it does not wait, or that is not known."""
    wait: Wait | None = None
    """Expected time until it starts; None: unknown."""
    hold: str = ""
    """Why no worker can claim it now; "" if one can."""

    @property
    def before(self) -> int | None:
        """Jobs that are expected to start before it."""
        return self.position.before if self.position else None

    @property
    def reason(self) -> str | None:
        """Why it waits: why no worker can claim it, else why it stands at its position."""
        return (self.hold or self.position.reason) if self.position else None


def finish_reasons(record: JobRecord) -> list[str | None]:
    """Of each choice, once the job has ended; None: the job ended before it did."""
    return [each or None for each in record.terminal.finishes] if record.terminal else []


NOT_WAITING = Waiting()


def job_object(
    record: JobRecord, waiting: Waiting = NOT_WAITING, result: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Render the job object, with its result if given. Times are Unix seconds."""
    job, terminal, latest = record.job, record.terminal, cursor.latest_of(record)
    failed = terminal is not None and not record.completed
    return {
        "id": job.id,
        "object": "job",
        "status": record.state.value,
        "created_at": _seconds(record.created_ms),
        "not_before": _seconds(record.not_before_ms),
        "started_at": _seconds(record.started_ms),
        "first_token_at": _seconds(record.first_ms),
        "completed_at": _seconds(record.done_ms),
        "expires_at": _seconds(record.done_ms and record.done_ms + 1000 * record.keep_s),
        "endpoint": record.endpoint.path,
        "model": job.full_model,
        "served_by": servers_of(job.full_model, terminal) if terminal and terminal.seq else None,
        "priority": job.priority.value,
        "queue_position": waiting.before,
        "queue_reason": waiting.reason,
        **wait_fields(waiting.wait),
        "attempts": record.attempt,
        "attempt_log": [_attempt(each) for each in record.attempts],
        "last_event_id": str(latest) if latest else None,
        "usage": usage_object(terminal.usage) if terminal else None,
        "result": result,
        "error": from_terminal(terminal).body["error"] if terminal and failed else None,
        "cancelled_by": (terminal.cancelled_by or None) if terminal else None,
        "metadata": dict(job.metadata),
    }


def _attempt(attempt: PastAttempt) -> dict[str, Any]:
    return {
        "worker": without_host(attempt.worker),
        "started_at": _seconds(attempt.started_ms),
        "ended_at": _seconds(attempt.ended_ms),
        "tokens": attempt.tokens,
        "outcome": attempt.outcome or None,
    }


def _seconds(ms: int) -> float | None:
    return ms / 1000 if ms else None
