"""How much room the store has left: jobs are refused while what is accepted can still be finished.

A full store refuses every write that needs memory, but for the scripts that end what was accepted. So admission stops
earlier: beside the memory in use it counts what accepted jobs may still write (`streaming/jobs/reservation.py`), which
`put` reserves and the end of a job gives back. `put` itself compares, so several processes do not reserve the same
room; a process also counts what it has reserved since its last look: partitions of a server share its memory and each
`put` sees only its own. A job that would not fit into an idle store is refused for good (`NeverFits`). Between two
looks processes that put into different partitions of one server may each reserve the same room once; what is left above
ADMISSION_SHARE, and the next look, are there for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.loops import ExpectedErrors, run_periodically
from streaming.errors import NeverFits, StoreFull, Unavailable
from streaming.redis.client import RedisClient, ServerMemory

log = logging.getLogger(__name__)

ADMISSION_SHARE = 0.8
BATCH_LINE_SHARE = 0.7
"""The same for lines of batches: what they would take beyond it is left to those who wait for their answer."""
IDLE_SHARE, IDLE_BYTES = 0.02, 2 << 20
"""What a store without jobs is expected to hold beside what the server used at its start: connections, scripts, keys of
processes. A job that needs more than is left beside them would wait for ever."""
MIN_LOOK_INTERVAL_S, MAX_LOOK_INTERVAL_S = 0.2, 2.0
"""Between two looks: near ADMISSION_SHARE, and where there is no limit. What a flood brings meanwhile must fit above
that share: a second was too long for 10 MB/s into 16 MB."""
MAX_INFLOW_BYTES_PER_S = 100 << 20
"""Bytes a second that are never expected to come faster."""


@dataclass(slots=True)
class Share:
    """One server as it was at the last look."""

    memory: ServerMemory
    taken: int = 0
    """Reserved by this process since then."""


@dataclass(slots=True)
class Reservation:
    """Room that one put has reserved."""

    most_owed: int | None = None
    """The most that all jobs of its partition may then owe, for `put` to hold against what they do owe; None: there is
    no limit."""
    share: Share | None = None
    """Of which server, as of the look that the room was reserved by; a later look counts anew."""
    size: int = 0

    def give_back(self) -> None:
        """The put has brought nothing into the store. Idempotent."""
        if self.share is not None:
            self.share.taken -= self.size
            self.share = None


class Headroom:
    """One per process that accepts jobs. As it was at the last look; room is taken to be there before the first."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self.reason = ""
        """Why nothing may be accepted, for people; "" while there is room."""
        self._memories: list[ServerMemory] = []
        self._shares: dict[int, Share] = {}
        """By partition."""

    @property
    def full(self) -> bool:
        """Whether to refuse new jobs."""
        return bool(self.reason)

    async def look(self) -> None:
        """Ask every primary. Raises Unavailable."""
        self._memories = await self._wire.memory()
        self._shares = {}
        for memory in self._memories:
            self._shares |= dict.fromkeys(memory.owed, Share(memory))
        reason = full_reason(self._memories)
        if bool(reason) != self.full:
            log.warning("%s", f"no more jobs are accepted: {reason}" if reason else "jobs are accepted again")
        self.reason = reason

    async def keep_looking(self) -> None:
        """Look for ever, whatever Redis does."""
        expected = ExpectedErrors(Unavailable, log.debug, "memory as it was: %s")
        await run_periodically(self.look, lambda: next_look_s(self._memories), expected)

    def reserve(self, partition: int, size: int, owed: int, *, part: bool = False) -> Reservation:
        """Room for a job of `size` bytes that may write `owed` more, to be given back unless the put is answered with
        `queued`. Raises StoreFull; NeverFits."""
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
        """Whether a job that needs so many bytes would get them now, or would be refused for good."""
        share = self._shares.get(partition)
        if share is None or not share.memory.allowed:
            return True
        most = BATCH_LINE_SHARE if part else ADMISSION_SHARE
        return share.taken + needed <= room_of(share.memory, most) or needed > max_job_bytes(share.memory, most)


def room_of(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """Bytes that new jobs may bring and write, until this share of the memory is taken."""
    return int(most * memory.allowed) - memory.used - sum(memory.owed.values())


def max_job_bytes(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """Bytes that one new job may bring and write into a store that holds no other."""
    return int((most - IDLE_SHARE) * memory.allowed) - IDLE_BYTES - memory.at_start


def next_look_s(memories: Iterable[ServerMemory]) -> float:
    """Seconds in which no flood can fill the fullest server: it is soon enough to look again then."""
    room = min(
        (room_of(memory) for memory in memories if memory.allowed), default=MAX_LOOK_INTERVAL_S * MAX_INFLOW_BYTES_PER_S
    )
    return min(max(MIN_LOOK_INTERVAL_S, room / MAX_INFLOW_BYTES_PER_S), MAX_LOOK_INTERVAL_S)


def full_reason(memories: Iterable[ServerMemory]) -> str:
    """What is said of the fullest server; "" if all that have a limit have room."""
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
