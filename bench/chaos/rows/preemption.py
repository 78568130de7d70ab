"""F37: batch work gives way to a storm of chats, and workers die while they put it back."""

from __future__ import annotations

import asyncio

import msgspec

from bench.chaos.asks import TENANTS, Ask, authorization
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.http import fetch
from bench.chaos.stage import FaultTestbed

SLOTS, WORKERS, STEP_MS = 4, 2, 20
LINES, LINE_TOKENS = (SLOTS - 1) * WORKERS, 400
"""Each worker reserves a slot, so all lines run at the same time."""
WAVES, CHATS, CHAT_TOKENS, PAUSE_S = 5, 10, 12, 0.25


async def f37(stage: FaultTestbed) -> None:
    """Batch jobs with readers fill every slot; waves of chats take their places. In every second trial a worker that
    holds jobs is killed amid the waves."""
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_SIM_STEP_MS": str(STEP_MS)}
    async with stage.cluster(workers=WORKERS, environ=environ) as cluster:
        for trial in stage.tries():
            lines = cluster.begin(
                Ask(
                    *(f"{stage.row.id} {trial} line {number}", LINE_TOKENS),
                    chat=number % 2 == 0,
                    queue={"priority": "batch"},
                    tenant=TENANTS[number % 2],
                )
                for number in range(LINES)
            )
            await asyncio.gather(*(told.begun.wait() for told, _ in lines))
            kills = trial % 2 == 1
            stage.fault(f"{WAVES} waves of chats" + (" and kill -9 of a worker" if kills else ""))
            chats = await _storm(stage, cluster, trial, kills=kills)
            await cluster.finish([*lines, *chats])
            await _judge(stage, cluster, lines, kills=kills)
            await cluster.ready()


async def _storm(stage: FaultTestbed, cluster: PenstockCluster, trial: int, *, kills: bool) -> list[Begun]:
    chats: list[Begun] = []
    for wave in range(WAVES):
        chats += cluster.begin(
            Ask(f"{stage.row.id} {trial} chat {wave} {number}", CHAT_TOKENS, queue={"priority": "interactive"})
            for number in range(CHATS)
        )
        await asyncio.sleep(PAUSE_S)
        if kills and wave == WAVES // 2 and (holders := await cluster.holders()):
            holders[0].kill()
    return chats


async def _judge(stage: FaultTestbed, cluster: PenstockCluster, lines: list[Begun], *, kills: bool) -> None:
    """The storm must have preempted jobs, and a preemption is no loss."""
    preempted = 0
    for told, _ in lines:
        _, _, body = await fetch(
            cluster.ports[0], "GET", f"/v1/jobs/{told.job}", headers=authorization(told.ask.tenant)
        )
        log = msgspec.json.decode(body)["attempt_log"]
        preempted += sum(attempt["outcome"] == "preempted" for attempt in log)
        lost = await cluster.losses(told.job)
        stage.must(kills or not lost, f"{told.job}: a preemption counts as the loss of a worker")
    stage.bit(preempted > 0, "no batch job was preempted")
    stage.figures["preemptions"] = preempted + float(stage.figures.get("preemptions", 0))
