"""An arq worker whose job answers one token."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import uvloop
from arq.connections import RedisSettings
from arq.worker import Worker

from bench.jobs.callers import ANSWER


async def token(_ctx: dict[str, Any], _prompt: str) -> str:
    """The job."""
    return ANSWER


async def main(url: str) -> None:
    """Until the process is ended. It polls every 5 ms: its own half second would be all that is measured."""
    worker = Worker(
        functions=[token],
        redis_settings=RedisSettings.from_dsn(url),
        max_jobs=256,
        poll_delay=0.005,
        handle_signals=False,
        log_results=False,
    )
    await worker.async_run()


if __name__ == "__main__":
    os.environ.setdefault("TZ", "UTC")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
