"""Who is told to work on what: batches that are due, each told by one Celery message, and told again when nothing came
of it. This is what repairs the messages Celery loses, and also what sends them the first time."""

from __future__ import annotations

import asyncio
import logging

from celery import Celery
from kombu.exceptions import OperationalError

from offline.app import LOOK_AT_BATCH
from runtime.loops import ExpectedErrors, run_periodically
from streaming.batches.store import Batches
from streaming.errors import Unavailable
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
MAX_BATCHES = 100


class DueNotifier:
    """Any number of processes may ring: each telling is taken by one of them."""

    def __init__(self, batches: Batches, app: Celery, metrics: Metrics) -> None:
        self._batches, self._app, self._metrics = batches, app, metrics

    async def notify(self) -> int:
        """Tell what is due; how many. Raises Unavailable, OperationalError (Celery's broker is away)."""
        due = await self._batches.due(MAX_BATCHES)
        for batch_id, number, reason in due:
            await asyncio.to_thread(self._app.send_task, LOOK_AT_BATCH, (batch_id, number), retry=False)
            self._metrics.batch_tellings.labels(reason).inc()
        return len(due)

    async def keep_ringing(self) -> None:
        """For ever, whatever the servers do."""
        errors = (Unavailable, OperationalError, OSError)
        message = "no batch is told of until the store and the broker answer: %s"
        await run_periodically(self.notify, LOOK_INTERVAL_S, ExpectedErrors(errors, log.warning, message, once=True))
