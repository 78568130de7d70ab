"""Generation by upstream servers: one request from its submission to its last piece. No I/O.

It turns streamed chunks into pieces. What has come out is noted as rows, after which another server can continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.engine import EngineTimes, Failure, Logprob, Piece, Request
from penstock.extras import STATES, Extras, merged
from penstock.tools import without_marks
from workers.engines.calls import DeltaWriter
from workers.engines.reasoning import BEGIN, ReasoningMarker, ReasoningWriter, as_written
from workers.engines.text import TokenGate, joined
from workers.engines.upstream.continuation import FROM_BEGINNING, REPEATED, BreakCounts, Row, Rung
from workers.engines.upstream.http import (
    BOM,
    DONE,
    MAX_REPLY_BYTES,
    MAX_WORDS,
    EventSplitter,
    LineTooLongError,
    UpstreamConnection,
    decoded,
)
from workers.engines.upstream.reply import (
    LIMITED,
    ChatDelta,
    Choice,
    Chunk,
    End,
    ReplyOutcome,
    by_cut,
    by_error,
    by_finish,
    by_malformed,
    by_status,
    calls_of,
    decode,
    decode_known,
    decode_uncounted,
    error_in,
    extras_of,
    is_blank,
    logprobs_of,
    mended,
    text_of,
)
from workers.engines.upstream.server import DEFAULT_CONTEXT, ServerFacts

MAX_EXCESS_TOKENS = 64
"""Beyond its limit (the last chunk may hold several tokens) an answer is cut."""
MAX_UNCOUNTED = 64
"""Chunks with text and no tokens in one reply, such as the rest of what a detokeniser held; further ones count one."""
MAX_CHARACTERS_PER_TOKEN, MIN_CHARACTERS = 256, 64 << 10
"""An answer is cut beyond so many characters per token of its limit, or beyond the second, if that is more: a server
may count wrongly. The longest tokens are runs of one character; few answers have a tenth of this on average."""
MAX_EXTRA_BYTES = 4 << 20
"""Extras of one answer; further ones are dropped."""
COMPLETE = ("stop", "length", "content_filter")
"""Finish reasons of answers whose text is all that comes."""
NO_EXTRAS: Extras = {}
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
MISMATCH = "the replay differs from what was shown"


class UpstreamGeneration:
    """See the module. `take` is called once for each chunk."""

    __slots__ = (
        *(
            "request",
            "id",
            "rows",
            "located",
            "cancelled",
            "tried",
            "counts",
            "refusals",
            "progress_at",
            "prompt",
            "outcome",
        ),
        *("out", "received", "_model", "_unsaid", "_scheduled", "_first", "_prompt_tokens", "_cached", "_told_prompt"),
        *("_began", "_uncounted", "_characters", "_max_characters", "_facts", "_rung", "_expected", "_gate", "_cap"),
        *("_calls", "_reasoning", "_tags", "_held", "_answer", "miscounted", "left", "_out_before", "_has_extras"),
        *("_extra_bytes", "_states", "bare_ends"),
    )
    # An instance with 30 attributes or more gets a dict of its own: see workers/attempt.py.

    def __init__(  # noqa: PLR0915 - one statement for each attribute
        self, request: Request, now: float, counts: BreakCounts | None = None
    ) -> None:
        """`now`: monotonic seconds of its submission; `counts`: of earlier submissions."""
        self.request, self.id = request, request.id
        self.rows: list[Row] = list(request.past)
        """All of the answer so far, also by earlier attempts."""
        self.cancelled = self.left = self.miscounted = False
        """Whether nobody here wants more of it, and whether another worker does then; and whether this reply ended with
        counts that cannot be true, and is counted as one without."""
        self.located = False
        """Whether it is known where the newest generation of its text goes on without a reader."""
        self.tried: set[Rung] = set()
        """Rungs that were refused for this request."""
        self.counts = BreakCounts() if counts is None else counts
        self.refusals = 0
        """How often no server had room for it since its last progress."""
        self.progress_at = now
        """When it was sent, or its last token came."""
        self.prompt: Any = None
        """Its prompt as the server rendered or tokenised it."""
        self.outcome: ReplyOutcome | None = None
        """How the running reply ended, as far as its chunks say."""
        self._model = request.served_by
        self._unsaid = ""
        """The model that gives the answer, until a piece has said so: another one than asked for."""
        self._scheduled = self._first = 0.0
        self._prompt_tokens = self._cached = 0
        self._told_prompt = False
        self._began = 0
        """Tokens that had come out when this reply began."""
        self.out = request.past_tokens
        """Tokens that have come out, also by earlier attempts."""
        self.received = 0
        """Tokens of this reply."""
        self._uncounted = 0
        """Chunks of this reply with text and no tokens."""
        self._characters = self._max_characters = 0
        """Of the answer so far, and at most."""
        self._facts, self._rung = ServerFacts(), Rung.FRESH
        self._expected = ""
        """What a replay must still repeat."""
        self._gate = TokenGate(request.sampling.stop, request.past_text)
        self._cap = 0
        """Tokens after which the answer is cut, whatever the server goes on to send."""
        self._calls: DeltaWriter | None = None
        """Of a request with tools."""
        self._reasoning: ReasoningWriter | None = None
        """Of a request with reasoning that the server tells apart."""
        self._tags: ReasoningMarker | None = None
        """Of one whose text has the model's own tags."""
        self._answer: str | None = None
        """The answer of a task."""
        self._held: list[Piece] = []
        """Tokens whose text has not come out yet, such as those of an incomplete character."""
        self._out_before = self.out
        """Tokens that had come out when this reply began, in whatever way it continues."""
        self.bare_ends = 0
        """Replies of the server in a row that ended without a finish reason, if this request's last one did."""
        self._has_extras = False
        """Whether the server has sent extra fields, so that each chunk is looked at for them."""
        self._extra_bytes = 0
        self._states: Extras = {}
        """The extras of chunk and choice that have come out, which are told again only if they change."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is in its text."""
        return self._gate.hit

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted of a reply that is not at its end."""
        return self._gate.hit or self.out > self._cap or self._characters > self._max_characters

    @property
    def is_bare_end(self) -> bool:
        """Whether a reply that came to its end without a finish reason counts as complete: the limit is reached, or
        there was nothing to add to what an earlier reply has given."""
        return bool(self.rows) and (self.out == self._out_before or self.is_spent)

    @property
    def is_spent(self) -> bool:
        """Whether it has as many tokens as it may."""
        limit = self.request.sampling.max_tokens
        return limit is not None and self.out >= limit

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join([text for text, _, _ in self.rows])

    @property
    def began(self) -> str | None:
        """The model that gave the first token, "" for the one that was asked for; None before that."""
        return self._model if self.rows else None

    def note_break(self, model: str) -> None:
        """A server of this model has failed the request."""
        self.counts.breaks += 1
        if not self.rows:
            self.counts.by_model[model] = self.counts.by_model.get(model, 0) + 1

    def note_busy(self, outcome: ReplyOutcome, now: float) -> None:
        """A server had no room for the request, or a limit held it, or the server did not take its key."""
        self.refusals += 1
        if outcome.status in LIMITED or outcome.end is End.KEY:
            words = f": {outcome.words[:MAX_WORDS]}" if outcome.words and outcome.end is not End.KEY else ""
            self.counts.refused_at = now if self.counts.refused_at is None else self.counts.refused_at
            self.counts.refusal = outcome.reason + words

    def move_to(self, model: str) -> None:
        """The servers of another model get the request, before its first token. "": those of the model asked for."""
        if model != self._model:
            self.prompt, self.counts.breaks, self.refusals = None, 0, 0
            self.counts.refused_at = None
        self._model = self._unsaid = model

    def written_rows(self, facts: ServerFacts) -> list[Row]:
        """The rows as a server gives them."""
        if not self._is_tagged(facts):
            return self.rows
        return [(as_written(text, opened=self._is_opened), ids, count) for text, ids, count in self.rows]

    def written(self, facts: ServerFacts) -> str:
        """All of its text so far, as a server gives it."""
        return "".join([text for text, _, _ in self.written_rows(facts)])

    def _is_tagged(self, facts: ServerFacts) -> bool:
        """Whether a server gives reasoning between the model's own tags: it is sent a prompt and no conversation."""
        request = self.request
        plain = request.tools is None and request.sampling.json_schema is None
        return bool(request.reasoning) and facts.template_chat and plain

    @property
    def _is_opened(self) -> bool:
        """Whether the prompt ends with the tag that begins reasoning."""
        return isinstance(self.prompt, str) and self.prompt.rstrip().endswith(BEGIN)

    def remaining(self, rung: Rung) -> int | None:
        """max_tokens of a new reply; None: as many as fit."""
        limit = self.request.sampling.max_tokens
        if limit is None:
            return None
        return limit if rung in FROM_BEGINNING else max(0, limit - self.out)

    def begin(self, facts: ServerFacts, rung: Rung, now: float) -> None:
        """A new reply begins, `now` in monotonic seconds."""
        self._facts, self._rung, self.outcome, self.bare_ends = facts, rung, None, 0
        self.progress_at, self.miscounted, self.located = now, False, False
        self._scheduled = self._scheduled or now
        shown = self.text
        self._expected = self.written(facts) if rung in REPEATED else ""
        self._began = 0 if rung in FROM_BEGINNING else self.out
        self._out_before = self.out
        self.received = 0
        self._gate = TokenGate(self.request.sampling.stop, shown)
        self._held.clear()
        self._calls = None if self.request.tools is None else DeltaWriter()
        tagged = self._is_tagged(facts)
        self._tags = ReasoningMarker(shown, opened=self._is_opened) if tagged else None
        self._reasoning = ReasoningWriter() if self.request.reasoning and not tagged else None
        limit = self.request.sampling.max_tokens
        self._cap = (facts.context or DEFAULT_CONTEXT if limit is None else limit) + MAX_EXCESS_TOKENS
        self._characters, self._uncounted = 0 if self._began == 0 else len(shown), 0
        self._max_characters = max(MIN_CHARACTERS, self._cap * MAX_CHARACTERS_PER_TOKEN)

    # --- a chunk -------------------------------------------------------------------------------------------------

    def take(self, data: bytes, now: float) -> Piece | None:
        """Turn one chunk into a piece, if it brings anything. `outcome` is set when it says how the reply ends."""
        finished = self.outcome  # of an earlier chunk: the answer is complete, whatever comes now
        if data == DONE:
            self.outcome = finished or by_cut("[DONE] without a finish reason", bare=True)
            return None
        try:
            chunk = self._read(data)
            if (chunk.error or not chunk.choices) and (error := error_in(chunk, data)) is not None:
                self.outcome = finished or by_error(error)
                return None
            extras = extras_of(data) if self._has_extras else NO_EXTRAS
            return self._piece(chunk, now, extras)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, OverflowError) as error:
            if is_blank(data):
                return None
            self.miscounted = finished is not None
            self.outcome = finished or by_malformed(f"chunk ({type(error).__name__})")
            return None

    def _read(self, data: bytes) -> Chunk:
        """The chunk; without its counts if they alone cannot be read and it ends the answer. Raises DecodeError."""
        try:
            return decode(data) if self._has_extras else decode_known(data)
        except UNREADABLE:
            pass
        self._has_extras = True
        try:
            return decode(data)
        except UNREADABLE:
            data = mended(data)
        try:
            return decode(data)
        except UNREADABLE:
            chunk = decode_uncounted(data)
            if not (chunk.choices and chunk.choices[0].finish_reason):
                raise
            self.miscounted = True
            return chunk

    def _piece(self, chunk: Chunk, now: float, extras: Extras) -> Piece | None:
        choice = next((each for each in chunk.choices or () if not each.index), None)
        if choice is None and chunk.choices:  # an answer that nobody asked for
            return None
        if choice is not None and choice.delta is None and not (self.received or self._uncounted):
            choice.delta = choice.message  # after deltas it repeats them
        self._note_prompt(chunk, choice)
        count = self._count(chunk, choice) - self.received
        if choice is None:
            self._correct(chunk)
            return self._with_extras(None, extras)
        text, hidden = text_of(choice)
        count = min(max(0, count), max(0, self._cap + 1 - self._began - self.received))  # more cannot be true
        if choice.finish_reason and self.outcome is None:
            self.outcome = by_finish(choice.finish_reason)
        if self._calls is not None:
            text, hidden = self._with_calls(self._calls, choice, text), hidden and not calls_of(choice)
        if self._reasoning is not None and choice.delta is not None:
            content = without_marks(text) if self._calls is None else text
            text = self._reasoning.write(choice.delta.reasoning or choice.delta.reasoning_content or "", content)
            hidden = hidden and not text
        if choice.delta is not None:
            extras = self._all_extras(choice.delta, extras)
        if text and not count:
            self._uncounted += 1
            count = int(self._uncounted > MAX_UNCOUNTED)
        self.received += count
        self._characters += len(text)
        if not (count or text):
            return self._with_extras(None, extras)
        self.progress_at, self.counts.breaks, self.refusals = now, 0, 0
        self.counts.refused_at = None
        self._first = self._first or now
        piece = self._emitted(text, self._ids(chunk, choice), count, self._logprobs(choice, text), hidden=hidden)
        return self._with_extras(piece, extras) if extras else piece

    def _all_extras(self, delta: ChatDelta, extras: Extras) -> Extras:
        """The extras with what a delta says of reasoning and refusal, and with those of its calls."""
        if delta.refusal or delta.reasoning_content or delta.reasoning:
            said = {"refusal": delta.refusal}
            if self._reasoning is None and not self._facts.hides_reasoning:
                said |= {"reasoning_content": delta.reasoning_content, "reasoning": delta.reasoning}
            own = {name: value for name, value in said.items() if value}
            extras = {**extras, "delta": {**extras.get("delta", {}), **own}} if own else extras
        if self._calls is not None and self._calls.extras:
            extras, self._calls.extras = {**extras, "calls": self._calls.extras}, {}
        return extras

    def _with_extras(self, piece: Piece | None, extras: Extras) -> Piece | None:
        """A piece with extras, as far as they are new: a reply that repeats what was shown repeats them too."""
        if not extras or self._expected or (self._rung in REPEATED and self.received < self.out):
            return piece
        found: Extras = {}
        for place, fields in extras.items():
            known = self._states.get(place, {}) if place in STATES else {}
            if new := {name: value for name, value in fields.items() if known.get(name) != value}:
                found[place] = new
                self._states[place] = {**known, **new}
        try:
            self._extra_bytes += len(msgspec.msgpack.encode(found))
        except OverflowError:  # a number that the log cannot hold
            return piece
        if not found or self._extra_bytes > MAX_EXTRA_BYTES:
            return piece
        if piece is None:
            return Piece(self.id, extras=found)
        return replace(piece, extras=merged([piece.extras, found]) if piece.extras else found)

    def _with_calls(self, calls: DeltaWriter, choice: Choice, content: str) -> str:
        """The text of a chunk, with its part of calls. Raises ValueError."""
        text = calls.text(content) if content else ""
        if found := calls_of(choice):
            text += calls.write(found)
        return text + calls.end() if choice.finish_reason else text

    def _count(self, chunk: Chunk, choice: Choice | None) -> int:
        """Tokens of this reply up to this chunk, as far as the chunk shows."""
        if chunk.verbose is not None:
            return max(self.received, chunk.verbose.tokens_predicted)
        if choice is not None and choice.token_ids is not None:
            return self.received + len(choice.token_ids)
        whole = choice is not None and choice.message is not None
        if (self._facts.running_usage or whole) and chunk.usage is not None and chunk.usage.completion_tokens:
            return max(self.received, chunk.usage.completion_tokens)
        text, hidden = text_of(choice) if choice is not None else ("", False)
        return self.received + (1 if text or hidden else 0)

    def _correct(self, chunk: Chunk) -> None:
        """Take the count of the last chunk, which knows the tokens that no chunk showed."""
        if chunk.usage is not None and self.outcome is not None and not self._gate.hit:
            self.received = max(self.received, min(chunk.usage.completion_tokens or 0, self._most()))

    def _most(self) -> int:
        limit = self.request.sampling.max_tokens
        return self.received + MAX_EXCESS_TOKENS if limit is None else max(self.received, limit - self._began)

    def _note_prompt(self, chunk: Chunk, choice: Choice | None) -> None:
        if progress := chunk.prompt_progress:
            self._prompt_tokens, self._cached = progress.total, progress.cache
        elif chunk.usage is not None and chunk.usage.prompt_tokens:
            self._prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            self._cached = (details.cached_tokens or 0) if details is not None else 0
        ids = chunk.prompt_token_ids or (choice.prompt_token_ids if choice is not None else None)
        if ids:
            self._prompt_tokens = self._prompt_tokens or len(ids)
            if self._rung is Rung.FRESH:
                self.prompt = ids

    def _ids(self, chunk: Chunk, choice: Choice) -> tuple[int, ...]:
        if chunk.verbose is not None:
            return tuple(chunk.verbose.tokens)
        return tuple(choice.token_ids) if choice.token_ids else ()

    def _logprobs(self, choice: Choice, text: str) -> tuple[Logprob, ...]:
        wanted = self.request.sampling.logprobs
        ends = not text and choice.finish_reason  # a token without text that ends the answer is no part of it
        return () if wanted is None or ends else logprobs_of(choice.logprobs, wanted)

    def _emitted(
        self, text: str, ids: tuple[int, ...], count: int, logprobs: tuple[Logprob, ...], *, hidden: bool
    ) -> Piece | None:
        if self._expected or (self._rung in REPEATED and self.received - count < self.out):
            text, count, logprobs = self._beyond_replay(text, count, logprobs)
            ids = ()  # they may also be those of what was shown
            if not (text or count):
                return None
        piece = Piece(self.id, text, ids if len(ids) <= count else (), count, logprobs=logprobs)
        if hidden:
            return self._passed(replace(piece, ids=()))
        if not text:
            self._held.append(piece)
            return None
        if self._held:
            piece = joined(self.id, [*self._held, piece])
            self._held.clear()
        if self._tags is not None:
            piece = self._tags.feed(piece)
        return self._passed(self._gate.feed(piece)) if piece.n or piece.text else None

    def _beyond_replay(
        self, text: str, count: int, logprobs: tuple[Logprob, ...]
    ) -> tuple[str, int, tuple[Logprob, ...]]:
        """What of a chunk goes beyond the text and the tokens that a reply must repeat."""
        if self._expected and self._expected.startswith(text):
            self._expected = self._expected[len(text) :]
            return "", 0, ()
        if text.startswith(self._expected):
            text, self._expected = text[len(self._expected) :], ""
            new = max(0, min(count, self.received - self.out))
            return text, new, logprobs[len(logprobs) - new :] if len(logprobs) == count else ()
        self.outcome = ReplyOutcome(End.RESTART, MISMATCH)
        self.tried.add(self._rung)
        return "", 0, ()

    def _passed(self, piece: Piece) -> Piece | None:
        """Note what comes out now."""
        if self._gate.hit:
            self.outcome = ReplyOutcome(End.DONE, finish="stop")
        if not (piece.n or piece.text):
            return None
        self.rows.append((piece.text, piece.ids, piece.n))
        self.out += piece.n
        if self._unsaid:
            piece, self._unsaid = replace(piece, served_by=self._unsaid), ""
        if self.is_over and self.outcome is None:
            self.outcome = ReplyOutcome(End.DONE, finish="length")
        if not self._told_prompt and self._prompt_tokens:
            self._told_prompt = True
            prompt, cached = self._prompt_size()
            return replace(piece, prompt_tokens=prompt, cached_tokens=cached)
        return piece

    # --- the end -------------------------------------------------------------------------------------------------

    def answer(self, text: str, prompt_tokens: int | None) -> None:
        """A server has answered the task. `prompt_tokens`: None of one whose count cannot be true."""
        self._answer, self._prompt_tokens, self.miscounted = text, prompt_tokens or 0, prompt_tokens is None

    def last(self, finish: str = "", failure: Failure | None = None) -> Piece:
        """The piece that ends the request. What was held back comes out if the answer is complete."""
        piece = Piece(self.id, "" if self._answer is None or finish != "stop" else self._answer)
        if self.request.task is not None:
            return replace(piece, finish=finish, failure=failure, prompt_tokens=self._prompt_tokens)
        if finish in COMPLETE and not self._gate.hit:
            calls = "" if self._calls is None else self._calls.end()
            rest = [self._gate.feed(Piece(self.id, calls))] if calls else []
            rest += [] if self._tags is None else [self._gate.feed(self._tags.flush(self.id))]
            parts = [*rest, self._gate.flush(self.id), *self._held]
            piece = joined(self.id, [part for part in parts if part.n or part.text or part.extras])
            piece = replace(piece, n=max(piece.n, self.received + self._began - self.out))
        prompt, cached = self._prompt_size()
        times = EngineTimes(self._scheduled, self._first, time.monotonic()) if self._first else None
        return replace(
            piece,
            finish=finish,
            failure=failure,
            prompt_tokens=prompt,
            cached_tokens=cached,
            times=times,
            served_by=self._unsaid if finish in COMPLETE else "",
        )

    def _prompt_size(self) -> tuple[int, int]:
        """Tokens of the prompt and how many were cached, without those of the answer that the prompt ended with."""
        tokens = max(0, self._prompt_tokens - self._began)
        # Where tenants are not told apart, the number would tell what others have asked.
        told = self._facts.salted or self._facts.kind == "llama-server"
        return tokens, min(self._cached, tokens) if told else 0

    def spent(self) -> int:
        """Tokens of prompt and reply, for rate limits."""
        return self._prompt_tokens + self.received


