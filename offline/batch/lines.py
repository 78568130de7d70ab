"""Batch lines: checks the input, keeps a bounded number of lines in the queue, and writes each answer to the ledger.

The id of a line's job follows from batch, line and attempt: enqueuing a line twice is harmless, and the next turn, in
any process, finds the same jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from api.openai.batch_lines import (
    MAX_LINE_BYTES,
    BadLine,
    Envelope,
    answer,
    envelope,
    job_of,
    refusal,
    request_of,
    traits,
    worth_retrying,
)
from api.openai.errors import ApiError, internal_error, limit_reached, too_large_for_store
from offline.tools import OfflineTools
from penstock.engine import ModelCard
from penstock.text import form_of
from streaming.batches.ledger import AnswerRow, InputPlan, Ledger, LineOutcome, Segment, lines_of
from streaming.batches.store import BatchLease, BatchProgress, LineFault
from streaming.errors import LaneFull, LimitReached, NeverFits, StoreFull, Unavailable
from streaming.fleet.aliases import NO_ALIASES, Aliases
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.ids import line_job_id, partition_of
from streaming.jobs.codec import Usage
from streaming.jobs.job import Job, JobState, has_media
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.settings import QuotaSettings
from streaming.order import Priority
from telemetry import tracing as names
from telemetry.otlp import Attributes
from telemetry.tracing import Span

log = logging.getLogger(__name__)

MAX_FAULTS = 100
STOP_CHECK_LINES = 64
"""Lines between two calls of `should_continue`."""


class ValidationInterrupted(Exception):
    """Raised when the caller stopped the reading before its end."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Conditions that each line of a batch must satisfy."""

    endpoint: str
    models: Mapping[str, ModelSettings]
    max_lines: int
    max_choices: int | None = None
    """Choices of one line; None: any number."""
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    """Capabilities of each model, by name."""
    max_line_bytes: int = MAX_LINE_BYTES
    tenant: str = ""
    aliases: Aliases = NO_ALIASES


@dataclass(slots=True)
class ValidatedInput:
    """Result of reading an input. If it has faults, no line of it is run."""

    plan: InputPlan = field(default_factory=InputPlan)
    faults: list[LineFault] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    tokens: int = 0
    refused: int = 0
    """Lines whose request was refused; the segment holds their error answers."""


def validate_input(
    source: Path, terms: Terms, segment: Segment, should_continue: Callable[[], bool] = lambda: True
) -> ValidatedInput:
    """Read and check the whole input, one line at a time, without Redis. It blocks: call it from a thread.

    Lines with a common prompt prefix are computed after each other, so that they share the engine's KV cache. A group
    takes the place of its first line, so a file without common prefixes keeps its order.

    Args:
        segment: gets an error answer for each well-formed line whose request is refused.
        should_continue: asked now and then; False stops the reading.

    Raises:
        OSError: the file cannot be read.
        ValidationInterrupted: `should_continue` returned False.
    """
    found, names, by_digest = ValidatedInput(), dict[bytes, int](), dict[bytes, int]()
    plan, firsts, order = found.plan, dict[int, int](), list[tuple[int, ...]]()
    with source.open("rb") as file:
        for number, offset, data in lines_of(file, terms.max_line_bytes):
            if number % STOP_CHECK_LINES == 0 and not should_continue():
                raise ValidationInterrupted
            if len(plan) >= terms.max_lines:
                message = f"The file has more than {terms.max_lines} lines, the most one batch may have."
                found.faults.append(LineFault(number, "too_many_lines", message))
                break
            place = plan.add(number, offset, len(data))
            try:
                line = _parsed(data, number, terms, names)
                if found.faults:
                    continue
                known = terms.aliases, terms.models, terms.max_choices
                request = request_of(line, terms.tenant, *known, meant=plan.meant)
            except BadLine as bad:
                found.faults.append(LineFault(number, bad.code, str(bad), bad.param))
                if len(found.faults) >= MAX_FAULTS or (place == 0 and form_of(data)):
                    break
                continue
            except ApiError as error:
                segment.add(place, LineOutcome.FAILED, answer=refusal(error))
                found.refused += 1
                continue
            seen = traits(request, terms.cards.get(request.model))
            found.models.add(seen.model)
            plan.duplicate_of[place] = by_digest.setdefault(seen.digest, place) if seen.digest else place
            if plan.duplicate_of[place] == place:
                order.append((*(firsts.setdefault(group, place) for group in seen.groups), place))
                plan.tokens[place] = seen.tokens
                found.tokens += seen.tokens
    if not len(plan):
        found.faults.append(LineFault(0, "empty_file", "The file has no lines."))
    plan.order.extend(key[-1] for key in sorted(order))
    return found


