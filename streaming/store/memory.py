"""Memory admission control: refuses new jobs early enough that the store has memory left to finish the accepted ones.

A full store refuses every write that needs memory, except by the scripts that finish accepted work. So admission stops
earlier: besides the memory in use it counts the bytes that accepted jobs may still write
(`streaming/jobs/places.py`), which `put` reserves and a job's end returns. `put` checks the limit itself, so that
several processes do not reserve the same memory; a process also counts its own reservations since its last check,
because the partitions of a server share its memory and each `put` sees only its own. A job that would not fit into an
empty store is refused for good (`NeverFits`). Between two checks, processes that put into different partitions of one
server may reserve the same memory once; the margin above ADMISSION_SHARE covers that until the next check.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import NeverFits, StoreFull, Unavailable
from streaming.redis.client import RedisClient, ServerMemory

log = logging.getLogger(__name__)

ADMISSION_SHARE = 0.8
BATCH_LINE_SHARE = 0.7
"""Shares of maxmemory that requests, and lines of batches, may fill. Requests may fill more: their clients wait."""
IDLE_SHARE, IDLE_BYTES = 0.02, 2 << 20
"""Expected memory of a store without jobs, beyond what the server used at its start: connections, scripts, keys of
processes. A job that needs more than the rest could never be accepted."""
MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 0.2, 2.0
"""Between two checks: near ADMISSION_SHARE, and where there is no limit. A flood of requests between them must fit
above that share: a second was too long for 10 MB/s into 16 MB."""
MAX_INFLOW_BYTES_PER_S = 100 << 20
"""The highest expected inflow."""


@dataclass(slots=True)
class Share:
    """One server's memory at the last check."""

    memory: ServerMemory
    taken: int = 0
    """Bytes reserved by this process since then."""


@dataclass(slots=True)
class Reservation:
    """Memory that one put has reserved."""

    max_reserved: int | None = None
    """The most bytes that all jobs of the partition may reserve together, which `put` checks; None: there is no
    limit."""
    share: Share | None = None
    """The server's memory at the check before the reservation; later checks start a new `Share`."""
    size: int = 0

    def give_back(self) -> None:
        """Undo the reservation of a put that has added no job. Idempotent."""
        if self.share is not None:
            self.share.taken -= self.size
            self.share = None


class Headroom:
    """Free memory of the store as of the last check, in a process that accepts jobs; before the first check it is
    assumed to suffice."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self.reason = ""
        """Why no job may be accepted, for operators; "" while there is room."""
        self._memories: list[ServerMemory] = []
        self._shares: dict[int, Share] = {}
        """By partition."""

    @property
    def full(self) -> bool:
        """Whether to refuse new jobs."""
        return bool(self.reason)

    @property
    def memories(self) -> tuple[ServerMemory, ...]:
        """Each server's memory at the last check."""
        return tuple(self._memories)

    async def look(self) -> None:
        """Read the memory figures of every primary. Raises Unavailable."""
        self._memories = await self._client.memory()
        self._shares = {}
        for memory in self._memories:
            self._shares |= dict.fromkeys(memory.owed, Share(memory))
        reason = full_reason(self._memories)
        if bool(reason) != self.full:
            log.warning("%s", f"no more jobs are accepted: {reason}" if reason else "jobs are accepted again")
        self.reason = reason

    async def keep_looking(self) -> None:
        """Check in a loop until cancelled, also while Redis is unavailable."""
        expected = ExpectedErrors(Unavailable, log.debug, "memory as it was: %s")
        await run_periodically(self.look, lambda: next_look_s(self._memories), expected)

    def reserve(self, partition: int, size: int, owed: int, *, part: bool = False) -> Reservation:
        """Reserve memory for a job of `size` bytes that may write `owed` more. The caller must undo it unless `put`
        answers `queued`. Raises StoreFull; NeverFits."""
        share = self._shares.get(partition)
        if share is None or not share.memory.allowed:
            return Reservation(size=size + owed)
        most = BATCH_LINE_SHARE if part else ADMISSION_SHARE
        if size + owed > (ever := max_job_bytes(share.memory, most)):
            raise NeverFits(size + owed, ever)
        room = room_of(share.memory, most)
        if share.taken + size + owed > room:
            raise StoreFull(_too_much(share.memory, owed), size + owed)
        share.taken += size + owed
        return Reservation(share.memory.owed[partition] + room, share, size + owed)

    def fits(self, partition: int, needed: int, *, part: bool = False) -> bool:
        """Whether a job of `needed` bytes can be decided now: it would be accepted, or refused for good."""
        share = self._shares.get(partition)
        if share is None or not share.memory.allowed:
            return True
        most = BATCH_LINE_SHARE if part else ADMISSION_SHARE
        return share.taken + needed <= room_of(share.memory, most) or needed > max_job_bytes(share.memory, most)


def room_of(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """Bytes left for new jobs until the share `most` of the memory is used or reserved."""
    return int(most * memory.allowed) - memory.used - sum(memory.owed.values())


def max_job_bytes(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """The most bytes that one job may use in a store without other jobs."""
    return int((most - IDLE_SHARE) * memory.allowed) - IDLE_BYTES - memory.at_start


def next_look_s(memories: Iterable[ServerMemory]) -> float:
    """Seconds until the next check: no flood can fill the fullest server before."""
    room = min(
        (room_of(memory) for memory in memories if memory.allowed), default=MAX_LOOK_INTERVAL_S * MAX_INFLOW_BYTES_PER_S
    )
    return min(max(MIN_LOOK_INTERVAL_S, room / MAX_INFLOW_BYTES_PER_S), MAX_LOOK_INTERVAL_S)


def full_reason(memories: Iterable[ServerMemory]) -> str:
    """Describe the fullest server; "" if all servers with a limit have room."""
    fullest = min((memory for memory in memories if memory.allowed), key=_left, default=None)
    return "" if fullest is None or room_of(fullest) > 0 else _said_of(fullest)


def _left(memory: ServerMemory) -> float:
    return room_of(memory) / memory.allowed


def _said_of(memory: ServerMemory) -> str:
    return (
        f"Redis uses {memory.used >> 20} MiB of {memory.allowed >> 20} MiB ({memory.used / memory.allowed:.0%}), "
        f"accepted jobs may still write {sum(memory.owed.values()) >> 20} MiB, "
        f"and {ADMISSION_SHARE:.0%} is the most for both"
    )


def _too_much(memory: ServerMemory, owed: int) -> str:
    asks = f"this job's answer may need {owed / (1 << 20):.1f} MiB (fewer max_tokens, n or logprobs need less)"
    return f"{_said_of(memory)}; {asks}"
