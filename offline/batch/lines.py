"""Computing the lines of a batch: a bounded number of them in the queue, answers written down as they come.

A line's job has an id that follows from batch, line and attempt, so to put it again is harmless, and what is in the
queue need not be remembered: whoever goes on with the batch finds the same jobs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from api.openai.batch_lines import answer, envelope, job_of, refusal, request_of, worth_retrying
from api.openai.errors import ApiError, too_large_for_store
from offline.batch.urgency import BatchStanding, lane_of, window_of
from streaming.batches.batch import BatchProgress
from streaming.batches.ledger import AnswerRow, InputPlan, Ledger, LineOutcome, Segment
from streaming.batches.store import BatchLease
from streaming.errors import LaneFull, NeverFits, StoreFull
from streaming.fleet.processes import Fleet
from streaming.ids import line_job_id, partition_of
from streaming.jobs.cards import ModelCard
from streaming.jobs.job import Job, JobState
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.terminal import Usage
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from streaming.settings import BatchSettings
from streaming.store.memory import Headroom
from streaming.store.monitor import StoreMonitor

AT_ONCE = 64
"""Jobs put, or records read, in one round trip."""
LOOK_AHEAD = 64
"""Lines that may wait for room in the store before no further line is looked at."""
MAX_OVERTAKING = 512
"""Lines put behind one that waits for room, before the queue must have run empty of the batch's lines once: what they
would take again and again is then free together."""
MAX_LOOKED_AT = 1024
"""Lines in one round of putting."""
FADE_S = 600
"""How long the record of a line's job is kept once its answer is on disk."""
PACE_S = 10.0
SLOTS_S = 2.0


@dataclass(frozen=True, slots=True)
class BatchTools:
    """What every turn works with."""

    wire: RedisClient
    headroom: Headroom
    store: StoreMonitor
    models: Sequence[str]
    settings: BatchSettings
    max_choices: int
    """Of one line."""


