"""Attempt: runs one claimed job, turning the engine's pieces into numbered deltas and finally into the terminal record.

It knows neither Redis nor the kind of engine. It decides only when the job is over, and with which state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from msgspec import Raw
from msgspec.structs import replace

from penstock.engine import (
    NEUTRAL_PRIORITY,
    ChatTurn,
    EngineTimes,
    Failure,
    Input,
    Logprob,
    Piece,
    Request,
    token_bytes,
)
from penstock.tools import CallReader
from streaming.jobs import codec
from streaming.jobs.codec import Delta, Kept, Opening, Section, Terminal, Usage, encode, encode_delta, unpacked
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import CancelledBy, Chat, Inputs, Job, JobState, Text, own_failure
from streaming.jobs.lease import SILENT, Claim, Finish
from streaming.jobs.records import claimed_ms, kept_ms
from streaming.order import Priority
from streaming.redis.clock import Clock
from workers.engines.constraint import FILTERED
from workers.engines.task_answers import check_task_answer
from workers.output_filter import OutputFilter

log = logging.getLogger(__name__)


class AttemptStamps:
    """Timestamps of one attempt, a few per job, in seconds of `time.monotonic`; 0.0: not reached yet, or unknown.
    `released`: when the engine got it."""

    __slots__ = ("cancelled", "first", "last", "released", "scheduled")

    def __init__(self) -> None:
        self.released = self.scheduled = self.first = self.last = self.cancelled = 0.0

    def finish(self, times: EngineTimes | None, now: float) -> None:
        """Stamp the end of one text, which came `now`. `times`, the engine's own stamps, take precedence.

        A job of several texts begins with the first to begin and ends with the last to end.
        """
        if times is not None:
            # the earlier of the two; 0.0 is "unknown" and loses to any time
            self.scheduled = min(self.scheduled or times.scheduled, times.scheduled or self.scheduled)
            self.first = min(self.first or times.first, times.first or self.first)
        self.last = max(self.last, times.last if times is not None and times.last else now)

    def generated(self, clock: Clock, partition: int) -> codec.Generated:
        """The stamps in Redis time, for the record. A job without a first token has no last one either."""
        known = (self.released, self.scheduled, self.first, self.last if self.first else 0.0)
        released, scheduled, first, last = clock.times(known, partition)
        return codec.Generated(released, scheduled, first, last, clock.error_us(partition))


def prompt_of(job: Job, number: int) -> Sequence[ChatTurn] | str | Sequence[int]:
    """The job's prompt with this index; that of a group of inputs is empty."""
    prompt = job.prompt
    if isinstance(prompt, Inputs):
        return ""
    if isinstance(prompt, Chat):
        return prompt.turns if job.response is None else merged_calls(prompt.turns)
    return prompt.texts[number] if isinstance(prompt, Text) else prompt.ids[number]


def inputs_of(job: Job, number: int) -> Sequence[Input]:
    """The job's group of inputs with this index; a prompt has none."""
    return job.prompt.groups[number] if isinstance(job.prompt, Inputs) else ()


