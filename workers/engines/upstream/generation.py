"""Generation by upstream servers: one request from its submission to its last piece, and each reply to it.

A reply's chunks become pieces. What has come out is noted as rows, after which another server can continue.
"""

from __future__ import annotations

import time
from asyncio import Task
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.engine import EngineTimes, Failure, Logprob, Piece, Request
from penstock.extras import STATES, Extras, merged
from penstock.tools import without_marks
from workers.engines.calls import DeltaWriter
from workers.engines.reasoning import BEGIN, ReasoningMarker, ReasoningWriter, as_written
from workers.engines.text import TokenGate, joined
from workers.engines.upstream import http, reply
from workers.engines.upstream.continuation import FROM_BEGINNING, REPEATED, BreakCounts, Row, Rung
from workers.engines.upstream.http import DONE, EventSplitter, LineTooLongError, Reply, UpstreamConnection
from workers.engines.upstream.reply import Break, ChatDelta, Choice, Chunk, End, ReplyOutcome, by_cut, by_malformed
from workers.engines.upstream.server import DEFAULT_CONTEXT, ServerFacts

if TYPE_CHECKING:
    from workers.engines.upstream.endpoints import ServerSlot
    from workers.engines.upstream.pool import ServerPool

MAX_EXCESS_TOKENS = 64
"""Beyond its limit (the last chunk may hold several tokens) an answer is cut."""
MAX_UNCOUNTED = 64
"""Chunks with text and no tokens in one reply, such as the rest of what a detokeniser held; further ones count one."""
MAX_CHARACTERS_PER_TOKEN, MIN_CHARACTERS = 256, 64 << 10
"""An answer is cut beyond so many characters per token of its limit, or beyond the second, if that is more: a server
may count wrongly. The longest tokens are runs of one character; few answers have a tenth of this on average."""
MAX_READ_PER_TOKEN = 32 << 10
"""Bytes that a reply may have for each of its tokens, besides MAX_REPLY_BYTES. Chunks have 0.3 kB, with alternatives up
to 3 kB, and more where a gateway repeats its sources in each."""
MAX_CHARACTERS_PER_ALTERNATIVE = 32
"""On average of an answer's log-probabilities, or MIN_CHARACTERS of all; further ones are dropped. Tokens have five."""
MAX_EXTRA_BYTES = 4 << 20
"""Extras of one answer; further ones are dropped."""
COMPLETE = ("stop", "length", "content_filter")
"""Finish reasons of answers whose text is all that comes."""
NO_EXTRAS: Extras = {}
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
MISMATCH = "the replay differs from what was shown"
WHITE = b" \t\r\n"
MAX_ERROR_BYTES = 64 << 10
FINISH_GRACE_S = 2.0
"""After the finish reason, for the chunk with the counts and the end of the body."""


