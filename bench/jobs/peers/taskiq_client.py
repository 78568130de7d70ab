"""Callers of taskiq."""

from __future__ import annotations

import os
import sys

from bench.jobs.callers import ANSWER, CallerPlan, run, tasks
from bench.jobs.peers.taskiq_app import broker, token


async def main(plan: CallerPlan) -> None:
    await broker.startup()
    # A caller of taskiq asks again and again whether there is a result.
    pause_s = float(os.environ["BENCH_POLL_S"])

    async def ask(_number: int) -> None:
        task = await token.kiq("say one word")
        result = await task.wait_result(check_interval=pause_s, timeout=60)
        if result.is_err or result.return_value != ANSWER:
            raise ValueError(result)

    await tasks(plan, ask)


if __name__ == "__main__":
    run(main(CallerPlan.of(sys.argv[1:])))
