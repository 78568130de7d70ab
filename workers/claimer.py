"""Taking work: which partition is asked, for how many jobs, and when none. What becomes of a job it does not know."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from streaming.errors import Fenced, NewerMessage, Unavailable
from streaming.jobs.cards import Capabilities
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import Job
from streaming.jobs.lease import Claim, Lease, UnreadableClaim
from streaming.jobs.reader import JobReader
from streaming.jobs.terminal import Failure
from workers.engines.base import Stats
from workers.resume import restart_reason
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

KV_BATCH = 4
"""Jobs claimed at once when the engine is limited by its KV cache, whose room is known only after a submit."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 5.0
"""How long a worker claims nothing after a claim brought jobs that only a newer version can read: at first, and when
claims bring nothing else. So these jobs wait for a newer worker without being claimed over and over."""


class ClaimTarget(Protocol):
    """Whoever the jobs are claimed for: the worker."""

    batch_texts: int
    """What the engine runs, or queues, of lane batch."""

    @property
    def running(self) -> int:
        """Jobs held now."""
        ...

    @property
    def reserved(self) -> int:
        """Slots that lane batch may not fill."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The engine's."""
        ...

    @property
    def texts(self) -> int:
        """What the engine runs, or queues, of all lanes."""
        ...

    @property
    def is_laden(self) -> bool:
        """Whether it holds as many unfinished jobs as it should, whatever room the engine has."""
        ...

    def stats(self) -> Stats:
        """The engine's."""
        ...

    def looked(self) -> None:
        """All partitions were asked, as far as there was room, and what they gave was begun."""
        ...

    async def refusal(self, job: Job) -> Failure | None:
        """Why a job can never run here, as far as that can be said before it begins."""
        ...

    def begin(self, claim: Claim, history: History, refusal: Failure | None = None) -> None:
        """A job, with what earlier attempts at it generated; or one that ends with its `refusal`."""
        ...

    def refuse(self, broken: UnreadableClaim) -> None:
        """One that cannot be read."""
        ...

    def lose(self, partition: int) -> None:
        """The lease of a partition was taken."""
        ...


