"""StoreMonitor: checks, for as long as a process lives, that its store is the right one and can keep what is promised.

A store does not stay what it was at the start: Sentinel may promote a replica that evicts or has no append-only file,
somebody may empty it, or change its settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from runtime.config import ConfigError
from runtime.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.redis.client import RedisClient
from streaming.store.durability import check_level
from streaming.store.identity import LOST_S, Identity, check_identity, enter_store, identify, read_identity

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""Between two looks at which servers these are, and at the store's identity: two small commands."""
CHECK_S = 20.0
"""Between two checks of the settings of servers that have not changed."""
ENTER_RETRY_DELAY_S, ENTER_TIMEOUT_S = 0.25, LOST_S + 1.0

NOT_CHECKED = "the store has not been checked yet"
WRONG_STORE = "the store is not one that this server may use; whoever runs it finds the reason in its log"
SHORTFALL = "the store cannot keep what is accepted; whoever runs this server finds the reason in its log"


class StoreMonitor:
    """One per process. Nothing may be accepted while `reason` is not empty."""

    def __init__(self, wire: RedisClient) -> None:
        self._wire = wire
        self.entered = asyncio.Event()
        """Set once the store was found to be one this process may use."""
        self.deployment = ""
        """The store's deployment id as of the last look."""
        self._refusal: ConfigError | None = None
        self._shortfall: ConfigError | None = None
        self._warnings: list[str] = []
        self._servers: dict[str, str] = {}
        self._checked_at = 0.0

    @property
    def reason(self) -> str:
        """Why the store may be given no work now, for people; "" while it may."""
        error = self._refusal or self._shortfall
        return str(error) if error else "" if self.entered.is_set() else NOT_CHECKED

    @property
    def brief(self) -> str:
        """The same for clients, whom the settings of the deployment do not concern: the log and `penstock doctor` say
        what to do."""
        if self._refusal:
            return WRONG_STORE
        return SHORTFALL if self._shortfall else self.reason

    async def enter(self) -> None:
        """Compare the store's identity with the settings, before anything else is done with it. Raises ConfigError if
        this process must not use it, Unavailable."""
        self.deployment = (await enter_store(self._wire)).deployment
        self._refuse(None)
        self.entered.set()

    async def try_to_enter(self) -> None:
        """Enter now if Redis answers soon; if not, `keep_looking` does so later. Raises ConfigError."""
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ENTER_TIMEOUT_S):
                await self.enter()

    async def require(self) -> None:
        """Enter if that is still to be done, and look. Raises ConfigError if the store may be given no work,
        Unavailable."""
        if not self.entered.is_set():
            await self.enter()
        await self.look()
        if error := self._refusal or self._shortfall:
            raise error

    async def look(self) -> None:
        """Check the store's identity, and the settings of its servers if these are others than before or CHECK_S is
        over. Raises Unavailable."""
        self._verify(await read_identity(self._wire) or await identify(self._wire))
        servers = await self._wire.run_ids()
        if servers == self._servers and time.monotonic() - self._checked_at < CHECK_S:
            return
        await self._check_level()
        self._servers, self._checked_at = servers, time.monotonic()

    async def keep_looking(self) -> None:
        """For ever, whatever Redis does."""
        await run_periodically(
            self._enter_and_look,
            lambda: LOOK_INTERVAL_S if self.entered.is_set() else ENTER_RETRY_DELAY_S,
            ExpectedErrors(Unavailable, log.debug, "the store is taken to be as it was: %s"),
        )

    async def _enter_and_look(self) -> None:
        """If Redis was away at the start, this process serves already: it refuses work instead of ending."""
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
            check_identity(identity, self._wire.settings)
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
            warnings = await check_level(self._wire)
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
