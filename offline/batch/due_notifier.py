"""Due notifier: sends one Celery message for each batch that is due, and repeats it when no worker took the batch.

It sends the first message as well as the ones that replace what Celery lost.
"""

from __future__ import annotations

import asyncio
import logging

from celery import Celery
from kombu.exceptions import OperationalError

from offline.app import LOOK_AT_BATCH
from penstock.loops import ExpectedErrors, run_periodically
from streaming.batches.store import Batches
from streaming.errors import Unavailable
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
MAX_BATCHES = 100
"""Batches of one round."""


class DueNotifier:
    """Any number of processes may run one: each due notice goes to one of them."""

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
        await run_periodically(self.notify, POLL_INTERVAL_S, ExpectedErrors(errors, log.warning, message, once=True))