class UpstreamGeneration:
    """One request, over any number of replies."""

    # An instance with 30 attributes or more gets a dict of its own: see workers/attempt.py.

    def __init__(self, request: Request, now: float, counts: BreakCounts | None = None) -> None:
        """`now`: monotonic seconds of its submission; `counts`: of earlier submissions."""
        self.request, self.id = request, request.id
        self.rows: list[Row] = list(request.past)
        """All of the answer so far, also by earlier attempts."""
        self.out = request.past_tokens
        """Tokens that have come out, also by earlier attempts."""
        self.cancelled = self.left = False
        """Whether nobody here wants more of it, and whether another worker does then."""
        self.task: Task[None]
        """Sees it to its end; set by the engine."""
        self.has_begun = False
        """Whether its task runs: cancelled before, a task would end without a last piece."""
        self.pool: ServerPool | None = None
        """The servers that have it, or had it last."""
        self.miscounted = False
        """Whether the last reply ended with counts that cannot be true, and is counted as one without."""
        self.counts = BreakCounts() if counts is None else counts
        self.tried: set[Rung] = set(self.counts.refused)
        """Rungs that were refused for this request."""
        self.refusals = 0
        """How often no server had room for it since its last progress."""
        self.progress_at = now
        """When it was sent, or its last token came."""
        self.kept_at: tuple[ServerSlot, str, str] | None = None
        """Where the newest reply's generation may go on without a reader, and the call that stops it."""
        self.prompt: Any = None
        """Its prompt as the server rendered or tokenised it."""
        self.reply: StreamReader | None = None
        """The last reply, which may have begun."""
        self.bare_ends = 0
        """Replies of the server in a row that ended without a finish reason, if this request's last one did."""
        self.model = request.served_by
        """The model that gives the answer; "" for the one that was asked for."""
        self.unsaid = ""
        """The same until a piece has said so, of another model than asked for."""
        self.scheduled = self.first = 0.0
        self.prompt_tokens = self.cached = 0
        self.told_prompt = False
        self.scored = not request.sampling.prompt_logprobs or bool(request.past)
        """Whether nothing need be told of the prompt any more."""
        self.has_extras = False
        """Whether the server has sent extra fields, so that each chunk is looked at for them."""
        self.extra_bytes = 0
        self.states: Extras = {}
        """The extras of chunk and choice that have come out, which are told again only if they change."""
        self._answer = ""
        """The answer of a task."""

    @property
    def is_bare_end(self) -> bool:
        """Whether a reply that came to its end without a finish reason counts as complete: the limit is reached, or
        there was nothing to add to what an earlier reply has given."""
        return bool(self.rows) and (self.is_spent or (self.reply is not None and self.out == self.reply.out_before))

    @property
    def is_spent(self) -> bool:
        """Whether it has as many tokens as it may."""
        limit = self.request.sampling.max_tokens
        return limit is not None and self.out >= limit

    @property
    def received(self) -> int:
        """Tokens of the last reply."""
        return 0 if self.reply is None else self.reply.received

    def note_break(self, model: str) -> None:
        """A server of this model has failed the request."""
        self.counts.breaks += 1
        if not self.rows:
            self.counts.by_model[model] = self.counts.by_model.get(model, 0) + 1

    def note_busy(self, outcome: ReplyOutcome, now: float) -> None:
        """A server had no room for the request, or a limit held it, or the server did not take its key."""
        self.refusals += 1
        if outcome.status in reply.LIMITED or outcome.end is End.KEY:
            words = f": {outcome.words[: http.MAX_WORDS]}" if outcome.words and outcome.end is not End.KEY else ""
            self.counts.refused_at = now if self.counts.refused_at is None else self.counts.refused_at
            self.counts.refusal = outcome.reason + words

    def move_to(self, model: str) -> None:
        """The servers of another model get the request, before its first token. "": those of the model asked for."""
        if model != self.model:
            self.prompt, self.counts.breaks, self.refusals = None, 0, 0
            self.counts.refused_at = None
        self.model = self.unsaid = model

    def written_rows(self, facts: ServerFacts) -> list[Row]:
        """The rows as a server gives them."""
        if not self.is_tagged(facts):
            return self.rows
        return [(as_written(text, opened=self.is_opened), ids, count) for text, ids, count in self.rows]

    def is_tagged(self, facts: ServerFacts) -> bool:
        """Whether a server gives reasoning between the model's own tags: it is sent a prompt and no conversation."""
        request = self.request
        plain = request.tools is None and request.sampling.json_schema is None
        return bool(request.reasoning) and facts.template_chat and plain

    @property
    def is_opened(self) -> bool:
        """Whether the prompt ends with the tag that begins reasoning."""
        return isinstance(self.prompt, str) and self.prompt.rstrip().endswith(BEGIN)

    def answer(self, text: str, prompt_tokens: int | None) -> None:
        """A server has answered the task. `prompt_tokens`: None of one whose count cannot be true."""
        self._answer, self.prompt_tokens, self.miscounted = text, prompt_tokens or 0, prompt_tokens is None

    def last(self, finish: str = "", failure: Failure | None = None) -> Piece:
        """The piece that ends the request. What was held back comes out if the answer is complete."""
        piece, prompt, cached = Piece(self.id, self._answer if finish == "stop" else ""), self.prompt_tokens, 0
        if self.reply is not None:
            prompt, cached = self.reply.prompt_size()
            piece = self.reply.rest() if finish in COMPLETE else piece
        return replace(
            piece,
            finish=finish,
            failure=failure,
            prompt_tokens=prompt,
            cached_tokens=cached,
            times=EngineTimes(self.scheduled, self.first, time.monotonic()) if self.first else None,
            served_by=self.unsaid if finish in COMPLETE else "",
        )

    def spent(self) -> int:
        """Tokens of prompt and reply, for rate limits."""
        return self.prompt_tokens + self.received


