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

from streaming.errors import Unavailable
from streaming.journal import Journal
from streaming.lease import Broken, Claim, Lease
from streaming.messages import Delta
from workers.engine import Stats
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

KV_BATCH = 4
"""Jobs claimed at once when the engine is limited by its KV cache, whose room is known only after a submit."""


class Hands(Protocol):
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
    def texts(self) -> int:
        """What the engine runs, or queues, of all lanes."""
        ...

    def stats(self) -> Stats:
        """The engine's."""
        ...

    def begin(self, claim: Claim, history: Sequence[Delta]) -> None:
        """A job, with what earlier attempts at it generated."""
        ...

    def refuse(self, broken: Broken) -> None:
        """One that cannot be read."""
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

    def __init__(self, lease: Lease, journal: Journal, settings: WorkerSettings, hands: Hands, look: asyncio.Event):
        self._lease, self._journal, self._settings, self._hands, self._look = lease, journal, settings, hands, look
        self._claims: dict[int, asyncio.Task[bool]] = {}
        """By partition, the claim that was not answered yet."""
        self._under_way: set[int] = set()
        """Partitions where a claim is under way, or what it gave is being begun."""
        self._cancelled: set[str] = set()
        """Jobs whose cancel was heard before their claim's answer was."""
        self._suspects: set[int] = set()
        """Partitions whose suspects this worker is to run, each alone."""
        self._unanswered: set[int] = set()
        """Partitions whose last claim has no answer that we know."""
        self._held_until = -math.inf
        """Until then new jobs are left to workers of another shape."""
        self._ending = False

    async def run(self, partitions: Sequence[int]) -> None:
        """Ask the partitions in turn, each time beginning with another: no lane starves for its number.

        Raises Fenced."""
        turn = deque(partitions)
        try:
            while not self._ending:
                self._look.clear()
                full = [await self._ask(partition) for partition in turn]
                turn.rotate(-1)
                if not any(full):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._settings.poll_ms / 1000):
                            await self._look.wait()
            await asyncio.gather(*self._claims.values())  # what they bring is still ours
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

    def was_cancelled(self, job_id: str) -> bool:
        """Whether its cancel came before it."""
        return job_id in self._cancelled

    async def _ask(self, partition: int) -> bool:
        """Claim from one partition; True if there may be more. One that is slow to answer holds up no other: what its
        claim brings is begun when it comes. Raises Fenced."""
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
            for claim in claimed.jobs:
                if isinstance(claim, Broken):
                    hands.refuse(claim)
                else:
                    hands.begin(claim, await self._history(claim) if claim.past else ())
        except Unavailable as error:
            log.warning("no work can be claimed from partition %d, trying again: %s", partition, error)
            self._unanswered.add(partition)
            claimed = None
        finally:
            self._under_way.discard(partition)
            if not self._under_way:
                self._cancelled.clear()
        if claimed is None:
            await asyncio.sleep(self._settings.poll_ms / 1000)
            return False
        return len(claimed.jobs) == want or (claimed.suspects and not alone)

    async def _history(self, claim: Claim) -> list[Delta]:
        """What earlier attempts generated."""
        return await self._journal.deltas(await self._journal.record(claim.job.id))

    def _wanted(self, partition: int) -> int:
        """What fits now. When jobs that killed their workers wait in a partition, what runs is finished first, then
        they run singly."""
        if self._is_held(partition):
            return 0
        if self._suspects and (self._hands.running or self._claims or partition not in self._suspects):
            return 0
        return room(self._hands.stats(), self._hands.texts, self._settings.prefetch)

    def _is_held(self, partition: int) -> bool:
        """Whether new jobs there are another shape's. Not while this worker is, or may be without knowing it, the one
        that is to run the partition's suspects: nobody else would."""
        if time.monotonic() >= self._held_until:
            return False
        return partition not in self._suspects and partition not in self._unanswered
