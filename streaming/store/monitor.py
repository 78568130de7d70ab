"""Store monitor: checks at intervals that the store has the right identity and keeps the required durability.

A store may change while a process runs: Sentinel may promote a replica that evicts keys or has no append-only file, an
operator may empty the store or change its settings.

A full store refuses every write that needs memory, except by the scripts that finish accepted work. So admission stops
earlier: besides the memory in use it counts the bytes that accepted jobs may still write
(`streaming/jobs/waiting.py`), which `put` reserves and a job's end returns. `put` checks the limit itself, so that
several processes do not reserve the same memory; a process also counts its own reservations since its last check,
because the partitions of a server share its memory and each `put` sees only its own. A job that would not fit into an
empty store is refused for good (`NeverFits`). Between two checks, processes that put into different partitions of one
server may reserve the same memory once; the margin above ADMISSION_SHARE covers that until the next check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.config import ConfigError
from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import NeverFits, StoreFull, Unavailable
from streaming.redis.client import RedisClient, ServerMemory
from streaming.redis.settings import Durability
from streaming.store.identity import RECOVERY_TIMEOUT_S, Identity, check_identity, enter_store, identify, read_identity

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


FULL = "the store is nearly full"


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
    share_of_tenant: int | None = None
    """The most bytes that the job's tenant may use and reserve in the partition; None: any."""

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
        self.brief = ""
        """The same for clients, without figures."""
        self.memories: list[ServerMemory] = []
        """Each server's memory at the last check."""
        self._shares: dict[int, Share] = {}
        """By partition."""

    @property
    def full(self) -> bool:
        """Whether to refuse new jobs."""
        return bool(self.reason)

    async def look(self) -> None:
        """Read the memory figures of every primary. Raises Unavailable."""
        self.memories = await self._client.memory()
        self._shares = {}
        for memory in self.memories:
            self._shares |= dict.fromkeys(memory.owed, Share(memory))
        reason = full_reason(self.memories)
        if bool(reason) != self.full:
            log.warning("%s", f"no more jobs are accepted: {reason}" if reason else "jobs are accepted again")
        self.reason, self.brief = reason, FULL if reason else ""

    async def keep_looking(self) -> None:
        """Check in a loop until cancelled, also while Redis is unavailable."""
        expected = ExpectedErrors(Unavailable, log.debug, "memory as it was: %s")
        await run_periodically(self.look, lambda: next_look_s(self.memories), expected)

    def reserve(
        self, partition: int, size: int, owed: int, *, part: bool = False, share_of_tenant: float | None = None
    ) -> Reservation:
        """Reserve memory for a job of `size` bytes that may write `owed` more. `share_of_tenant`: of the memory, as
        QuotaSettings has it. The caller must undo it unless `put` answers `queued`. Raises StoreFull; NeverFits."""
        share = self._shares.get(partition)
        if share is None or not share.memory.allowed:
            return Reservation(size=size + owed)
        most = BATCH_LINE_SHARE if part else ADMISSION_SHARE
        ever, bound = max_job_bytes(share.memory, most), self.share(partition, share_of_tenant, most)
        ever = ever if bound is None else min(ever, bound)
        if size + owed > ever:
            raise NeverFits(size + owed, ever)
        room = room_of(share.memory, most)
        if share.taken + size + owed > room:
            asks = f"this answer may need {owed / (1 << 20):.1f} MiB (fewer max_tokens, n or logprobs need less)"
            raise StoreFull(f"{FULL}, and {asks}", size + owed)
        share.taken += size + owed
        return Reservation(share.memory.owed[partition] + room, share, size + owed, bound)

    def share(self, partition: int, of: float | None, most: float = ADMISSION_SHARE) -> int | None:
        """The bytes that a tenant with this share of the memory may take in a partition; None: any. `most` as for
        `room_of`."""
        found = self._shares.get(partition)
        if of is None or found is None or not found.memory.allowed:
            return None
        return int(of * most * found.memory.allowed / len(found.memory.owed))

    def fits(self, partition: int, needed: int) -> bool:
        """Whether a batch's line of `needed` bytes can be decided now: it would be accepted, or refused for good."""
        share = self._shares.get(partition)
        if share is None or not share.memory.allowed:
            return True
        most = BATCH_LINE_SHARE
        return share.taken + needed <= room_of(share.memory, most) or needed > max_job_bytes(share.memory, most)