WHITE = b" \t\r\n"
MAX_ERROR_BYTES = 64 << 10
FINISH_GRACE_S = 2.0
"""After the finish reason, for the chunk with the counts."""


class StreamReader:
    """Sink of one reply (http.Sink)."""

    def __init__(
        self, generation: UpstreamGeneration, connection: UpstreamConnection, emit: Callable[[Piece], None]
    ) -> None:
        self.generation, self._connection, self._emit = generation, connection, emit
        self.done: asyncio.Future[ReplyOutcome] = asyncio.get_running_loop().create_future()
        self.server = ""
        """Address of the server that replies."""
        self.status, self.headers = 0, dict[str, str]()
        self._splitter = EventSplitter()
        self._error = b""
        self._is_begun = False
        self._whole: list[bytes] = []
        """The body of a reply that is no stream."""
        self._finished_at = 0.0
        self._kept = self._ended = False

    @property
    def is_read(self) -> bool:
        """Whether the reply came to its end."""
        return self._kept

    @property
    def silent(self) -> bool:
        """Whether nothing of the reply has come, not even its head."""
        return not self.status

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, dict(headers)

    def on_body(self, data: bytes) -> None:
        """Hot path: called once for each read."""
        if self.done.done():
            return
        if self.status != 200:
            self._error = (self._error + data)[:MAX_ERROR_BYTES]
            return
        if self._whole or (not self._is_begun and data.lstrip(BOM + WHITE)[:1] == b"{"):
            self._whole.append(data)  # no stream, although one was asked for
            if sum(map(len, self._whole)) > MAX_REPLY_BYTES:
                self.settle(by_malformed("reply, which has no end"))
            return
        self._is_begun = True
        try:
            self._take(self._splitter.feed(data))
        except LineTooLongError:
            self.settle(self.generation.outcome or by_malformed("line, which has no end"))

    def _take(self, events: list[bytes]) -> None:
        """Hand the events of one read to the generation, and what it makes of them to the engine."""
        generation, now, pieces, ended = self.generation, time.monotonic(), list[Piece](), False
        event = b""
        for event in events:
            if (piece := generation.take(event, now)) is not None:
                pieces.append(piece)
            if (outcome := generation.outcome) is not None:
                self._finished_at = self._finished_at or now
                ended = outcome.end is not End.DONE or event == DONE or generation.is_over
                if ended:
                    break
        if pieces:
            self._emit(pieces[0] if len(pieces) == 1 else joined(generation.id, pieces))
        if ended and generation.outcome is not None:
            self.settle(generation.outcome, keep=event == DONE)
            if event == DONE:  # the connection is used again once its body has ended, which should be now
                asyncio.get_running_loop().call_later(FINISH_GRACE_S, self._close_unended)

    def _close_unended(self) -> None:
        if not self._ended:
            self._connection.close()

    def on_end(self, problem: str) -> None:
        self._ended = True
        try:
            if not self.done.done() and self.status == 200 and not problem:
                self._take([b"".join(self._whole)] if self._whole else self._splitter.flush())
            if self.done.done():
                return
            outcome = self._outcome(problem)
        except Exception as error:  # noqa: BLE001 - the boundary of a reply: its request must end
            self.settle(by_malformed(f"end ({type(error).__name__})"))
            return
        self.settle(outcome, keep=not problem)

    def _outcome(self, problem: str) -> ReplyOutcome:
        if self.status not in (0, 200):
            return by_status(self.status, self._error, decoded(self._error))
        cut = by_cut(problem or "the stream ended without a finish reason", bare=not problem)
        return self.generation.outcome or cut

    def settle(self, outcome: ReplyOutcome, *, keep: bool = False) -> None:
        """Note how the reply ended. `keep`: the connection need not be closed; otherwise the server notices that
        nobody reads on, and stops."""
        if not self.done.done():
            self.done.set_result(outcome)
            self._kept = keep
            if not keep:
                self._connection.close()

    def check_time(self, now: float, first_s: float, between_s: float) -> None:
        """End a reply that makes no progress."""
        generation = self.generation
        if self._finished_at and now - self._finished_at > FINISH_GRACE_S and generation.outcome is not None:
            self.settle(generation.outcome)
            return
        limit_s = between_s if generation.received else first_s
        if now - generation.progress_at > limit_s:
            self.settle(dataclasses.replace(by_cut(f"no token for {limit_s:g} s"), stalled=True))
