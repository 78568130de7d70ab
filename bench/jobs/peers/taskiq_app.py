"""A taskiq broker whose task answers one token: `taskiq worker bench.jobs.peers.taskiq_app:broker`."""

from __future__ import annotations

import os

from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from bench.jobs.callers import ANSWER

URL = os.environ["BENCH_REDIS_URL"]

# The client library's own timeout would end the wait for the next task.
broker = ListQueueBroker(URL, socket_timeout=None).with_result_backend(
    RedisAsyncResultBackend(URL, result_ex_time=3600)
)


@broker.task  # type: ignore[untyped-decorator]
async def token(_prompt: str) -> str:
    """The task."""
    return ANSWER