def room_of(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """Bytes left for new jobs until the share `most` of the memory is used or reserved."""
    return int(most * memory.allowed) - memory.used - sum(memory.owed.values())


def max_job_bytes(memory: ServerMemory, most: float = ADMISSION_SHARE) -> int:
    """The most bytes that one job may use in a store without other jobs."""
    return int((most - IDLE_SHARE) * memory.allowed) - IDLE_BYTES - memory.at_start


def next_look_s(memories: Iterable[ServerMemory]) -> float:
    """Seconds until the next check: no flood can fill the fullest server before."""
    rooms = [room_of(memory) for memory in memories if memory.allowed]
    return min([MAX_LOOK_INTERVAL_S, *(max(MIN_LOOK_INTERVAL_S, room / MAX_INFLOW_BYTES_PER_S) for room in rooms)])


def full_reason(memories: Iterable[ServerMemory]) -> str:
    """Describe the fullest server; "" if all servers with a limit have room."""
    limited = [memory for memory in memories if memory.allowed]
    fullest = min(limited, key=lambda memory: room_of(memory) / memory.allowed, default=None)
    return "" if fullest is None or room_of(fullest) > 0 else _said_of(fullest)


def _said_of(memory: ServerMemory) -> str:
    return (
        f"Redis uses {memory.used >> 20} MiB of {memory.allowed >> 20} MiB ({memory.used / memory.allowed:.0%}), "
        f"accepted jobs may still write {sum(memory.owed.values()) >> 20} MiB, "
        f"and {ADMISSION_SHARE:.0%} is the most for both"
    )


MIN_REDIS_VERSION = (7, 0)

# Durability levels: what a lost Redis process, a power cut, and a lost host cost; what each level needs.
# D0: all is lost; all is lost; all is lost; nothing.
# D1: nothing is lost; the last second; down until it is back; append-only file, fsync everysec.
# D2: nothing is lost; nothing; down until it is back; append-only file, fsync always.
# D3: nothing is lost; nothing, for one host; nothing that was answered; as D1, and a replica.
#
# At D3 `RedisClient.calls` answers scripts marked `promise` only once a replica has the write, and raises Unavailable
# if none has it in time. The job may still run: the same idempotency key finds it. A worker repeats a finish until a
# replica has it or another worker has the job.
FSYNC: dict[Durability, tuple[str, ...]] = {
    "D1": ("everysec", "always"),
    "D2": ("always",),
    "D3": ("everysec", "always"),
}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One setting that a server lacks. `fatal`: the level cannot be kept without it; else this is a warning."""

    key: str
    found: str
    needed: str
    fatal: bool
    fix: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found}, needed: {self.needed} ({self.fix})"


def shortfalls(level: Durability, facts: Mapping[str, str]) -> list[Shortfall]:
    """List every shortfall by the facts of `RedisClient.servers`, the fatal ones first."""
    return sorted(_shortfalls(level, facts), key=lambda shortfall: not shortfall.fatal)


def _shortfalls(level: Durability, facts: Mapping[str, str]) -> Iterator[Shortfall]:
    version, policy = facts["redis_version"], facts["maxmemory-policy"]
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < MIN_REDIS_VERSION:
        fix = "use Redis 7.0 or later, or Valkey"
        yield Shortfall("redis_version", version or "unknown", "7.0 or later", True, fix)
    if facts["maxmemory"] == "0":
        fix = "CONFIG SET maxmemory to what the machine can spare, or it takes jobs until the system kills it"
        if level != "D0":
            yield Shortfall("maxmemory", "0", "a limit", False, fix)
    elif policy != "noeviction":
        fix = "CONFIG SET maxmemory-policy noeviction, or accepted jobs are thrown away when memory is full"
        yield Shortfall("maxmemory-policy", policy or "unknown", "noeviction", level != "D0", fix)
    if level == "D0":
        fix = "for trying things out only: a restart of Redis loses every job; set redis.durability to D1 for more"
        yield Shortfall("redis.durability", "D0", "D1, D2 or D3", False, fix)
        return
    fsync, enough = facts["appendfsync"], FSYNC[level]
    needed = " or ".join(enough)
    if facts["appendonly"] != "yes":
        yield Shortfall("appendonly", facts["appendonly"], "yes", True, "CONFIG SET appendonly yes")
    elif not fsync:
        yield Shortfall("appendfsync", "unknown", needed, False, "CONFIG is forbidden here, so it cannot be checked")
    elif fsync not in enough:
        yield Shortfall("appendfsync", fsync, needed, True, f"CONFIG SET appendfsync {enough[0]}")
    if level == "D3" and facts["replicas"] == "0":
        fix = "connect one: until then nothing is accepted"
        yield Shortfall("connected replicas", "0", "1 or more", False, fix)
    if level == "D3" and facts["min-replicas-to-write"] == "0":
        fix = "CONFIG SET min-replicas-to-write 1, or a primary cut off from its replicas does work that is thrown away"
        yield Shortfall("min-replicas-to-write", "0", "1", False, fix)


async def check_level(client: RedisClient) -> list[str]:
    """Check all servers; returns warnings for the operator. Raises ConfigError if a server cannot keep
    `redis.durability`, Unavailable if it does not answer (yet)."""
    level, warnings = client.settings.durability, []
    for facts in await client.servers():
        server = f"{facts['address']}: " if facts["address"] else ""
        for shortfall in shortfalls(level, facts):
            if shortfall.fatal:
                raise ConfigError("redis.durability", f"Redis cannot keep {level}: {server}{shortfall}", LESS)
            warnings.append(f"{server}{shortfall}")
    return warnings


LESS = "or ask for less: D0 needs nothing and keeps nothing"


log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""Between two checks of the store's identity and of the servers' run ids. A check costs two small commands."""
CHECK_INTERVAL_S = 20.0
"""Between two checks of a server's settings, if the server has not changed."""
ENTER_RETRY_DELAY_S, ENTER_TIMEOUT_S = 0.25, RECOVERY_TIMEOUT_S + 1.0

NOT_CHECKED = "the store has not been checked yet"
WRONG_STORE = "the store is not one that this server may use; the operator of this server finds the reason in its log"
SHORTFALL = "the store cannot keep what is accepted; the operator of this server finds the reason in its log"


class StoreMonitor:
    """Monitor of one process's store. The process must accept no work while `reason` is not empty."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self.entered = asyncio.Event()
        """Set once this process may use the store."""
        self.deployment = ""
        """The store's deployment id as of the last check."""
        self._refusal: ConfigError | None = None
        self._shortfall: ConfigError | None = None
        self._warnings: list[str] = []
        self._servers: dict[str, str] = {}
        self._checked_at = 0.0

    @property
    def reason(self) -> str:
        """Why the store must get no work now, for operators; "" while it may."""
        error = self._refusal or self._shortfall
        return str(error) if error else "" if self.entered.is_set() else NOT_CHECKED

    @property
    def brief(self) -> str:
        """The same for clients, without the deployment's settings, which only the log and `penstock doctor` show."""
        if self._refusal:
            return WRONG_STORE
        return SHORTFALL if self._shortfall else "" if self.entered.is_set() else NOT_CHECKED

    @property
    def refusal(self) -> str:
        """`brief`, for a request that needs the store. Raises Unavailable until the store was checked once."""
        if (brief := self.brief) == NOT_CHECKED:
            raise Unavailable(NOT_CHECKED)
        return brief

    async def enter(self) -> None:
        """Compare the store's identity with the settings, before any other use of it. Raises ConfigError if this
        process must not use the store, Unavailable."""
        self.deployment = (await enter_store(self._client)).deployment
        self._refuse(None)
        self.entered.set()

    async def try_to_enter(self) -> None:
        """Enter if Redis answers within ENTER_TIMEOUT_S; else `keep_looking` does so later. Raises ConfigError."""
        try:
            async with asyncio.timeout(ENTER_TIMEOUT_S):
                await self.enter()
        except (Unavailable, TimeoutError) as error:
            log.warning("the store cannot be used yet: %s", str(error) or f"no answer within {ENTER_TIMEOUT_S:g} s")

    async def require(self) -> None:
        """Enter the store if that was not done yet, and check it. Raises ConfigError if the store must get no work,
        Unavailable."""
        if not self.entered.is_set():
            await self.enter()
        await self.look()
        if error := self._refusal or self._shortfall:
            raise error

    async def look(self) -> None:
        """Check the store's identity, and its servers' settings if the servers have changed or CHECK_INTERVAL_S has
        passed. Raises Unavailable."""
        self._verify(await read_identity(self._client) or await identify(self._client))
        servers = await self._client.run_ids()
        if servers == self._servers and time.monotonic() - self._checked_at < CHECK_INTERVAL_S:
            return
        await self._check_level()
        self._servers, self._checked_at = servers, time.monotonic()

    async def keep_looking(self) -> None:
        """Check in a loop until cancelled, also while Redis is unavailable."""
        await run_periodically(
            self._enter_and_look,
            lambda: LOOK_INTERVAL_S if self.entered.is_set() else ENTER_RETRY_DELAY_S,
            ExpectedErrors(Unavailable, log.debug, "the store is taken to be as it was: %s"),
        )

    async def _enter_and_look(self) -> None:
        """Enter after a start without Redis: this process serves already, so it refuses work instead of ending."""
        try:
            if not self.entered.is_set():
                await self.enter()
            await self.look()
        except ConfigError as error:
            self._refuse(error)

    def _verify(self, identity: Identity) -> None:
        if identity.deployment != self.deployment:
            log.warning(
                "the store has another deployment id than before: it was emptied, or replaced by another",
                extra={"before": self.deployment, "now": identity.deployment},
            )
        self.deployment, refusal = identity.deployment, None
        try:
            check_identity(identity, self._client.settings)
        except ConfigError as error:
            refusal = error
        self._refuse(refusal)

    def _refuse(self, refusal: ConfigError | None) -> None:
        if refusal is not None and str(refusal) != str(self._refusal):
            log.error("this process must not use the store: %s", refusal)
        self._refusal = refusal

    async def _check_level(self) -> None:
        """Raises Unavailable."""
        shortfall, warnings = None, self._warnings
        try:
            warnings = await check_level(self._client)
        except ConfigError as error:
            shortfall = error
        for warning in warnings:
            if warning not in self._warnings:
                log.warning("%s", warning)
        if shortfall is not None and str(shortfall) != str(self._shortfall):
            log.error("the store cannot keep what is accepted, and nothing new is: %s", shortfall)
        if shortfall is None and self._shortfall is not None:
            log.warning("the store can keep what is accepted again")
        self._warnings, self._shortfall = warnings, shortfall
