"""Callers of arq."""

from __future__ import annotations

import os
import sys

from arq.connections import RedisSettings, create_pool

from bench.jobs.callers import ANSWER, CallerPlan, run, tasks


async def main(plan: CallerPlan) -> None:
    pool = await create_pool(RedisSettings.from_dsn(plan.url))
    # A caller of arq asks again and again whether there is a result.
    pause_s = float(os.environ["BENCH_POLL_S"])

    async def ask(_number: int) -> None:
        job = await pool.enqueue_job("token", "say one word")
        assert job is not None
        answer = await job.result(timeout=60, poll_delay=pause_s)
        if answer != ANSWER:
            raise ValueError(answer)

    await tasks(plan, ask)


if __name__ == "__main__":
    run(main(CallerPlan.of(sys.argv[1:])))
