"""Service container: the stores, clients and settings that endpoints use, one per process (`app.state.services`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from api.admission import PreparedRequests
from api.auth.answers import OpenAnswers
from api.auth.audit import Audit
from api.auth.console import ConsoleAccess
from api.auth.keys import Caller, Keyring
from api.openai.content import InputRules
from api.openai.errors import model_not_found
from api.openai.media import MediaReader
from api.openai.rendering import Facts, fingerprint
from api.settings import ApiSettings, MediaSettings, ModerationSettings
from api.waits import WaitEstimates, WaitSampler
from penstock.engine import ModelCard
from penstock.loops import ExpectedErrors, run_periodically, supervise
from streaming.batches.file_store import BatchSettings, FilesSettings, FileStore
from streaming.batches.store import Batches, Files
from streaming.errors import Unavailable
from streaming.events import EventSettings, EventSubscriptions, Webhooks
from streaming.fleet.aliases import NO_ALIASES, Aliases, Target
from streaming.fleet.api_keys import VERSION, ApiKeys
from streaming.fleet.audit import AuditLog
from streaming.fleet.plans import LEADER, PLANS, Overrides, Plans, overrides_of, stall_of
from streaming.fleet.processes import CARDS, ConsoleSessions, Fleet, processes_of
from streaming.fleet.settings import ModelSettings
from streaming.jobs.conversations import Conversations
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import Job
from streaming.jobs.queue import Queue
from streaming.jobs.quotas import Quotas
from streaming.jobs.reader import JobReader, Summaries
from streaming.jobs.reaper import Reaper
from streaming.jobs.records import Deliveries, request_record
from streaming.jobs.relay import Relay
from streaming.jobs.settings import NO_LIMITS, SEVERAL, UNLIMITED, Limits, QuotaSettings
from streaming.jobs.usage import UsageCounts
from streaming.jobs.waiting import Backlog
from streaming.redis.client import NOW, RedisClient
from streaming.redis.clock import Clock
from streaming.store.monitor import Headroom, StoreMonitor
from telemetry.metrics import Metrics
from telemetry.records.writer import NO_RECORDS, RecordSink
from telemetry.tracing import Tracing

log = logging.getLogger(__name__)

CARDS_INTERVAL_S = 2.0
PLANS_INTERVAL_S = 1.0
AUDIT_INTERVAL_S = 1.0
CLOCK_TIMEOUT_S = 1.0
RESTART_DELAY_S = 1.0
"""Delay before a background loop that raised is restarted."""
SWEEP_INTERVAL_S = 2.0
"""Interval of the reaper here. Workers and the scheduler sweep more often; this one serves while none runs."""


@dataclass
class Services:
    """The services of one API process. Call `start` before the first request and `stop` after the last."""

    settings: ApiSettings
    store_client: RedisClient
    models: dict[str, ModelSettings]
    keyring: Keyring
    metrics: Metrics
    tracing: Tracing
    version: str
    files_settings: FilesSettings = field(default_factory=FilesSettings)
    batch_settings: BatchSettings = field(default_factory=BatchSettings)
    quota_settings: QuotaSettings = UNLIMITED
    weights: Mapping[str, float] = field(default_factory=dict)
    """By tenant, see TenantSettings."""
    limits: Limits = NO_LIMITS
    aliases: Aliases = NO_ALIASES
    content: InputRules | None = None
    moderation: ModerationSettings = ModerationSettings()  # noqa: RUF009
    media_settings: MediaSettings = MediaSettings()  # noqa: RUF009
    subscriptions: EventSubscriptions = field(default_factory=lambda: EventSubscriptions(EventSettings(), {}))
    cards: dict[str, ModelCard] = field(default_factory=dict)
    """Model cards that workers wrote when they loaded the models, refreshed in the background."""
    receiving_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of uploads in progress in this process, by tenant."""
    records: RecordSink = NO_RECORDS
    name: str = ""
    """Of this process in `penstock ps`."""
    large_bytes: int = 0
    """Bytes of the large bodies whose jobs are not accepted yet."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        store_client = self.store_client
        self.headroom, self.file_store = Headroom(store_client), FileStore(self.files_settings.dir)
        self.queue = Queue(store_client, self.headroom, self.weights, self.limits)
        self.job_reader = JobReader(store_client)
        self.fleet, self.summaries, self.backlog = Fleet(store_client), Summaries(store_client), Backlog(store_client)
        self.files, self.batches, self.quota_usage = Files(store_client), Batches(store_client), Quotas(store_client)
        self.media = MediaReader(self.media_settings, store_client, self.file_store)
        self.conversations = Conversations(store_client, self.headroom)
        self.dead_letters = DeadLetters(store_client, self.weights)
        self.usage = UsageCounts(store_client)
        self.plans, self.webhooks = Plans(store_client), Webhooks(store_client)
        self.overrides, self.relay = Overrides(store_client), Relay(store_client)
        self.store, self.clock = StoreMonitor(store_client), Clock(store_client)
        self.deliveries = Deliveries(store_client)
        self.api_keys, self.open_answers = ApiKeys(store_client), OpenAnswers()
        self.usage_turn = asyncio.Lock()
        """Held while usage is read: one report at a time leaves the store time for jobs."""
        self.audit_log = AuditLog(store_client)
        self.audit = Audit(self.audit_log)
        self.used_keys: dict[str, int] = {}
        """When created keys were used (Unix milliseconds), by id, as far as it is not stored yet."""
        self._keys_version = -1
        self.console = ConsoleAccess(self.keyring, ConsoleSessions(store_client))
        self.prepared = PreparedRequests()
        self._set_general_quotas()
        self.waits = WaitEstimates(store_client.settings.partitions)
        self.wait_sampler = WaitSampler(self.job_reader, self.waits.errors)

    async def start(self) -> None:
        """Subscribe to replies and start the background loops."""
        await self.relay.start()
        with contextlib.suppress(Unavailable, TimeoutError):  # retried; until then jobs get no timestamps here
            async with asyncio.timeout(CLOCK_TIMEOUT_S):
                await self.read_keys()
                await self.clock.renew()
        for work in (
            self.store.keep_looking,
            self.headroom.keep_looking,
            self.clock.keep,
            self.deliveries.keep_writing,
            self.wait_sampler.keep_measuring,
            self._refresh_cards,
            self._refresh_plans,
            self._store_audit,
            self._sweep,
            *([self.keyring.issuer.keep_reading] if self.keyring.issuer is not None else []),
        ):
            self.spawn(supervise(work, RESTART_DELAY_S))

    async def stop(self) -> None:
        """Stop the background tasks and close the connections."""
        await self.relay.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # costs only the last timings, and entries of which the log has lines
            await self.deliveries.write()
            await self.audit.store()
        await self.store_client.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; `stop` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._log_failure)

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    @property
    def refusal(self) -> str:
        """Why the store accepts no new work now, also for want of room; "" while it does.

        Raises Unavailable until the store was reached for the first time.
        """
        return self.store.refusal or self.headroom.brief

    @property
    def body_limit(self) -> int:
        """Bytes of a body that may hold media: more than of others, if a model takes any."""
        for card in self.cards.values():
            can = card.capabilities
            if can.images or can.audio or can.files:
                return self.settings.body_limit + self.media_settings.max_request_bytes * 4 // 3
        return self.settings.body_limit

    def quotas(self, caller: Caller) -> QuotaSettings:
        """Return the storage quotas of the caller's tenant."""
        return self.general_quotas if caller.quotas is UNLIMITED else caller.quotas.over(self.general_quotas)

    def is_limited(self, tenant: str) -> bool:
        """Whether the tenant or one of its keys has limits, so that its own partition counts its jobs."""
        return tenant in self.keyring.limited or self.limits.of_tenant(tenant) is not None

    def _set_general_quotas(self) -> None:
        """Set what holds for every tenant that has no quotas of its own."""
        several = len(self.keyring.tenants) > 1 or self.keyring.issuer is not None
        self.general_quotas = self.quota_settings.over(SEVERAL) if several else self.quota_settings

    def model(self, name: str) -> ModelSettings:
        """Return a model's settings. Raises ApiError (404)."""
        if name not in self.models:
            raise model_not_found(name, self.models)
        return self.models[name]

    def meant(self, tenant: str, name: str) -> Target | None:
        """Return the model that a tenant's client means by a name; None if there is none."""
        return self.aliases.resolve(tenant, name, self.models)

    def facts(self, job: Job, created_ms: int) -> Facts:
        """Return what is constant in every rendering of this job's answer."""
        card = self.cards.get(job.model)
        return Facts(job, created_ms, fingerprint(card) if card else None)

    async def _sweep(self) -> None:
        """Sweep expired leases, once the store is known to be this deployment's."""
        await self.store.entered.wait()
        reaper = Reaper(
            self.store_client,
            self.metrics,
            salvager=self.job_reader,
            on_end=lambda record: self.records.write(request_record(record, self.name)),
            tracing=self.tracing,
        )
        await reaper.keep_sweeping(SWEEP_INTERVAL_S)

    async def read_keys(self) -> None:
        """Take over the created keys. Raises Unavailable."""
        self._keys_version = await self.store_client.ask(VERSION)  # before them: a later change is read again
        self.keyring.learn(await self.api_keys.read())
        self._set_general_quotas()

    async def learn_cards(self) -> None:
        """Read the cards, if one of a configured model is not known yet: a worker may have just loaded it."""
        if not self.cards.keys() >= self.models.keys():
            with contextlib.suppress(Unavailable):
                self.cards = await self.fleet.cards()

    async def _refresh_cards(self) -> None:
        async def refresh() -> None:
            self.metrics.flush()
            self.prepared.clear()
            self.cards, version = await self.store_client.ask_all(CARDS, VERSION)
            if version != self._keys_version or not self.keyring.known:
                await self.read_keys()
            self.open_answers.end(self.keyring.holds)
            if self.used_keys:
                used, self.used_keys = self.used_keys, {}
                await self.api_keys.note_used(used)

        expected = ExpectedErrors(Unavailable, log.debug, "model cards not refreshed: %s")
        await run_periodically(refresh, CARDS_INTERVAL_S, expected)

    async def _store_audit(self) -> None:
        async def store() -> None:
            await self.audit.noted.wait()
            await self.audit.store()

        expected = ExpectedErrors(Unavailable, log.debug, "entries of the audit log wait for the store: %s")
        await run_periodically(store, AUDIT_INTERVAL_S, expected)

    async def _refresh_plans(self) -> None:
        expected = ExpectedErrors(Unavailable, log.debug, "plans not refreshed: %s")
        async with contextlib.aclosing(self.plans.news(PLANS_INTERVAL_S)) as news:
            async for _ in news:
                with expected:
                    workers, plans, overrides, lead, now_ms = await self.store_client.ask_all(
                        processes_of("worker"), PLANS, overrides_of(self.models), LEADER, NOW
                    )
                    self.waits.plans.learn(plans, now_ms)
                    stalls = {
                        name: stall_of(name, model, workers, plans.get(name), overrides.get(name), lead=lead)
                        for name, model in self.models.items()
                    }
                    self.waits.readiness.learn(workers, {name: stall for name, stall in stalls.items() if stall})