def text_of_rows(rows: list[Row]) -> str:
    """All of an answer's text so far."""
    return "".join([text for text, _, _ in rows])


Emit: TypeAlias = Callable[[Piece], None]


class StreamReader(Reply):
    """One reply to a request. Its chunks become pieces as they are read."""

    def __init__(
        self, generation: UpstreamGeneration, connection: UpstreamConnection, emit: Emit, facts: ServerFacts, rung: Rung
    ) -> None:
        super().__init__()
        self.generation, self._connection, self._emit = generation, connection, emit
        self._facts, self._rung = facts, rung
        request, shown = generation.request, text_of_rows(generation.rows)
        self.outcome: ReplyOutcome | None = None
        """How the reply ends, as far as its chunks say."""
        self.is_read = False
        """Whether the reply came to its end."""
        self.received = 0
        """Tokens of this reply."""
        self.out_before = generation.out
        """Tokens that had come out when it began, in whatever way it continues."""
        self._began = 0 if rung in FROM_BEGINNING else generation.out
        """Those of them that are not part of this reply."""
        self._expected = text_of_rows(generation.written_rows(facts)) if rung in REPEATED else ""
        """What a replay must still repeat."""
        self._splitter: EventSplitter | None = None
        """None before the stream begins, and of a reply that is no stream."""
        self._finished_at = 0.0
        """When a chunk first said how the reply ends."""
        self._held: list[Piece] = []
        """Tokens whose text has not come out yet, such as those of an incomplete character."""
        self._gate = TokenGate(request.sampling.stop, shown)
        self._calls = None if request.tools is None else DeltaWriter()
        tagged = generation.is_tagged(facts)
        self._tags = ReasoningMarker(shown, opened=generation.is_opened) if tagged else None
        """Of a text that has the model's own tags."""
        self._reasoning = ReasoningWriter() if request.reasoning and not tagged else None
        """Of reasoning that the server tells apart."""
        self._uncounted = 0
        """Chunks with text and no tokens."""
        limit = request.sampling.max_tokens
        self._cap = (facts.context or DEFAULT_CONTEXT if limit is None else limit) + MAX_EXCESS_TOKENS
        """Tokens after which the answer is cut, whatever the server goes on to send."""
        self._characters = max(MIN_CHARACTERS, self._cap * MAX_CHARACTERS_PER_TOKEN) - len(shown if self._began else "")
        """How many more the answer may have."""
        self._rows = self._cap
        """Log-probabilities that it may still have: one for each token."""
        each = MAX_CHARACTERS_PER_ALTERNATIVE * (1 + (request.sampling.logprobs or 0))
        self._row_characters = max(MIN_CHARACTERS, self._cap * each)
        """How many more these may have."""
        generation.reply, generation.bare_ends, generation.miscounted = self, 0, False
        generation.progress_at = time.monotonic()
        generation.scheduled = generation.scheduled or generation.progress_at

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted of a reply that is not at its end."""
        return self._gate.hit or self.generation.out > self._cap or self._characters < 0

    @property
    def is_excessive(self) -> bool:
        """Whether it has more bytes than its tokens can need."""
        tokens = max(self.received, self._cap - self._rows)
        return self.size > http.MAX_REPLY_BYTES + MAX_READ_PER_TOKEN * tokens

    # --- a read --------------------------------------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        """Hot path: called once for each read."""
        if self.done.done():
            return
        if self._splitter is None:
            if self.status != 200 or self.body or data.lstrip(http.BOM + WHITE)[:1] == b"{":
                self._collect(data)
                return
            self._splitter = EventSplitter()
        try:
            self._take(self._splitter.feed(data))
        except LineTooLongError:
            self.settle(self.outcome or by_malformed("line, which has no end"))

    def _collect(self, data: bytes) -> None:
        """Of an error, or of an answer that is no stream, although one was asked for."""
        if self.status != 200:
            data = data[: MAX_ERROR_BYTES - len(self.body)]
        super().on_body(data)
        if len(self.body) > http.MAX_LINE_BYTES:
            self.settle(by_malformed("answer in one piece, which is too long"))

    def _take(self, events: list[bytes]) -> None:
        """Hand what the events of one read bring to the engine."""
        now, pieces, ended = time.monotonic(), list[Piece](), False
        for event in events:
            if (piece := self.take(event, now)) is not None:
                pieces.append(piece)
            if self.outcome is not None:
                self._finished_at = self._finished_at or now
                ended = self.is_over or (self.outcome.end is not End.DONE and event != DONE)
                if ended:
                    break
        if pieces:
            self._emit(pieces[0] if len(pieces) == 1 else joined(self.generation.id, pieces))
        if ended and self.outcome is not None:  # else the end of the body follows, or check_time gives it up
            self.settle(self.outcome)

    def on_end(self, problem: str) -> None:
        self.problem = problem
        try:
            if not self.done.done() and self.status == 200 and not problem:
                whole = [self.body] if self.body else []
                self._take(whole if self._splitter is None else self._splitter.flush())
            if self.done.done():
                return
            how: Break = "malformed" if problem == http.EXCESS else "" if problem else "bare"
            cut = by_cut(problem or "the stream ended without a finish reason", how)
            failed = self.status not in (0, 200)
            outcome = reply.by_status(self.status, self.body) if failed else self.outcome or cut
        except Exception as error:  # noqa: BLE001 - the boundary of a reply: its request must end
            self.settle(by_malformed(f"end ({type(error).__name__})"))
            return
        self.settle(outcome, keep=not problem)

    def settle(self, outcome: ReplyOutcome, *, keep: bool = False) -> None:
        """Note how the reply ended. `keep`: the connection need not be closed; otherwise the server notices that
        nobody reads on, and stops."""
        if not self.done.done():
            self.done.set_result(None)
            self.outcome, self.is_read = outcome, keep
            if not keep:
                self._connection.close()

    def check_time(self, now: float, first_s: float, between_s: float) -> None:
        """End a reply that makes no progress."""
        if self._finished_at and now - self._finished_at > FINISH_GRACE_S and self.outcome is not None:
            self.settle(self.outcome)
            return
        limit_s = between_s if self.received else first_s
        if now - self.generation.progress_at > limit_s:
            self.settle(by_cut(f"no token for {limit_s:g} s", "stalled"))

    # --- a chunk -------------------------------------------------------------------------------------------------

    def take(self, data: bytes, now: float) -> Piece | None:
        """Turn one chunk into a piece, if it brings anything. `outcome` is set when it says how the reply ends."""
        finished = self.outcome  # of an earlier chunk: the answer is complete, whatever comes now
        if data == DONE:
            self.outcome = finished or by_cut("[DONE] without a finish reason", "bare")
            return None
        try:
            chunk = self._read(data)
            if (chunk.error or not chunk.choices) and (error := reply.error_in(chunk, data)) is not None:
                self.outcome = finished or reply.by_error(error)
                return None
            extras = reply.extras_of(data) if self.generation.has_extras else NO_EXTRAS
            return self._piece(chunk, now, extras)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if reply.is_blank(data):
                return None
            self.generation.miscounted = finished is not None
            self.outcome = finished or by_malformed(f"chunk ({type(error).__name__})")
            return None

    def _read(self, data: bytes) -> Chunk:
        """Raises DecodeError."""
        if not self.generation.has_extras:
            try:
                return reply.decode_known(data)
            except UNREADABLE:
                self.generation.has_extras = True
        try:
            return reply.decode(data)
        except UNREADABLE:
            if data.lstrip()[:1] != b"{" or len(data) > http.MAX_LENIENT_BYTES:
                raise
            with suppress(*UNREADABLE):
                return reply.decode(reply.mended(data))
            chunk = reply.decode(reply.mended(data, reply.COUNTS))
            if not (chunk.choices and chunk.choices[0].finish_reason):
                raise
            self.generation.miscounted = True
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
        text, hidden = reply.text_of(choice)
        count = min(max(0, count), max(0, self._cap + 1 - self._began - self.received))  # more cannot be true
        if choice.finish_reason and self.outcome is None:
            self.outcome = reply.by_finish(choice.finish_reason)
        if self._calls is not None:
            text, hidden = self._with_calls(self._calls, choice, text), hidden and not reply.calls_of(choice)
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
        self._characters -= len(text)
        if not (count or text):
            return self._with_extras(None, extras)
        generation = self.generation
        generation.progress_at, generation.refusals, generation.counts.breaks = now, 0, 0
        generation.counts.refused_at = None
        generation.first = generation.first or now
        ids = tuple(chunk.verbose.tokens if chunk.verbose is not None else choice.token_ids or ())
        sampling = generation.request.sampling
        wanted, ends = sampling.logprobs, not (text or sampling.prompt_logprobs) and choice.finish_reason
        # A token without text that ends the answer is no part of it; only behind the rows of a prompt it has one.
        logprobs = () if wanted is None or ends else self._bounded(reply.logprobs_of(choice.logprobs, wanted))
        piece = Piece(generation.id, text, ids if len(ids) <= count else (), count, logprobs=logprobs)
        passed = self._emitted(piece, hidden=hidden)
        return self._with_extras(passed, extras) if extras else passed

    def _bounded(self, logprobs: tuple[Logprob, ...]) -> tuple[Logprob, ...]:
        """Log-probabilities as far as an answer may have them."""
        self._row_characters -= sum([len(row.token) + sum([len(text) for text, _ in row.top]) for row in logprobs])
        logprobs = logprobs[: self._rows] if self._row_characters >= 0 else ()
        self._rows -= len(logprobs)
        return logprobs

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
        if not extras or self._expected or (self._rung in REPEATED and self.received < self.generation.out):
            return piece
        generation, found = self.generation, dict[str, Any]()
        for place, fields in extras.items():
            known = generation.states.get(place, {}) if place in STATES else {}
            if new := {name: value for name, value in fields.items() if known.get(name) != value}:
                found[place] = new
                generation.states[place] = {**known, **new}
        try:
            generation.extra_bytes += len(msgspec.msgpack.encode(found))
        except OverflowError:  # a number that the log cannot hold
            return piece
        if not found or generation.extra_bytes > MAX_EXTRA_BYTES:
            return piece
        if piece is None:
            return Piece(generation.id, extras=found)
        return replace(piece, extras=merged([piece.extras, found]) if piece.extras else found)

    def _with_calls(self, calls: DeltaWriter, choice: Choice, content: str) -> str:
        """The text of a chunk, with its part of calls. Raises ValueError."""
        text = calls.text(content) if content else ""
        if found := reply.calls_of(choice):
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
        text, hidden = reply.text_of(choice) if choice is not None else ("", False)
        return self.received + (1 if text or hidden else 0)

    def _correct(self, chunk: Chunk) -> None:
        """Take the count of the last chunk, which knows the tokens that no chunk showed."""
        if chunk.usage is not None and self.outcome is not None and not self._gate.hit:
            limit = self.generation.request.sampling.max_tokens
            most = self.received + MAX_EXCESS_TOKENS if limit is None else limit - self._began
            self.received = max(self.received, min(chunk.usage.completion_tokens or 0, most))

    def _note_prompt(self, chunk: Chunk, choice: Choice | None) -> None:
        generation = self.generation
        if progress := chunk.prompt_progress:
            generation.prompt_tokens, generation.cached = progress.total, progress.cache
        elif chunk.usage is not None and chunk.usage.prompt_tokens:
            generation.prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            generation.cached = (details.cached_tokens or 0) if details is not None else 0
        ids = chunk.prompt_token_ids or (choice.prompt_token_ids if choice is not None else None)
        if ids:
            generation.prompt_tokens = generation.prompt_tokens or len(ids)
            if self._rung is Rung.FRESH:
                generation.prompt = ids

    def _emitted(self, piece: Piece, *, hidden: bool) -> Piece | None:
        if self._expected or (self._rung in REPEATED and self.received - piece.n < self.generation.out):
            piece = self._beyond_replay(piece)
            if not (piece.text or piece.n):
                return None
        if hidden:
            return self._passed(replace(piece, ids=()))
        if not piece.text:
            self._held.append(piece)
            return None
        if self._held:
            piece = joined(self.generation.id, [*self._held, piece])
            self._held.clear()
        if self._tags is not None:
            piece = self._tags.feed(piece)
        return self._passed(self._gate.feed(piece)) if piece.n or piece.text else None

    def _beyond_replay(self, piece: Piece) -> Piece:
        """What of a piece goes beyond the text and the tokens that a reply must repeat, without ids: they may also be
        those of what was shown."""
        text, rows = piece.text, piece.logprobs
        if self._expected and self._expected.startswith(text):
            self._expected = self._expected[len(text) :]
        elif text.startswith(self._expected):
            text, self._expected = text[len(self._expected) :], ""
            new = max(0, min(piece.n, self.received - self.generation.out))
            return Piece(piece.id, text, n=new, logprobs=rows[len(rows) - new :] if len(rows) == piece.n else ())
        else:
            self.outcome = ReplyOutcome(End.RESTART, MISMATCH)
            self.generation.tried.add(self._rung)
        return Piece(piece.id)

    def _passed(self, piece: Piece) -> Piece | None:
        """Note what comes out now."""
        generation = self.generation
        if self._gate.hit:
            self.outcome = ReplyOutcome(End.DONE, finish="stop")
        if not (piece.n or piece.text):
            return None
        generation.rows.append((piece.text, piece.ids, piece.n))
        generation.out += piece.n
        if generation.unsaid:
            piece, generation.unsaid = replace(piece, served_by=generation.unsaid), ""
        if self.is_over and self.outcome is None:
            self.outcome = ReplyOutcome(End.DONE, finish="length")
        if not generation.told_prompt and generation.prompt_tokens:
            generation.told_prompt = True
            prompt, cached = self.prompt_size()
            return replace(piece, prompt_tokens=prompt, cached_tokens=cached)
        return piece

    # --- the end -------------------------------------------------------------------------------------------------

    def rest(self) -> Piece:
        """What was held back of an answer that is complete."""
        request_id, parts = self.generation.id, list[Piece]()
        if self._gate.hit:
            return Piece(request_id)
        if calls := "" if self._calls is None else self._calls.end():
            parts.append(self._gate.feed(Piece(request_id, calls)))
        if self._tags is not None:
            parts.append(self._gate.feed(self._tags.flush(request_id)))
        parts += [self._gate.flush(request_id), *self._held]
        piece = joined(request_id, [part for part in parts if part.n or part.text or part.extras])
        return replace(piece, n=max(piece.n, self.received + self._began - self.generation.out))

    def prompt_size(self) -> tuple[int, int]:
        """Tokens of the prompt and how many were cached, without those of the answer that the prompt ended with."""
        tokens = max(0, self.generation.prompt_tokens - self._began)
        # Where tenants are not told apart, the number would tell what others have asked.
        told = self._facts.salted or self._facts.kind == "llama-server"
        return tokens, min(self.generation.cached, tokens) if told else 0