def reserved_slots(slots: int, wanted: int | None) -> int:
    """Slots kept for higher lanes than batch, never all of them. None: one in sixty-four, at least one."""
    return min(slots - 1, max(1, slots // 64) if wanted is None else wanted)


def room(stats: Stats, texts: int, prefetch: int) -> int:
    """How many jobs fit now, and a few to have at hand; none while the KV cache lets even those at hand wait."""
    free = stats.slots + prefetch - texts
    if not stats.kv_tokens:
        return free
    return 0 if stats.waiting >= max(1, prefetch) else min(free, KV_BATCH)


def room_for_batch(slots: int, reserved: int, batch_texts: int) -> int | None:
    """How many more jobs of lane batch may be held, so that the slots kept for others stay empty. None: any."""
    return max(0, slots - reserved - batch_texts) if reserved else None


class Claimer:
    """Claims for one worker until `end`. Whoever sets `look` has it look again at once: there may be more room, or more
    work."""

    def __init__(
        self, lease: Lease, journal: JobReader, settings: WorkerSettings, hands: ClaimTarget, look: asyncio.Event
    ):
        self._lease, self._journal, self._settings, self._hands, self._look = lease, journal, settings, hands, look
        self._claims: dict[int, asyncio.Task[bool]] = {}
        """By partition, the claim that was not answered yet."""
        self._under_way: set[int] = set()
        """Partitions where a claim is under way, or what it gave is being begun."""
        self._cancelled: set[str] = set()
        """Jobs whose cancel was heard before their claim's answer was."""
        self._followers: dict[str, list[str]] = {}
        """By job, addresses of readers who came before their claim's answer did."""
        self._suspects: set[int] = set()
        """Partitions whose suspects this worker is to run, each alone."""
        self._unanswered: set[int] = set()
        """Partitions whose last claim has no answer that we know."""
        self._held_until = -math.inf
        """Until then new jobs are left to workers of another shape."""
        self._newer_until, self._pause_s = dict[int, float](), MIN_PAUSE_S
        """By partition: until then its jobs of a newer version are left to newer workers."""
        self._fenced: set[int] = set()
        """Partitions where the worker's lease was taken."""
        self._ending = False
        self.is_full = False
        """The last look found no room: it is worth another one as soon as a slot is free."""

    async def run(self, partitions: Sequence[int]) -> None:
        """Ask the partitions in turn, each time beginning with another: no lane starves for its number.

        One whose lease was taken is asked no more."""
        turn = deque(partitions)
        try:
            while not self._ending:
                self._look.clear()
                full = [await self._ask(partition) for partition in turn]
                self._hands.looked()
                turn.rotate(-1)
                if not any(full):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._settings.poll_ms / 1000):
                            await self._look.wait()
            await asyncio.gather(*self._claims.values())  # what they bring is still ours
            self.is_full = False
            self._hands.looked()
        finally:
            for claim in self._claims.values():
                claim.cancel()
            await asyncio.gather(*self._claims.values(), return_exceptions=True)

    def end(self) -> None:
        """Claim no more; `run` returns once what was claimed is begun."""
        self._ending = True
        self._look.set()

    def hold(self, for_ms: int) -> None:
        """Leave new jobs to others for so long; 0: take them again."""
        held, self._held_until = self._held_until, time.monotonic() + for_ms / 1000
        if not for_ms and time.monotonic() < held:
            self._look.set()

    def may_bring(self, partition: int) -> bool:
        """Whether a claim is under way there: the server may count more jobs as the worker's than it knows."""
        return partition in self._under_way

    def note_cancel(self, job_id: str) -> None:
        """A job the worker does not know; it may be in an answer under way."""
        if self._under_way:
            self._cancelled.add(job_id)

    def note_follow(self, job_id: str, address: str) -> None:
        """The same for a reader who has come."""
        if self._under_way:
            self._followers.setdefault(job_id, []).append(address)

    def followers(self, job_id: str) -> Sequence[str]:
        """The addresses of readers who came before the job did."""
        return self._followers.get(job_id, ())

    def was_cancelled(self, job_id: str) -> bool:
        """Whether its cancel came before it."""
        return job_id in self._cancelled

    async def _ask(self, partition: int) -> bool:
        """Claim from one partition; True if there may be more. One that is slow to answer holds up no other: what its
        claim brings is begun when it comes."""
        claim = self._claims.get(partition)
        if claim is None:
            want = self._wanted(partition)
            if want <= 0:
                return False
            claim = self._claims[partition] = asyncio.create_task(self._claim(partition, want))
            await asyncio.wait({claim}, timeout=self._settings.poll_ms / 1000)
            if not claim.done():
                claim.add_done_callback(lambda _: self._look.set())
        if not claim.done():
            return False
        del self._claims[partition]
        return claim.result()

    async def _claim(self, partition: int, want: int) -> bool:
        alone, hands = partition in self._suspects, self._hands
        lowest = room_for_batch(hands.stats().slots, hands.reserved, hands.batch_texts)
        self._under_way.add(partition)
        try:
            claimed = await self._lease.claim(partition, want, alone=alone, lowest=lowest)
            (self._suspects.add if claimed.suspects else self._suspects.discard)(partition)
            self._unanswered.discard(partition)
            await self._take(partition, claimed.jobs)
        except Fenced:
            hands.lose(partition)
            self._fenced.add(partition)
            return False
        except Unavailable as error:
            log.warning("no work can be claimed from partition %d, trying again: %s", partition, error)
            self._unanswered.add(partition)
            claimed = None
        finally:
            self._under_way.discard(partition)
            if not self._under_way:
                self._cancelled.clear()
                self._followers.clear()
        if claimed is None:
            await asyncio.sleep(self._settings.poll_ms / 1000)
            return False
        return len(claimed.jobs) == want or (claimed.suspects and not alone)

    async def _take(self, partition: int, jobs: Sequence[Claim | UnreadableClaim]) -> None:
        """Begin what can be read, fail what cannot, put back what only a newer version can. Raises Unavailable."""
        newer: list[UnreadableClaim] = []
        fresh: list[Claim] = []
        behind: list[Claim] = []
        for job in jobs:
            if isinstance(job, UnreadableClaim):
                (newer.append if job.newer else self._hands.refuse)(job)
            else:
                (behind if job.past else fresh).append(job)
        refusals = [await self._hands.refusal(claim.job) for claim in fresh]
        for claim, refusal in zip(fresh, refusals, strict=True):
            self._hands.begin(claim, NOTHING, refusal)
        if behind:
            newer += await self._go_on(behind)
        if newer:
            log.warning("%d jobs are of a newer version and are put back, the first is %s", len(newer), newer[0].id)
            await self._lease.decline(newer)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if newer and len(newer) == len(jobs) else MIN_PAUSE_S
        if newer:
            self._newer_until[partition] = time.monotonic() + self._pause_s

    async def _go_on(self, claims: Sequence[Claim]) -> list[UnreadableClaim]:
        """Begin jobs that others have begun before, each log read once for all of them. Returns those whose logs are
        of a newer version. Raises Unavailable."""
        newer: list[UnreadableClaim] = []
        records = await self._journal.records([claim.job.id for claim in claims], bodies=False)
        histories = await asyncio.gather(
            *(self._journal.history(claim.job.id, claim.past) for claim in claims), return_exceptions=True
        )
        for claim, record, history in zip(claims, records, histories, strict=True):
            if record is None or record.state.final:
                log.warning("a claimed job has ended, or the store has lost it", extra={"job": claim.job.id})
            elif isinstance(history, NewerMessage):
                newer.append(UnreadableClaim(claim.job.id, claim.number, str(history), newer=True))
            elif isinstance(history, BaseException):
                raise history
            else:
                self._hands.begin(claim, await self._continuable(claim, history))
                await asyncio.sleep(0)  # each takes a while where much was said: what runs already gets its step
        return newer

    async def _continuable(self, claim: Claim, history: History) -> History:
        """What earlier runs generated, if this one can go on from there; else the job begins anew."""
        reason = "" if history.whole else "the store has lost a part of what was logged"
        reason = reason or restart_reason(claim.job, self._hands.capabilities, history.rows)
        if not reason:
            return history
        log.warning("a job begins anew: %s", reason, extra={"job": claim.job.id})
        await self._lease.restart(claim.job.id, claim.number)
        return NOTHING

    def _wanted(self, partition: int) -> int:
        """What fits now. When jobs that killed their workers wait in a partition, what runs is finished first, then
        they run singly."""
        if partition in self._fenced or self._is_held(partition) or self._leaves_newer(partition):
            return 0
        if self._suspects and (self._hands.running or self._claims or partition not in self._suspects):
            return 0
        free = 0 if self._hands.is_laden else room(self._hands.stats(), self._hands.texts, self._settings.prefetch)
        self.is_full = free <= 0
        return free

    def _leaves_newer(self, partition: int) -> bool:
        return time.monotonic() < self._newer_until.get(partition, -math.inf)

    def _is_held(self, partition: int) -> bool:
        """Whether new jobs there are another shape's. Not while this worker is, or may be without knowing it, the one
        that is to run the partition's suspects: nobody else would."""
        if time.monotonic() >= self._held_until:
            return False
        return partition not in self._suspects and partition not in self._unanswered