class Lines:
    """One turn at the lines of one batch. `now_ms` is kept by whoever hears the store's time."""

    def __init__(self, tools: BatchTools, hold: BatchLease, folder: Path) -> None:
        self._tools, self._hold, self._folder = tools, hold, folder
        self._queue = Queue(tools.wire, tools.headroom)
        self._journal, self._fleet = JobReader(tools.wire), Fleet(tools.wire)
        self.plan, self.ledger = InputPlan(), Ledger(folder, 0)
        self.base = hold.progress
        """What of the progress is not about lines."""
        self.now_ms = hold.now_ms
        self._source: BinaryIO | None = None
        self._segment = Segment(folder, hold.epoch)
        self._copies: Sequence[int] = ()
        self._waiting: deque[int] = deque()
        """Lines that are not in the queue and have no answer, in the order they are to be put."""
        self._queued: dict[str, int] = {}
        """Lines in the queue, by their job."""
        self._needs: dict[int, int] = {}
        """Lines that wait for room in the store: the bytes each one needs."""
        self._overtaking = 0
        """Lines put behind one that waits for room, since the queue was empty of lines."""
        self._cards: Mapping[str, ModelCard] = {}
        """What the needs were counted by."""
        self._giving_up = False
        """What is cancelled now was cancelled by us, for good."""
        self._completed = self._failed = self._retried = 0
        self._usage = Usage()
        self.opened = False
        """What earlier turns left is read: before that nothing can be said of progress and tokens."""
        self.tokens_left = 0
        """Units of work of the lines that have no answer."""
        self._ends: deque[tuple[float, int]] = deque()
        """When how many lines ended."""
        self._slots, self._slots_at = 0, float("-inf")
        self._lane, self._reason = Priority.BATCH, ""

    # --- taking up what earlier turns left ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the ledger and find the lines that are in the queue. Raises Unavailable, OSError."""
        await asyncio.to_thread(self._load)
        # Lines are put in order, but for a few that wait for room, and only so many at once: those in the queue are
        # among the first.
        most = 2 * max(self._tools.settings.window, self._hold.progress.in_queue) + LOOK_AHEAD
        first = {self._job_id(line): line for line in list(self._waiting)[:most]}
        known = await self._queue.known(list(first))
        self._queued = {job_id: first[job_id] for job_id in known}
        taken = set(self._queued.values())
        self._waiting = deque(line for line in self._waiting if line not in taken)
        self.opened = True

    def _load(self) -> None:
        self.plan = InputPlan.load(self._folder)
        self.ledger = Ledger.load(self._folder, len(self.plan))
        self._copies = self.plan.copies()
        self._source = (self._folder / "input").open("rb")
        self._waiting.extend(line for line in self.plan.order if self.ledger.ends[line] is None)
        self.tokens_left = sum(self.plan.tokens[line] for line in self._waiting)
        self._retried = sum(self.ledger.failures)
        self._count([end for end in self.ledger.ends if end is not None])

    def close(self) -> None:
        """What was not written down is found again. Blocks."""
        if self._source is not None:
            self._source.close()
        self._segment.close()

    # --- the work ----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every line has its answer."""
        return not self._waiting and not self._queued

    @property
    def idle(self) -> bool:
        """Whether no line is in the queue."""
        return not self._queued

    async def collect(self) -> int:
        """Write down the answers of jobs that have ended; how many. Raises Unavailable, OSError."""
        ended = await self._queue.ended(self._queued)
        written: list[str] = []
        for at in range(0, len(ended), AT_ONCE):
            part = ended[at : at + AT_ONCE]
            for job_id, record in zip(part, await self._journal.records(part), strict=True):
                if record is not None and record.newer:
                    continue  # an offline process of that version writes its answer down, in a later turn
                line = self._queued.pop(job_id)
                if record is None or record.terminal is None:  # the store has lost it: the same job once more
                    self._waiting.appendleft(line)
                else:
                    self._settle(line, record)
                    written.append(job_id)
            await self._commit()
        if written:
            await self._queue.shorten_retention(written, FADE_S)
        return len(written)

    async def feed(self) -> int:
        """Put as many lines as belong into the queue; returns how many ended instead, because they can never fit into
        the store. Lines that must wait for room keep their place and hold up nobody. Raises Unavailable, OSError."""
        left_ms = self._left_ms()
        refused = self._tools.headroom.full or self._tools.store.reason
        if not self._waiting or refused or (left_ms is not None and left_ms <= 0):
            return 0
        room = window_of(await self._slots_there(), self._tools.settings.window) - len(self._queued)
        self._lane, self._reason = lane_of(self._standing(), self._hold.batch.ceiling)
        if self.idle:
            self._overtaking = 0
        looked_at: list[int] = []
        gone: set[int] = set()
        """Of these, the lines that wait no longer."""
        ended = 0
        try:
            while room > 0 and (lines := self._next(min(room, AT_ONCE), looked_at, gone)):
                before = len(self._queued)
                lane_full, failed = await self._put(lines, left_ms, gone)
                room -= len(self._queued) - before
                ended += failed
                if lane_full:
                    break
        finally:
            self._waiting.extendleft(line for line in reversed(looked_at) if line not in gone)
        return ended

    def _next(self, most: int, looked_at: list[int], gone: set[int]) -> list[int]:
        """The next lines to put, at most so many: those that need more room than there is are passed over. All of them
        are taken from the waiting ones, and added to `looked_at`."""
        lines: list[int] = []
        passed = sum(line in self._needs and line not in gone for line in looked_at)
        draining = self._overtaking >= MAX_OVERTAKING
        while self._waiting and len(lines) < most and passed < LOOK_AHEAD and len(looked_at) < MAX_LOOKED_AT:
            line = self._waiting[0]
            needed = self._needs.get(line)
            if draining and (needed is None or passed):
                break
            looked_at.append(self._waiting.popleft())
            partition = partition_of(self._job_id(line)) or 0
            if needed is None or self._tools.headroom.fits(partition, needed, part=True):
                lines.append(line)
            else:
                passed += 1
        return lines

    async def withdraw(self) -> None:
        """Take out of the queue what nobody has begun; it will be put again. Raises Unavailable, OSError."""
        for part in self._parts():
            # Written before it is done: were this process lost in between, the end of the old job as cancelled would
            # be taken for the line's.
            for line in part.values():
                self._segment.add(line, LineOutcome.WITHDRAWN, self.ledger.attempts[line] + 1)
            await self._commit()
            self._take_back(part, await self._queue.stop(list(part), waiting_only=True))

    async def give_up(self) -> None:
        """Cancel what is in the queue, begun or not, for good. Raises Unavailable."""
        self._giving_up = True
        for part in self._parts():
            self._take_back(part, await self._queue.stop(list(part), waiting_only=False))

    def _parts(self) -> list[dict[str, int]]:
        items = list(self._queued.items())
        return [dict(items[at : at + AT_ONCE]) for at in range(0, len(items), AT_ONCE)]

    def _take_back(self, part: dict[str, int], states: Sequence[JobState | None]) -> None:
        for (job_id, line), state in zip(part.items(), states, strict=True):
            if state in (JobState.QUEUED, None):
                del self._queued[job_id]
                self._waiting.appendleft(line)

    async def _put(self, lines: list[int], left_ms: int | None, gone: set[int]) -> tuple[bool, int]:
        """Whether the lane is full, and how many lines ended with an error instead: their request is refused, or can
        never fit into the store. Adds those that wait no longer to `gone`."""
        found = await asyncio.to_thread(self._jobs, lines, left_ms)
        failed = sum(
            self._refuse(line, each, gone)
            for line, each in zip(lines, found, strict=True)
            if isinstance(each, ApiError)
        )
        lines = [line for line in lines if line not in gone]
        jobs = [each for each in found if isinstance(each, Job)]
        cards = await self._fleet.cards()
        if cards != self._cards:  # with what is known of a model, the lines that wait may need less
            self._cards = cards
            self._needs.clear()
        answers = await self._queue.put_parts(jobs, cards)
        lane_full = False
        for line, job, accepted in zip(lines, jobs, answers, strict=True):
            match accepted:
                case LaneFull():
                    lane_full = True
                    continue
                case NeverFits():
                    failed += self._refuse(line, too_large_for_store(job, accepted.needed, accepted.most), gone)
                case StoreFull():
                    self._needs[line] = accepted.needed
                    continue
                case _:
                    self._queued[job.id] = line
            self._needs.pop(line, None)
            self._overtaking = self._overtaking + 1 if self._needs else 0
            gone.add(line)
        if failed:
            await self._commit()
        return lane_full, failed

    def _refuse(self, line: int, error: ApiError, gone: set[int]) -> bool:
        """The line ends with this error, and waits no longer."""
        self._segment.add(line, LineOutcome.FAILED, self.ledger.attempts[line], refusal(error, self._job_id(line)))
        gone.add(line)
        return True

    def _jobs(self, lines: list[int], left_ms: int | None) -> list[Job | ApiError]:
        """These lines' requests have been read once without error, though perhaps by an older version, which refused
        less: an error is the line's answer."""
        assert self._source is not None
        batch, jobs = self._hold.batch, list[Job | ApiError]()
        for line in lines:
            try:
                request = request_of(envelope(self.plan.read(self._source, line), batch.endpoint), None)
            except ApiError as error:
                jobs.append(error)
                continue
            number = self.plan.numbers[line]
            jobs.append(
                job_of(request, batch, job_id=self._job_id(line), number=number, lane=self._lane, left_ms=left_ms)
            )
        return jobs

    def _job_id(self, line: int) -> str:
        partitions = self._tools.wire.settings.partitions
        return line_job_id(self._hold.batch.id, line, self.ledger.attempts[line], partitions)

    def _settle(self, line: int, record: JobRecord) -> None:
        """What the end of a line's job means for the line."""
        assert record.terminal is not None
        attempt = self.ledger.attempts[line]
        if (record.state is JobState.CANCELLED and self._giving_up) or self._out_of_time(record):
            self._waiting.appendleft(line)
        elif record.state is JobState.CANCELLED:
            # By an earlier turn that said so late, or by its id: nobody has cancelled the batch. As a new job, for the
            # old one has ended.
            self._segment.add(line, LineOutcome.WITHDRAWN, attempt + 1)
            self._waiting.appendleft(line)
        elif worth_retrying(record) and self.ledger.failures[line] < self._tools.settings.retries:
            self._segment.add(line, LineOutcome.RETRIED, attempt + 1)
            self._waiting.appendleft(line)
        else:
            good, kept = answer(record)
            self._segment.add(
                line, LineOutcome.DONE if good else LineOutcome.FAILED, attempt, kept, record.terminal.usage
            )

    def _out_of_time(self, record: JobRecord) -> bool:
        """Whether it was the batch's time that was over, not one the line set itself."""
        expires_ms = self._hold.expires_ms
        return record.state is JobState.EXPIRED and bool(expires_ms) and record.deadline_ms >= expires_ms

    async def _commit(self) -> None:
        rows = await asyncio.to_thread(self._segment.commit)
        failures = sum(row.outcome is LineOutcome.RETRIED for row in rows)
        ends = self.ledger.take(rows)
        self.tokens_left -= sum(self.plan.tokens[row.line] for row in ends)
        ended = self._count(ends)
        self._retried += failures
        if ended:
            self._ends.append((asyncio.get_running_loop().time(), ended))

    # --- how it stands -----------------------------------------------------------------------------------------------

    def progress(self) -> BatchProgress:
        """The batch's, brought up to now."""
        return msgspec.structs.replace(
            self.base,
            completed=self._completed,
            failed=self._failed,
            computed=len(self.plan.order),
            in_queue=len(self._queued),
            retried=self._retried,
            usage=self._usage,
            lane=str(self._lane),
            lane_reason=self._reason,
            per_second=round(self._pace(), 3),
        )

    def _count(self, rows: Sequence[AnswerRow]) -> int:
        """Count these ends, for their twins too; how many lines that were."""
        ended, used = 0, self._usage
        prompt, completion, cached = used.prompt, used.completion, used.cached
        for row in rows:
            lines = self._copies[row.line]
            ended += lines
            if row.outcome is LineOutcome.DONE:
                self._completed += lines
            else:
                self._failed += lines
            prompt, completion = prompt + row.usage.prompt, completion + row.usage.completion
            cached += row.usage.cached
        self._usage = Usage(prompt, completion, cached)
        return ended

    def _standing(self) -> BatchStanding:
        left_ms, window_ms = self._left_ms(), self._hold.batch.window_ms
        return BatchStanding(
            lines_left=len(self.plan) - self._completed - self._failed,
            per_second=self._pace(),
            left_s=None if left_ms is None else left_ms / 1000,
            window_s=None if window_ms is None else window_ms / 1000,
        )

    def _left_ms(self) -> int | None:
        return self._hold.expires_ms - self.now_ms if self._hold.expires_ms else None

    def _pace(self) -> float:
        """Lines a second over the last seconds; what earlier turns said until this one knows better."""
        now = asyncio.get_running_loop().time()
        while self._ends and self._ends[0][0] < now - PACE_S:
            self._ends.popleft()
        if not self._ends or now - self._ends[0][0] < 1.0:
            return self._hold.progress.per_second
        return sum(count for _, count in self._ends) / (now - self._ends[0][0])

    async def _slots_there(self) -> int:
        """Texts the workers can generate at once."""
        now = asyncio.get_running_loop().time()
        if now - self._slots_at > SLOTS_S:
            models = {self._hold.progress.model} if self._hold.progress.model else set(self._tools.models)
            workers = await self._fleet.processes("worker")
            self._slots = sum(worker.slots for worker in workers if worker.model in models)
            self._slots_at = now
        return self._slots