def merged_calls(turns: Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Turns in which the calls of one answer, which the Responses API has as items of their own, are one turn."""
    merged: list[ChatTurn] = []
    for turn in turns:
        if turn.calls and not turn.content and merged and merged[-1].role == turn.role == "assistant":
            extras = turn.extras | merged[-1].extras
            merged[-1] = replace(merged[-1], calls=merged[-1].calls + turn.calls, extras=extras)
        else:
            merged.append(turn)
    return merged


def prompt_text(job: Job, number: int, rows: Iterable[Logprob]) -> str:
    """The prompt with this index as text; that of token ids by their `rows`."""
    if isinstance(job.prompt, Text):
        return job.prompt.texts[number]
    return b"".join([token_bytes(row.token) for row in rows]).decode(errors="replace")


def reasoned_tokens(deltas: Iterable[Delta]) -> int:
    """Count the tokens whose text is reasoning, or that end it, of all choices together."""
    readers, count = defaultdict[int, CallReader](CallReader), 0
    for delta in deltas:
        reader = readers[delta.index]
        reasons = reader.reasons
        reader.feed(delta.text)
        count += delta.n if reasons or reader.reasons else 0
    return count


EXPIRED = Failure(
    "deadline_exceeded", "The job's queue.deadline_ms passed before it was done.", 408, "queue.deadline_ms"
)
CANCELLED = Failure("job_cancelled", "The job was cancelled.", 409)

MAX_COUNT = 2**40
"""The largest token count that a piece may give, far above any model's: sums of them fit into 64 bits."""
MAX_TOTAL = 2**53 - 1
"""The largest token count of a job: the store's scripts count exactly up to it."""
ENGINE_PRIORITY = {Priority.INTERACTIVE: 0.8, Priority.STANDARD: NEUTRAL_PRIORITY, Priority.BATCH: 0.2}
"""The priority inside an engine of each lane's requests; between two lanes there is room for a resumed request."""


def _delta_readers(job: Job, reply: Sequence[str]) -> Sequence[str]:
    """The API processes that get a job's deltas. One whose client waits for an answer in one piece gets its end alone,
    unless it is there twice: then somebody follows the job there."""
    own = job.reply_to if not job.stream and reply.count(job.reply_to) < 2 else ""
    return tuple([each for each in dict.fromkeys(reply) if each != own]) or (SILENT,)


class Attempt:
    """The worker's object for one run of a job (`codec.Run`), which continues after `history`: earlier deltas."""

    __slots__ = (
        *("claim", "run_number", "job", "partition", "continued_tokens", "opening", "seq", "first_frame"),
        *("checkpointing", "stamps", "trace", "deadline", "addresses", "unnamed", "share", "ahead", "last_start"),
        *("choices", "_history", "_sections", "_kept_ms", "_record", "_kept", "_counts", "_finishes", "_prompts"),
        *("_unlogged_prompts", "servers", "_stopped", "_open", "_waiting", "_echoes", "first_ms", "check"),
        *("filters",),
    )
    """With 30 attributes or more an instance has a dict of its own: each token then cost the worker 10 % more."""
    filters: Sequence[OutputFilter]
    """By choice, what applies content rules to its text; empty: there are none."""

    def __init__(self, claim: Claim, history: History = NOTHING) -> None:
        job = claim.job
        self.claim, self.job, self.partition = claim, job, claim.partition
        self.run_number = claim.run_number
        """Identifies the job in this worker's frames."""
        self._history, self._sections = history.rows, history.sections
        self.continued_tokens: tuple[int, ...] = ()
        """Of the text that this run continues, the tokens that each earlier run generated, oldest run first."""
        self.first_ms, self._kept_ms = history.first_ms, 0
        """Redis time of the job's first token, if an earlier run generated it, else 0; and for how long what is kept of
        earlier runs was generated."""
        self.seq = len(history.rows)
        """The last delta's number."""
        self.opening = Opening(job.id, begun_ms=self.first_ms)
        self._record, self._kept = bytearray(), list[Kept]()
        """All deltas of the job, as they are logged and as its record will keep them. The first are concatenated: one
        buffer instead of an object per delta keeps the hot data of the token path in the processor's cache."""
        self.choices, self._counts = job.choices, [0] * job.choices
        """`_counts`: tokens generated, by choice."""
        self.first_frame = claim.first_frame
        """The first frame of the log that a replay of this job still needs."""
        self.check: asyncio.Task[None] | None = None
        """Validates the answer against the requested JSON schema."""
        self.checkpointing = False
        """Whether a checkpoint of its deltas is being written."""
        self.stamps, self.trace, self.filters = AttemptStamps(), "", ()
        """`trace`: as in the engine's requests."""
        self.deadline: asyncio.TimerHandle | None = None
        """The worker's timer, kept here so that it ends with the attempt."""
        self.addresses = _delta_readers(job, claim.reply)
        """Reply addresses that get its deltas."""
        self.unnamed = True
        """Whether some address still needs the opening, which binds the run's number to this job."""
        self._finishes = [""] * self.choices
        self._prompts: dict[int, tuple[int, int]] = {}
        """By choice: tokens of its prompt, and how many of them were cached, as the first engine counted."""
        self._unlogged_prompts: dict[int, tuple[int, int]] = {}
        """The entries of `_prompts` that no delta contains yet. Later attempts read the counts from the log."""
        self.servers: dict[int, str] = {}
        """By choice: the model that gives it, if it is another one than the job's."""
        if history is not NOTHING:
            self._take_over(history)
        self._echoes = {*range(self.choices)} - {row.index for row in history.rows} if job.echo else set()
        """The choices whose prompt is still to be shown in front of its text, as part of its first delta. No engine
        sees it: it would continue it."""
        self._stopped: tuple[JobState, Failure, str] | None = None
        self._open: set[int] = set()
        """Indices of choices that have not ended."""
        self._waiting: dict[int, Request] = {}
        """Open choices that were not submitted to the engine yet, the one that has waited longest first."""
        self.share, self.last_start = 1, 0
        """How many of its choices may be in the engine at a time; and the sequence number, among all texts of the
        worker, of the choice that was submitted last; 0: none was."""
        self.ahead: frozenset[str] = frozenset()
        """What the engine ran when the job began to wait at the gate, by request id."""

    def _take_over(self, history: History) -> None:
        """Take what earlier runs logged."""
        self.continued_tokens, self._kept_ms = history.tokens, kept_ms(history, self.claim.earlier_attempts)
        times = self.first_ms, self._kept_ms
        self.opening = Opening(self.job.id, self.seq + 1, history.last_run, (), 0, *times)
        for row in history.rows:
            self._record += encode_delta(replace(row, run_number=self.run_number))
            self._kept.append(codec.kept_form(row))
            self._counts[row.index] += row.n
            if row.finish:
                self._finishes[row.index] = row.finish
            if row.prompt is not None:
                self._prompts.setdefault(row.index, row.prompt)
            if row.served_by:
                self.servers[row.index] = row.served_by

    @property
    def over(self) -> bool:
        """Whether every choice has had its last piece."""
        return not self._open

    @property
    def waits(self) -> bool:
        """Whether choices wait to be submitted."""
        return bool(self._waiting)

    @property
    def started(self) -> int:
        """Number of choices that the engine runs or has queued."""
        return len(self._open) - len(self._waiting)

    @property
    def is_checked(self) -> bool:
        """Whether its answer is being validated now."""
        return self.check is not None and not self.check.done()

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    @property
    def constrained(self) -> bool:
        """Whether its complete texts are checked."""
        return self.job.constrained and not self.stopped

    def generated(self, index: int) -> int:
        """Tokens of a choice, also by earlier attempts."""
        return self._counts[index]

    def prompt_tokens(self, index: int) -> int:
        """Tokens of a choice's prompt as the engine counted them; 0: not known yet."""
        return self._prompts.get(index, (0, 0))[0]

    def first_token_s(self) -> float | None:
        """Seconds from the hand-over to the engine to the first token, without the wait inside the engine if that is
        known. None: no such time is known of one whole prompt, as for a continued job or one of several choices."""
        stamps = self.stamps
        if self._history or self.choices > 1 or not stamps.first:
            return None
        return stamps.first - (stamps.scheduled or stamps.released)

    def note_start(self, at_us: int) -> None:
        """Note the Redis time of the run's first token (0: not known), which its opening tells to a later attempt."""
        self.opening = replace(self.opening, at_ms=at_us // 1000)

    def add_address(self, address: str) -> None:
        """Send the deltas to one more address."""
        if address not in self.addresses:
            self.addresses = (*(known for known in self.addresses if known != SILENT), address)
            self.unnamed = True

    def requests(self) -> dict[int, Request]:
        """Build a request, by choice index, for each choice that has not finished."""
        requests, limit = {}, self.job.sampling.max_tokens
        rows: dict[int, list[Delta]] = {}
        for row in self._history:
            rows.setdefault(row.index, []).append(row)
        for index, count in enumerate(self._counts):
            # With 0 the prompt alone is asked for: its row is the answer.
            if limit is not None and count >= limit and (limit or index in rows) and not self._finishes[index]:
                self._finishes[index] = "length"
            if not self._finishes[index]:
                requests[index] = self._request(index, rows.get(index, ()))
        self._open = set(requests)
        return requests

    def queue_choices(self) -> None:
        """Queue every unfinished choice for submission, by rising index."""
        self._waiting = self.requests()
        self.stamps.released = time.monotonic()

    @property
    def next_choice(self) -> tuple[int, Request]:
        """The choice that has waited longest, if any waits."""
        return next(iter(self._waiting.items()))

    def start_next(self) -> tuple[int, Request]:
        """Take the choice that has waited longest; the caller submits it to the engine."""
        index = next(iter(self._waiting))
        return index, self._waiting.pop(index)

    def refuse(self, index: int, failure: Failure) -> None:
        """Fail the job because the engine refused this choice."""
        self._open.discard(index)
        self.stop(JobState.FAILED, failure)

    def start_no_more(self) -> None:
        """Drop the choices that wait to be submitted."""
        self._open.difference_update(self._waiting)
        self._waiting.clear()

    def _request(self, index: int, rows: Sequence[Delta]) -> Request:
        """`rows`: what earlier attempts generated of the choice."""
        sampling = self.job.sampling
        run = codec.author(self._sections, rows[0].seq) if rows else None
        past = [(row.text, row.ids, row.n) for row in rows]
        if self.job.echo and past:
            text, ids, n = past[0]
            text = text[len(prompt_text(self.job, index // sampling.n, rows[0].logprobs)) :]
            past[:1] = [(text, ids, n)] if text or n else []
            sampling = replace(sampling, prompt_logprobs=False)
        if sampling.n > 1:
            # A seed per copy, so that copies of one prompt differ.
            seed = None if sampling.seed is None else sampling.seed + index % sampling.n
            sampling = replace(sampling, n=1, seed=seed)
        return Request(
            self._request_id(index),
            prompt_of(self.job, index // self.job.sampling.n),
            sampling,
            past,
            self.job.tenant,
            ENGINE_PRIORITY[self.job.priority],
            self.job.tools,
            self.servers.get(index, ""),
            self.job.reasoning,
            task=self.job.task,
            inputs=inputs_of(self.job, index // self.job.sampling.n),
            text_id=f"{self.job.id}/{index}",
            trace=self.trace,
            begun_by=f"{self.claim.worker}/{self.run_number}" if run is None else f"{run.worker}/{run.number}",
            passed=self.job.passed,
            adapter=self.job.adapter,
        )

    def _request_id(self, index: int) -> str:
        return f"{self.job.id}/{self.run_number}/{index}"

    def live_ids(self) -> list[str]:
        """Engine ids of the requests that were submitted and have not ended."""
        return [self._request_id(index) for index in self._open if index not in self._waiting]

    def take(self, index: int, piece: Piece, now: float) -> bytes | None:
        """Turn one piece of a choice into a numbered delta, encoded; None if it has no content or the job was stopped.

        `now` is when the piece came, in monotonic seconds. Hot path: called once a token. Raises (OverflowError,
        ValueError, TypeError) if the piece cannot be encoded: the deltas are then as they were before.
        """
        n, finish = piece.n, piece.finish
        if piece.prompt_tokens:
            self._count_prompt(index, piece)
        if finish or piece.failure is not None:
            self._close(index, piece, now)
        if self._stopped is not None or not (n or piece.text or finish or piece.ids or piece.extras or piece.logprobs):
            return None
        if self._echoes and index in self._echoes:
            self._echoes.discard(index)
            echo = prompt_text(self.job, index // self.job.sampling.n, piece.logprobs)
            piece = replace(piece, text=echo + piece.text)
        seq = self.seq + 1
        if n > MAX_COUNT:
            raise OverflowError(f"{n} tokens in a piece")
        if piece.served_by or piece.extras or (self._unlogged_prompts and index in self._unlogged_prompts):
            delta = self._first_delta(index, piece, seq)
            kept: Kept = Raw(delta)
        elif n == 1 and not (index or finish or piece.logprobs):
            delta = encode((self.run_number, seq, piece.text, piece.ids))
            kept = piece.text
        else:
            delta = encode((self.run_number, seq, piece.text, piece.ids, index, n, finish, piece.logprobs))
            kept = Raw(delta)
        self._counts[index] += n
        self._record += delta
        self._kept.append(kept)
        self.seq = seq
        return delta

    def _count_prompt(self, index: int, piece: Piece) -> None:
        """Record a prompt's size. The first count stands, whatever a later attempt counts. Raises OverflowError."""
        if max(piece.prompt_tokens, piece.cached_tokens) > MAX_COUNT:
            raise OverflowError(f"more than {MAX_COUNT} prompt tokens")
        if index not in self._prompts:
            self._prompts[index] = self._unlogged_prompts[index] = piece.prompt_tokens, piece.cached_tokens

    def _first_delta(self, index: int, piece: Piece, seq: int) -> bytes:
        """Encode a delta that also carries the size of its choice's prompt, the model that gives the choice, or extras.
        Raises OverflowError, ValueError, TypeError."""
        prompt, model = self._unlogged_prompts.pop(index, None), piece.served_by
        if model:
            self.servers[index] = model
        fields = (self.run_number, seq, piece.text, piece.ids, index, piece.n, piece.finish, piece.logprobs)
        return encode_delta(Delta(*fields, prompt, model, piece.extras))

    def _close(self, index: int, piece: Piece, now: float) -> None:
        """Process the last piece of a choice. Raises ValueError for an answer that no reader could use."""
        if self.job.task is not None and piece.finish == "stop":
            check_task_answer(self.job.task, inputs_of(self.job, index), piece.text)
        self._open.discard(index)
        self.stamps.finish(piece.times, now)
        if piece.failure is not None:
            self.stop(JobState.FAILED, piece.failure)
        elif piece.finish == "cancelled":
            self.stop(JobState.CANCELLED, CANCELLED, CancelledBy.ENGINE)
        elif self._stopped is None:
            self._finishes[index] = piece.finish

    def logged(self) -> list[bytes]:
        """All deltas of the job, each encoded: this run's as they were sent, those of earlier runs as copies."""
        first = self.opening.first
        deltas = unpacked(self.seq, self._record)
        return [encode_delta(row if row.seq >= first else replace(row, run_number=-self.run_number)) for row in deltas]

    def own(self) -> list[bytes]:
        """The deltas of this run, each encoded."""
        return [encode_delta(row) for row in unpacked(self.seq, self._record) if row.seq >= self.opening.first]

    @property
    def openings(self) -> dict[int, Opening]:
        """The openings of `logged`: of this run, and of the copies of earlier runs' deltas, if there are any."""
        own = {self.run_number: self.opening}
        return own | {-self.run_number: Opening(self.job.id, copied=self._sections)} if self._history else own

    def answers(self) -> tuple[list[str], list[str]]:
        """The texts of a job that is over, with their finish reasons; that of a refusal is FILTERED, since no check is
        made of it either."""
        texts, finishes = [""] * self.choices, list(self._finishes)
        for delta in unpacked(self.seq, self._record):
            texts[delta.index] += delta.text
            if delta.extras and delta.extras.get("delta", {}).get("refusal"):
                finishes[delta.index] = FILTERED
        return texts, finishes

    def end_with_calls(self, choices: Collection[int]) -> None:
        """Note which answers have ended with a call of a tool."""
        finishes = enumerate(self._finishes)
        self._finishes = ["tool_calls" if each == "stop" and at in choices else each for at, each in finishes]

    def stop(self, state: JobState, failure: Failure, by: str = "") -> None:
        """End the job early: submit and show nothing more. The first reason stands. The engine still delivers the last
        pieces of submitted choices. `by`: who cancelled it, as CancelledBy."""
        self._stopped = self._stopped or (state, own_failure(self.job, failure), by)
        self.start_no_more()

    def terminal(self, worker: str, generated: codec.Generated) -> Terminal:
        """Build the terminal record, with everything a reader may still ask for. `generated`: stamps in Redis time.
        Raises OverflowError if a count cannot be stored."""
        usage = self._usage()
        if max(usage.prompt, usage.completion, usage.cached) > MAX_TOTAL:
            raise OverflowError(f"a token count above {MAX_TOTAL}")
        state, failure, cancelled_by = self._stopped or (JobState.COMPLETED, None, "")
        if self.first_ms:
            shown_claimed = 1000 * claimed_ms(self.first_ms, self.claim.earlier_attempts) or self.claim.started_us
            kept_us = 1000 * self._kept_ms
            generated = replace(generated, shown=1000 * self.first_ms, shown_claimed=shown_claimed, kept=kept_us)
        return Terminal(
            self.job.id,
            state,
            self.seq,
            tuple([finish or "stop" for finish in self._finishes] if state is JobState.COMPLETED else self._finishes),
            usage,
            failure,
            worker,
            self.first_ms or generated.first // 1000,
            self._all_sections(worker),
            codec.packed(self.seq, self._record),
            generated,
            (*self.continued_tokens, sum(self._counts) - sum(self.continued_tokens)) if self._sections else (),
            (generated.last or generated.released) // 1000,
            codec.served_by(self.choices, self.servers, self.job),
            cancelled_by,
        )

    def failed_terminal(self, worker: str, error: Exception) -> Terminal:
        """Build the terminal record of a job whose counts or times cannot be stored (`error`): without them."""
        failure, head = self._unusable(error), (self.job.id, JobState.FAILED, self.seq, tuple(self._finishes))
        log.error("%s", failure.message, extra={"job": self.job.id})
        sections, rows = self._all_sections(worker), codec.packed(self.seq, self._record)
        return Terminal(*head, failure=failure, worker=worker, sections=sections, rows=rows)

    def fail_unusable(self, index: int, piece: Piece, error: Exception) -> Piece:
        """Fail the job because `take` raised on a piece. Returns the piece without its content."""
        failure = self._unusable(error)
        if not self.stopped:
            log.error("%s", failure.message, extra={"job": self.job.id})
            self.stop(JobState.FAILED, failure)
        if not piece.last:
            return Piece(piece.id)
        self.refuse(index, failure)
        return Piece(piece.id, failure=failure)

    def _unusable(self, error: Exception) -> Failure:
        cause = f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}"
        message = f"The engine of {self.job.model} gave a value that cannot be stored ({cause})."
        return Failure("engine_error", message, 500)

    def finish(self, end: Terminal) -> Finish:
        """The end of the job, for the store."""
        prompt, rows = self.job.sampling.n * end.usage.prompt, codec.encode_record_rows(self._kept)
        return Finish(end, self.run_number, not self.job.stream, prompt=prompt, rows=rows)

    def _all_sections(self, worker: str) -> tuple[Section, ...]:
        return (*self._sections, Section(self.opening.first, codec.Run(worker, self.run_number)))

    def usage_by_model(self) -> dict[str, Usage]:
        """The usage, by the model that gave it. Each prompt counts once, for the model of its first choice."""
        n, found = self.job.sampling.n, dict[str, Usage]()
        for index, count in enumerate(self._counts):
            name = self.servers.get(index, self.job.model)
            prompt, cached = (0, 0) if index % n else self._prompts.get(index, (0, 0))
            before = found.get(name, Usage())
            found[name] = Usage(before.prompt + prompt, before.completion + count, before.cached + cached)
        return found

    def _usage(self) -> Usage:
        usage = codec.total_usage(self._prompts, sum(self._counts), self.choices, self.job.sampling.n)
        if not self.job.reasoning:
            return usage
        return replace(usage, reasoning=reasoned_tokens(unpacked(self.seq, self._record)))