def _parsed(data: bytes, number: int, terms: Terms, names: dict[bytes, int]) -> Envelope:
    """Parse a line and check its size and custom_id. `names`: by the digest of each custom_id, the line that used it
    first. Raises BadLine."""
    if len(data) > terms.max_line_bytes:
        raise BadLine("line_too_long", f"This line has more than {terms.max_line_bytes} bytes.")
    line = envelope(data, terms.endpoint)
    digest = hashlib.blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
    if (earlier := names.setdefault(digest, number)) != number:
        raise BadLine("duplicate_custom_id", f"Line {earlier} has the same custom_id.", "custom_id")
    return line


JOBS_PER_CALL = 64
"""Jobs enqueued, or records read, in one round trip."""
MEDIA_LINES, MEDIA_BYTES, MEDIA_S = 4, 32 << 20, 1.0
"""Lines whose media are read at once, and after how many bytes or seconds of it the others wait for the next call."""
MAX_BLOCKED = 64
"""Lines that may wait for room in the store before no line behind them is tried."""
ANSWERED_RETENTION_S = 600
"""How long the store keeps the record of a line's job once its answer is on disk."""
SLOTS_MAX_AGE_S = 2.0
MAX_HELD_S = 30.0
"""After a limit has refused a line, another one is tried by then: limits change."""
RATE_WINDOW_S = 10.0


