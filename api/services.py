"""What every endpoint works with, built once per process and passed along as `app.state.services`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from api.auth.keys import Caller, Keyring
from api.openai.errors import model_not_found
from api.openapi import document
from api.outlook import PlanReader
from api.pace import CompletionRate
from api.settings import ApiSettings
from runtime.lag import watch_lag
from runtime.loops import ExpectedErrors, run_periodically, supervise
from streaming.batches.file_store import FileStore
from streaming.batches.files import Files
from streaming.batches.store import Batches
from streaming.errors import Unavailable
from streaming.events.outbox import EventSubscriptions
from streaming.fleet.leader import Leadership
from streaming.fleet.overrides import Overrides
from streaming.fleet.plans import Plans
from streaming.fleet.processes import Fleet
from streaming.jobs.backlog import Backlog
from streaming.jobs.cards import ModelCard
from streaming.jobs.deliveries import Deliveries
from streaming.jobs.queue import Queue
from streaming.jobs.quotas import Quotas
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.relay import Relay
from streaming.jobs.summaries import Summaries
from streaming.priority import Priority
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock
from streaming.settings import (
    UNLIMITED,
    BatchSettings,
    EventSettings,
    FilesSettings,
    ModelSettings,
    QuotaSettings,
)
from streaming.store.memory import Headroom
from streaming.store.monitor import NOT_CHECKED, StoreMonitor
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing

log = logging.getLogger(__name__)

CARDS_INTERVAL_S = 2.0
PLANS_INTERVAL_S = 1.0
CLOCK_TIMEOUT_S = 1.0
RESTART_DELAY_S = 1.0
"""Before a background loop that broke is started again."""
SWEEP_S = 2.0
"""Workers and the scheduler sweep more often; this is for the time when none is there."""


@dataclass
class Services:
    """One API process. `start` before the first request, `stop` after the last."""

    settings: ApiSettings
    wire: RedisClient
    models: dict[str, ModelSettings]
    keyring: Keyring
    metrics: Metrics
    tracing: Tracing
    version: str
    files_settings: FilesSettings = field(default_factory=FilesSettings)
    batch_settings: BatchSettings = field(default_factory=BatchSettings)
    quota_settings: QuotaSettings = UNLIMITED
    wanted: EventSubscriptions = field(default_factory=lambda: EventSubscriptions(EventSettings(), {}))
    pace: CompletionRate = field(default_factory=CompletionRate)
    outlook: PlanReader = field(default_factory=PlanReader)
    """What the scheduler expects; follows the plans a moment behind."""
    cards: dict[str, ModelCard] = field(default_factory=dict)
    """What workers found when they loaded the models; follows the fleet a moment behind."""
    coming: Counter[str] = field(default_factory=Counter)
    """Bytes of files that this process is receiving, by tenant."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.headroom, self.shelf = Headroom(self.wire), FileStore(self.files_settings.dir)
        self.queue, self.journal, self.fleet = Queue(self.wire, self.headroom), JobReader(self.wire), Fleet(self.wire)
        self.summaries, self.backlog, self.relay = Summaries(self.wire), Backlog(self.wire), Relay(self.wire)
        self.files, self.batches, self.kept = Files(self.wire), Batches(self.wire), Quotas(self.wire)
        self.leadership, self.plans, self.overrides = Leadership(self.wire), Plans(self.wire), Overrides(self.wire)
        self.store = StoreMonitor(self.wire)
        self.clock, self.deliveries = Clock(self.wire), Deliveries(self.wire)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The OpenAPI document, made when it is first asked for."""
        return document(self.version)

    async def start(self) -> None:
        """Begin to listen for replies and to follow the fleet."""
        await self.relay.start()
        with contextlib.suppress(Unavailable, TimeoutError):  # `keep` retries; until then jobs have no stamps of ours
            async with asyncio.timeout(CLOCK_TIMEOUT_S):
                await self.clock.renew()
        for work in (
            watch_lag,
            self.store.keep_looking,
            self.headroom.keep_looking,
            self.clock.keep,
            self.deliveries.keep_writing,
            self._follow_fleet,
            self._follow_plans,
            self._sweep,
        ):
            self.spawn(supervise(work, RESTART_DELAY_S))

    async def stop(self) -> None:
        """End what runs in the background and close the wire."""
        await self.relay.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # only somebody's look at a timing is lost
            await self.deliveries.write()
        await self.wire.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests; it ends with the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work beside a request broke", exc_info=error)

    @property
    def durability_error(self) -> str:
        """Why this process may not use the store now, for clients; "" while it may. Raises Unavailable until the store
        was reached for the first time."""
        if self.store.reason == NOT_CHECKED:
            raise Unavailable(NOT_CHECKED)
        return self.store.brief

    @property
    def refusal(self) -> str:
        """Why the store may not be given any more work now; "" while it may. Raises Unavailable until the store was
        reached for the first time."""
        return self.durability_error or self.headroom.reason

    def eta_ms(self, model: str, lane: Priority, before: int) -> int | None:
        """Milliseconds until a job with `before` others ahead of it in its lane is begun: what the scheduler expects,
        or, without one, by the pace of late. None: nobody can say."""
        if self.outlook.knows(model):
            return self.outlook.eta_ms(model, lane, before)
        return self.pace.eta_ms(model, before)

    def quotas(self, caller: Caller) -> QuotaSettings:
        """What the caller's tenant may keep."""
        return self.quota_settings if caller.quotas is UNLIMITED else caller.quotas.over(self.quota_settings)

    def model(self, name: str) -> ModelSettings:
        """Raises ApiError (404)."""
        if name not in self.models:
            raise model_not_found(name, self.models)
        return self.models[name]

    async def _sweep(self) -> None:
        """Not before the store is known to be one this process may write to."""
        await self.store.entered.wait()
        await Reaper(self.wire, self.metrics).keep_sweeping(SWEEP_S)

    async def _follow_fleet(self) -> None:
        async def look() -> None:
            self.metrics.fold()
            self.cards = await self.fleet.cards()

        expected = ExpectedErrors(Unavailable, log.debug, "model cards as they were: %s")
        await run_periodically(look, CARDS_INTERVAL_S, expected)

    async def _follow_plans(self) -> None:
        expected = ExpectedErrors(Unavailable, log.debug, "plans as they were: %s")
        async with contextlib.aclosing(self.plans.news(PLANS_INTERVAL_S)) as news:
            async for _ in news:
                with expected:
                    self.outlook.learn(await self.plans.read(), await self.wire.now_ms())
