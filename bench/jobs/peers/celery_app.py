"""A Celery application whose task answers one token: `celery -A bench.jobs.peers.celery_app worker`."""

from __future__ import annotations

import os

from celery import Celery

from bench.jobs.callers import ANSWER

URL = os.environ["BENCH_REDIS_URL"]

app = Celery("bench", broker=URL, backend=URL)
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=int(os.environ.get("BENCH_PREFETCH", "4")),
    broker_pool_limit=64,
    worker_send_task_events=False,
    task_track_started=False,
)


@app.task(name="token")  # type: ignore[untyped-decorator]
def token(_prompt: str) -> str:
    """The task."""
    return ANSWER
