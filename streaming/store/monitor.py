"""Store monitor: checks at intervals that the store has the right identity and keeps the required durability.

A store may change while a process runs: Sentinel may promote a replica that evicts keys or has no append-only file, an
operator may empty the store or change its settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.config import ConfigError
from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability
from streaming.store.identity import RECOVERY_TIMEOUT_S, Identity, check_identity, enter_store, identify, read_identity

# Each level: what a lost Redis process, a power cut, and a lost host cost; what it needs.
# D0: all is lost; all is lost; all is lost; nothing.
# D1: nothing is lost; the last second; down until it is back; append-only file, fsync everysec.
# D2: nothing is lost; nothing; down until it is back; append-only file, fsync always.
# D3: nothing is lost; nothing, for one host; nothing that was answered; as D1, and a replica.
#
# At D3 `RedisClient.calls` answers put, cancel and finish only once a replica has the write, and raises Unavailable if
# none has it in time. The job may still run: the same idempotency key finds it. A worker repeats a finish until a
# replica has it or another worker has the job.


MIN_REDIS_VERSION = (7, 0)
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
        yield Shortfall(
            "redis_version", version or "unknown", "7.0 or later", True, "use Redis 7.0 or later, or Valkey"
        )
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
        server = f"{facts['place']}: " if facts["place"] else ""
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
        return SHORTFALL if self._shortfall else self.reason

    @property
    def refusal(self) -> str:
        """`brief`, for a request that needs the store. Raises Unavailable until the store was checked once."""
        if not self.entered.is_set() and not (self._refusal or self._shortfall):
            raise Unavailable(NOT_CHECKED)
        return self.brief

    async def enter(self) -> None:
        """Compare the store's identity with the settings, before any other use of it. Raises ConfigError if this
        process must not use the store, Unavailable."""
        self.deployment = (await enter_store(self._client)).deployment
        self._refuse(None)
        self.entered.set()

    async def try_to_enter(self) -> None:
        """Enter if Redis answers within ENTER_TIMEOUT_S; else `keep_looking` does so later. Raises ConfigError."""
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ENTER_TIMEOUT_S):
                await self.enter()

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
        except ConfigError as error:
            self._refuse(error)
        else:
            await self.look()

    def _verify(self, identity: Identity) -> None:
        if identity.deployment != self.deployment:
            log.warning(
                "the store has another deployment id than before: it was emptied, or replaced by another",
                extra={"before": self.deployment, "now": identity.deployment},
            )
        self.deployment = identity.deployment
        try:
            check_identity(identity, self._client.settings)
        except ConfigError as error:
            self._refuse(error)
        else:
            self._refuse(None)

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