class Lines:
    """The lines of one batch during one turn; `open` makes it."""

    def __init__(self, tools: OfflineTools, lease: BatchLease, folder: Path, plan: InputPlan, ledger: Ledger) -> None:
        self._tools, self._lease, self._folder = tools, lease, folder
        self.plan, self.ledger = plan, ledger
        self._queue = Queue(tools.store_client, tools.headroom, tools.weights, tools.limits)
        self._job_reader, self._fleet = JobReader(tools.store_client), Fleet(tools.store_client)
        self._segment = Segment(folder, lease.epoch)
        self._copies = plan.copies()
        """How many lines get the answer of each."""
        self._waiting = deque(line for line in plan.order if ledger.ends[line] is None)
        """Lines without an answer that are not in the queue, in the order to enqueue them."""
        self._queued: dict[str, int] = {}
        """Lines in the queue, by job id."""
        self._needed: dict[int, int] = {}
        """Bytes that each waiting line needs for which the store had no room; smaller lines overtake these."""
        self._held_until = 0.0
        """Until when (monotonic) limits admit no line; 0: they have refused none."""
        self._cards: Mapping[str, ModelCard] = {}
        """The model cards by which these bytes were computed."""
        self._cancelling = False
        """Jobs that end as cancelled were cancelled by `give_up`."""
        self.tokens_left = sum(plan.tokens[line] for line in self._waiting)
        """Work, in tokens, of the lines that have no answer."""
        self._completed = self._failed = 0
        self._retried = sum(ledger.failures)
        self._usage = Usage()
        self._ends: deque[tuple[float, int]] = deque()
        """Loop time and number of lines, for each commit that ended some."""
        self._slots, self._slots_at = 0, float("-inf")
        self._lane, self._reason = Priority.BATCH, ""
        self._count([end for end in ledger.ends if end is not None])

    @classmethod
    async def open(cls, tools: OfflineTools, lease: BatchLease, folder: Path) -> Lines:
        """Read what earlier turns wrote, and find the lines that are in the queue. Raises Unavailable, OSError."""

        def load() -> Lines:
            plan = InputPlan.load(folder)
            return cls(tools, lease, folder, plan, Ledger.load(folder, len(plan)))

        lines = await asyncio.to_thread(load)
        await lines._find_queued()
        return lines

    async def _find_queued(self) -> None:
        # Lines are enqueued in order, except the few that wait for room, and only so many at once: all lines that are
        # in the queue are among these first ones.
        count = 2 * max(self._tools.batch.window, self._lease.progress.in_queue) + MAX_BLOCKED
        first = {self._job_id(line): line for line in islice(self._waiting, count)}
        self._queued = {job_id: first[job_id] for job_id in await self._queue.known(list(first))}
        taken = set(self._queued.values())
        self._waiting = deque(line for line in self._waiting if line not in taken)

    def close(self) -> None:
        """Close the files. Blocks. The next turn finds the answers that were not written."""
        self._segment.close()

    # --- enqueuing lines and collecting answers ----------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every line has its answer."""
        return not self._waiting and not self._queued

    @property
    def held_ms(self) -> int:
        """For how long limits admit no line, or a second if that is not known; 0 while lines are in the queue, or
        limits have refused none. Another batch may have the turn meanwhile."""
        left_s = self._held_until - time.monotonic()
        return int(1000 * max(1.0, left_s)) if self._held_until and self._waiting and self.idle else 0

    @property
    def idle(self) -> bool:
        """Whether no line is in the queue."""
        return not self._queued

    async def collect(self) -> int:
        """Write the answers of jobs that have ended, and return how many. Raises Unavailable, OSError."""
        ended = await self._queue.ended(self._queued)
        written, with_media = list[str](), list[str]()
        for at in range(0, len(ended), JOBS_PER_CALL):
            part = ended[at : at + JOBS_PER_CALL]
            for job_id, record in zip(part, await self._job_reader.records(part), strict=True):
                if record is not None and record.newer:
                    continue  # an offline process of that version will write this answer
                line = self._queued.pop(job_id)
                if record is None or record.terminal is None:  # the store lost the job: enqueue the same one again
                    self._waiting.appendleft(line)
                else:
                    self._settle(line, record)
                    written.append(job_id)
                    with_media += [job_id] if record.job.media else []
            await self._commit()
        if written:
            await self._queue.shorten_retention(written, ANSWERED_RETENTION_S, with_media)
        return len(written)

    async def feed(self, left_ms: int | None = None) -> int:
        """Enqueue lines up to the batch's window, and return how many ended with an error instead.

        Smaller lines overtake one that must wait for room in the store. `left_ms`: until the batch expires, None if it
        never does. Raises Unavailable, OSError.
        """
        refused = self._tools.headroom.full or self._tools.store.reason or time.monotonic() < self._held_until
        if refused or not self._waiting or (left_ms is not None and left_ms <= 0):
            return 0
        window = window_of(await self._worker_slots(), self._tools.batch.window)
        batch, lines_left = self._lease.batch, len(self.plan) - self._completed - self._failed
        left_s, window_s = (None if ms is None else ms / 1000 for ms in (left_ms, batch.window_ms))
        if not self._held_until:  # another lane would make no limit hold sooner
            self._lane, self._reason = lane_of(lines_left, self._per_second(), left_s, window_s, batch.ceiling)
        ended, may_take_more = 0, True
        while may_take_more and (lines := self._next(min(window - len(self._queued), JOBS_PER_CALL))):
            failed, may_take_more = await self._put(lines, left_ms)
            ended += failed
        return ended

    def _next(self, limit: int) -> list[int]:
        """At most `limit` waiting lines that the store may have room for."""
        limit = max(0, limit)
        return list(islice(filter(self._fits, islice(self._waiting, MAX_BLOCKED + limit)), limit))

    def _fits(self, line: int) -> bool:
        needed = self._needed.get(line)
        partition = partition_of(self._job_id(line)) or 0
        return needed is None or self._tools.headroom.fits(partition, needed)

    async def withdraw(self) -> None:
        """Take unclaimed lines out of the queue; they are enqueued again later. Raises Unavailable, OSError."""
        for part in self._slices():
            # Write the withdrawal before doing it: if the process died in between, the next turn would take the end of
            # the cancelled job for the line's own.
            for line in part.values():
                self._segment.add(line, LineOutcome.WITHDRAWN, self.ledger.attempts[line] + 1)
            await self._commit()
            await self._stop(part, waiting_only=True)

    async def give_up(self) -> None:
        """Cancel every line in the queue, claimed or not, for good. Raises Unavailable."""
        self._cancelling = True
        for part in self._slices():
            await self._stop(part, waiting_only=False)

    def _slices(self) -> list[dict[str, int]]:
        items = list(self._queued.items())
        return [dict(items[at : at + JOBS_PER_CALL]) for at in range(0, len(items), JOBS_PER_CALL)]

    async def _stop(self, part: dict[str, int], *, waiting_only: bool) -> None:
        """Cancel these jobs; the lines of those that no worker has wait again."""
        states = await self._queue.stop(list(part), waiting_only=waiting_only)
        for (job_id, line), state in zip(part.items(), states, strict=True):
            if state in (JobState.QUEUED, None):
                del self._queued[job_id]
                self._waiting.appendleft(line)

    async def _put(self, lines: Sequence[int], left_ms: int | None) -> tuple[int, bool]:
        """Enqueue these lines. Returns how many ended with an error because their request is refused or can never fit
        into the store, and whether others should be tried now: the lane has room, and one of these had its turn."""
        cards = await self._fleet.cards()
        if cards != self._cards:  # with a model card, a line may need fewer bytes
            self._cards, self._needed = cards, {}
        found = await asyncio.to_thread(self._jobs, lines, left_ms, cards)
        ready, media = await self._ready(found, cards)
        of_lines = list(zip(lines, ready))  # noqa: B905 - not all may be ready
        refusals = {line: each for line, each in of_lines if isinstance(each, ApiError) and each.status != 503}
        jobs = {line: each for line, each in of_lines if isinstance(each, Job)}
        traced = [self._traced(line, job) for line, job in jobs.items()]
        quota = QuotaSettings(store_share=self._lease.batch.store_share)
        named = (self._lease.batch.caller, self._lease.batch.key_limits)
        answers = await self._queue.put_parts([job for job, _ in traced], cards, quota, *named, media)
        lane_full, before = len(jobs) + len(refusals) < len(found), (len(self._waiting), len(self._needed))
        for line, (job, span), accepted in zip(jobs, traced, answers, strict=True):
            match accepted:
                case LaneFull():
                    lane_full = True
                case NeverFits():
                    refusals[line] = too_large_for_store(job, accepted.needed)
                case LimitReached() if accepted.retry_ms < 0:
                    refusals[line] = limit_reached(accepted)
                case LimitReached():
                    lane_full, self._reason = True, f"lines wait: {accepted}"
                    self._held_until = time.monotonic() + min(accepted.retry_ms / 1000, MAX_HELD_S)
                case StoreFull():
                    self._needed[line] = accepted.needed
                case _:
                    self._leave(line)
                    self._queued[job.id] = line
                    if not accepted.joined:
                        span.end()
        for line, error in refusals.items():
            self._leave(line)
            attempt = self.ledger.attempts[line]
            self._segment.add(line, LineOutcome.FAILED, attempt, refusal(error, self._job_id(line)))
        if refusals:
            await self._commit()
        return len(refusals), not lane_full and (len(self._waiting), len(self._needed)) != before

    async def _ready(
        self, found: Sequence[Job | ApiError], cards: Mapping[str, ModelCard]
    ) -> tuple[list[Job | ApiError], dict[str, Sequence[bytes]]]:
        """The first of these jobs, as many as are soon read, as they are queued or why they are not; their media."""
        media, ready, began = dict[str, Sequence[bytes]](), list[Job | ApiError](), time.monotonic()
        while len(ready) < len(found) and (not ready or time.monotonic() < began + MEDIA_S):
            some = found[len(ready) : len(ready) + MEDIA_LINES]
            ready += await asyncio.gather(*[self._checked(each, cards, media) for each in some])
            if sum([len(each) for own in media.values() for each in own]) > MEDIA_BYTES:
                break
        return ready, media

    async def _checked(
        self, job: Job | ApiError, cards: Mapping[str, ModelCard], media: dict[str, Sequence[bytes]]
    ) -> Job | ApiError:
        """The job of a line as it is queued, or why it is not: its media, which `media` gets, or a content rule."""
        if isinstance(job, ApiError):
            return job
        try:
            if self._tools.media is not None and has_media(job.prompt):
                job, media[job.id] = await self._tools.media.taken(job, cards.get(job.model), MAX_LINE_BYTES)
            return job if self._tools.content is None else await asyncio.to_thread(self._tools.content.checked, job)
        except ApiError as error:
            return error
        except (Unavailable, OSError):
            raise
        except Exception:  # else one line would keep all others from an answer
            log.exception("a line of a batch cannot be queued", extra={"job": job.id})
            return internal_error(job.id)

    def _leave(self, line: int) -> None:
        """Take a line out of those that wait."""
        self._needed.pop(line, None)
        self._waiting.remove(line)

    def _traced(self, line: int, job: Job) -> tuple[Job, Span]:
        """The job with a trace of its own, if it is recorded, which links to the request that created the batch. Its
        span ends, and is sent, only if the queue accepts the job."""
        about: Attributes = {
            names.JOB_ID: job.id,
            names.BATCH_ID: self._lease.batch.id,
            names.PRIORITY: str(job.priority),
            names.BATCH_LINE: self.plan.numbers[line],
            names.TENANT: job.tenant,
        }
        span = self._tools.tracing.enter("batch line", None, "producer", about, [self._lease.batch.trace])
        return (msgspec.structs.replace(job, trace=span.carrier()) if span.recorded else job), span

    def _jobs(self, lines: Sequence[int], left_ms: int | None, cards: Mapping[str, ModelCard]) -> list[Job | ApiError]:
        """Read the lines and build their jobs; an error becomes the line's answer: an older version, which refused
        less, has validated the input. Blocks."""
        batch, tools, jobs = self._lease.batch, self._tools, list[Job | ApiError]()
        with (self._folder / "input").open("rb") as source:
            for line in lines:
                number, job_id, lane = self.plan.numbers[line], self._job_id(line), self._lane
                try:
                    found = envelope(self.plan.read(source, line), batch.endpoint)
                    known, meant = (tools.aliases, tools.models), self.plan.meant
                    request = request_of(found, batch.tenant, *known, meant=meant, validated=True)
                    card = cards.get(request.model)
                    job = job_of(request, batch, job_id=job_id, number=number, lane=lane, left_ms=left_ms, card=card)
                    jobs.append(job)
                except ApiError as error:
                    jobs.append(error)
        return jobs

    def _job_id(self, line: int) -> str:
        partitions, batch = self._tools.store_client.settings.partitions, self._lease.batch
        home = partition_of(batch.id, "batch_") if batch.limited else None
        return line_job_id(batch.id, line, self.ledger.attempts[line], partitions, home)

    def _settle(self, line: int, record: JobRecord) -> None:
        """Record how the line's job ended: an answer, a retry, or one more wait."""
        assert record.terminal is not None
        attempt, is_cancelled = self.ledger.attempts[line], record.state is JobState.CANCELLED
        retries = worth_retrying(record) and self.ledger.failures[line] < self._tools.batch.retries
        if not (is_cancelled or retries or self._batch_expired(record)):
            good, kept = answer(record)
            outcome = LineOutcome.DONE if good else LineOutcome.FAILED
            self._segment.add(line, outcome, attempt, kept, record.terminal.usage)
            return
        self._waiting.appendleft(line)
        if retries:
            self._segment.add(line, LineOutcome.RETRIED, attempt + 1)
        elif is_cancelled and not self._cancelling:
            # Cancelled late by an earlier turn, or by its job id, but the batch goes on: enqueue the line as a new job.
            self._segment.add(line, LineOutcome.WITHDRAWN, attempt + 1)

    def _batch_expired(self, record: JobRecord) -> bool:
        """Whether the batch's deadline ended the job, not one that the line set itself."""
        expires_ms = self._lease.expires_ms
        return record.state is JobState.EXPIRED and bool(expires_ms) and record.deadline_ms >= expires_ms

    async def _commit(self) -> None:
        rows = await asyncio.to_thread(self._segment.commit)
        self._retried += sum(row.outcome is LineOutcome.RETRIED for row in rows)
        ends = self.ledger.take(rows)
        self.tokens_left -= sum(self.plan.tokens[row.line] for row in ends)
        if ended := self._count(ends):
            self._ends.append((asyncio.get_running_loop().time(), ended))

    # --- progress ----------------------------------------------------------------------------------------------------

    def _count(self, rows: Sequence[AnswerRow]) -> int:
        """Count these ended lines and their duplicates, and return how many lines that makes."""
        done = sum(self._copies[row.line] for row in rows if row.outcome is LineOutcome.DONE)
        failed = sum(self._copies[row.line] for row in rows if row.outcome is not LineOutcome.DONE)
        self._completed, self._failed = self._completed + done, self._failed + failed
        counts = [msgspec.structs.astuple(usage) for usage in (self._usage, *(row.usage for row in rows))]
        self._usage = Usage(*map(sum, zip(*counts, strict=True)))
        return done + failed

    def progress(self, before: BatchProgress) -> BatchProgress:
        """The batch's progress, with the present counts of its lines."""
        return msgspec.structs.replace(
            before,
            completed=self._completed,
            failed=self._failed,
            distinct=len(self.plan.order),
            in_queue=len(self._queued),
            retried=self._retried,
            usage=self._usage,
            lane=str(self._lane),
            lane_reason=self._reason,
            per_second=round(self._per_second(), 3),
        )

    def _per_second(self) -> float:
        """Lines ended a second, over the last seconds; at first the rate that an earlier turn measured."""
        now = asyncio.get_running_loop().time()
        while self._ends and self._ends[0][0] < now - RATE_WINDOW_S:
            self._ends.popleft()
        if not self._ends or now - self._ends[0][0] < 1.0:
            return self._lease.progress.per_second
        return sum(count for _, count in self._ends) / (now - self._ends[0][0])

    async def _worker_slots(self) -> int:
        """Return how many texts the workers can generate at once."""
        now = asyncio.get_running_loop().time()
        if now - self._slots_at > SLOTS_MAX_AGE_S:
            models = {self._lease.progress.model} if self._lease.progress.model else set(self._tools.models)
            found = [each for each in await self._fleet.processes("worker") if each.model in models]
            self._slots, self._slots_at = sum(worker.slots for worker in found), now
        return self._slots


