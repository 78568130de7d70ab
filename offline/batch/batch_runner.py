"""Batch runner: sends Celery messages for due batches, works a turn for each message, removes what has expired."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from celery import Celery
from kombu.exceptions import OperationalError

from offline.app import LOOK_AT_BATCH
from offline.batch.turn import BatchTurn
from offline.tools import OfflineTools
from penstock.config import ConfigError
from penstock.loops import ExpectedErrors, run_periodically
from streaming.batches.store import Batches, Files
from streaming.errors import DecodeError, Fenced, Superseded, Unavailable
from streaming.store.identity import check_identity, disagreement, read_identity
from telemetry import tracing as names
from telemetry.metrics import Metrics
from telemetry.otlp import Attributes

log = logging.getLogger(__name__)

MAX_EXPIRED = 100
"""Files or batches removed in one round."""


class BatchRunner:
    """Works turns, one per process. `stop` ends them early and cleanly. `quarantine_s`: retention of the quarantine."""

    def __init__(self, tools: OfflineTools, quarantine_s: float) -> None:
        self._tools, self._quarantine_s = tools, quarantine_s
        self._batches, self._files = Batches(tools.store_client), Files(tools.store_client)
        self._problem = ""
        """Why `tidy` does nothing, as logged last."""
        self.stop = asyncio.Event()
        self.running = 0

    async def look_at_batch(self, batch_id: str, notice: int) -> None:
        """Lease the batch and work one turn on it, unless a newer notice than `notice` or another lease exists.

        Never raises: a batch whose turn failed becomes due again.
        """
        turns = self._tools.metrics.batch_turns
        self.running += 1
        try:
            lease = await self._batches.hold(batch_id, notice)
            log.info("turn %d at a batch", lease.epoch, extra={"batch": batch_id, "state": lease.state})
            about: Attributes = {names.BATCH_ID: batch_id, names.TENANT: lease.batch.tenant}
            span = self._tools.tracing.span("batch turn", lease.batch.trace, "consumer", attributes=about)
            with span:
                await BatchTurn(self._tools, lease, self.stop).run()
            span.end()
            turns.labels("done").inc()
        except Superseded as error:
            log.debug("nothing to do: %s", error)
        except Fenced:
            turns.labels("taken").inc()
            log.warning("another process has the batch now", extra={"batch": batch_id})
        except Unavailable as error:
            turns.labels("failed").inc()
            log.warning("the turn at a batch ends because the store is away: %s", error, extra={"batch": batch_id})
        except Exception:
            # A full disk, a removed file or a bug of ours in one batch must not stop the others.
            turns.labels("failed").inc()
            log.exception("a turn at a batch failed; it will be repeated", extra={"batch": batch_id})
        finally:
            self.running -= 1

    async def tidy(self) -> None:
        """Remove expired files and batches and what killed processes left, and quarantine what the store does not know.

        Does nothing if store and folder belong to different deployments. Raises Unavailable, OSError.
        """
        file_store = self._tools.file_store
        if not await self._store_matches():
            return
        while files := await self._files.expired(MAX_EXPIRED):
            for file_id, tenant in files:
                await asyncio.to_thread(file_store.remove, file_id)
                await self._files.forget(file_id, tenant)
        for batch_id in await self._batches.forget_expired(MAX_EXPIRED):
            await asyncio.to_thread(file_store.end_work, batch_id)
        await asyncio.to_thread(file_store.drop_strays, "incoming")
        await asyncio.to_thread(file_store.drop_strays, "ended", age_s=self._tools.keep_s)
        orphans = await asyncio.to_thread(file_store.strays, "files")
        await self._quarantine("files", set(orphans) - await self._files.known(orphans))
        works = await asyncio.to_thread(file_store.works)
        old_works = await asyncio.to_thread(file_store.strays, "batches")
        states = await self._batches.states(works)
        for name, state in states.items():
            if state is not None and state.final:
                await asyncio.to_thread(file_store.end_work, name)
        await self._quarantine("batches", {name for name, state in states.items() if state is None} & set(old_works))
        for day in await asyncio.to_thread(file_store.end_quarantine, self._quarantine_s):
            log.warning("removed the files that were quarantined on %s", day)

    async def _store_matches(self) -> bool:
        """Check that the store and the folder of files belong to the same deployment. Raises Unavailable, OSError."""
        identity = await read_identity(self._tools.store_client)
        if identity is None:  # the store was just emptied; the monitor writes a new identity
            return False
        store_client, file_store = self._tools.store_client, self._tools.file_store
        try:
            check_identity(identity, store_client.settings)
        except ConfigError as error:
            problem = str(error)
        else:
            owner = await asyncio.to_thread(file_store.claim, identity.deployment)
            problem = disagreement(identity.deployment, owner, file_store.folder)
        if problem and problem != self._problem:
            log.warning("%s; no files are removed until this is fixed", problem)
        self._problem = problem
        return not problem

    async def _quarantine(self, part: str, names: Collection[str]) -> None:
        """Quarantine names unknown to the store, unless it was emptied meanwhile. Raises Unavailable, OSError."""
        if not names or not await self._store_matches():
            return
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # another process has moved it
                place = await asyncio.to_thread(self._tools.file_store.set_aside, part, name)
                log.warning("the store has no record of a file or batch; quarantined it: %s", place)

    async def keep_tidy(self, every_s: float) -> None:
        """Run until cancelled: tidy every `every_s` seconds, and retry later after a failure."""
        errors = (Unavailable, DecodeError, OSError)
        expected = ExpectedErrors(errors, log.warning, "expired files could not be removed, trying again later: %s")
        await run_periodically(self.tidy, every_s, expected)


POLL_INTERVAL_S = 1.0
"""Finds batches whose lease or rest has ended. A message announces every other due batch."""
MAX_BATCHES = 100
"""Batches of one round."""


class DueNotifier:
    """Sends one Celery message for each batch that is due, and repeats it when no process took the batch.

    Any number of processes may run one: each due notice goes to one of them.
    """

    def __init__(self, batches: Batches, app: Celery, metrics: Metrics) -> None:
        self._batches, self._app, self._metrics = batches, app, metrics

    async def notify(self) -> int:
        """Send a message for each due batch; return how many. Raises Unavailable, OperationalError (no broker)."""
        due = await self._batches.due(MAX_BATCHES)
        for batch_id, number, reason in due:
            await asyncio.to_thread(self._app.send_task, LOOK_AT_BATCH, (batch_id, number), retry=False)
            self._metrics.batch_due_notices.labels(reason).inc()
        return len(due)

    async def keep_notifying(self) -> None:
        """Run until cancelled; retry while the store or the broker is away."""
        errors = (Unavailable, OperationalError, OSError)
        message = "no batch is started until the store and the broker answer: %s"
        expected = ExpectedErrors(errors, log.warning, message, once=True)
        async with contextlib.aclosing(self._batches.news(POLL_INTERVAL_S)) as news:
            async for _ in news:
                with expected:
                    while await self.notify() >= MAX_BATCHES:
                        pass