LATE_MARGIN = 2.0
"""A batch is late when the time its lines need at the present rate, times this, exceeds the time it has left."""
LATE_FRACTION = 0.1
"""In this last fraction of its window every batch counts as late: the rate may be unknown, or about to change."""
MIN_WINDOW = 64


def lane_of(
    lines_left: int, per_second: float, left_s: float | None, window_s: float | None, ceiling: Priority
) -> tuple[Priority, str]:
    """Return the lane for lines queued now, never above `ceiling`, and the reason in words.

    Args:
        per_second: lines ended a second, lately; 0 if unknown.
        left_s: until the deadline, of a window of `window_s`; both None for a batch without one.
    """
    need_s = lines_left / per_second if per_second > 0 else 0.0
    late = Priority.STANDARD
    if left_s is None or window_s is None:
        lane, reason = Priority.BATCH, "no deadline"
    elif left_s <= window_s * LATE_FRACTION:
        lane, reason = late, f"{max(left_s, 0):.0f} s are left of {window_s:.0f} s"
    elif need_s * LATE_MARGIN > left_s:
        lane, reason = late, f"{need_s:.0f} s of work at the present pace, {left_s:.0f} s are left"
    else:
        lane, reason = Priority.BATCH, "in time"
    if lane.rank < ceiling.rank:
        return ceiling, f"{reason}, but its key may use no higher lane than {ceiling}"
    return lane, reason


def window_of(slots: int, max_lines: int) -> int:
    """Return how many lines may be in the queue at once, at most `max_lines`: enough that no worker slot idles until
    the next round, and no more, so that they do not delay other batches."""
    return max(1, min(max_lines, max(MIN_WINDOW, 2 * slots)))
