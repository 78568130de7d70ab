"""F08: clients that go away, at every moment of a request's life."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.chaos.asks import Ask
from bench.chaos.house import House
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.waiting import becomes

PHASES = ("accept", "queue", "prefill", "decode", "last")
POLICIES = ("cancel", "cancel", "continue", "grace:1")
TOKENS, DECODED = 220, 50
"""What is left after so many takes longer than any grace time, also for a client that reads late."""
SLOTS = 8
GONE_S = 0.5
"""From the leaving (and the grace time) to the end of the work."""


async def f08(stage: FaultTestbed) -> None:
    """Each phase, with each policy, several at once."""
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_WORKER_PREFETCH": "0", "PENSTOCK_SIM_PREFILL_MS": "400"}
    async with stage.house(workers=1, environ=environ) as house:
        turn = 0
        while stage.trials < stage.wanted and stage.missed <= stage.row.most_missed:
            turn += 1
            for phase in PHASES:
                # In the queue: every slot is taken by jobs that outlast the leaving.
                hogs = [Ask(f"hog {turn} {n}", 300, chat=False) for n in range(SLOTS)] if phase == "queue" else []
                begun = house.begin(hogs)
                await asyncio.gather(*(told.begun.wait() for told, _ in begun))
                await asyncio.gather(*(_leave(stage, house, phase, policy, n) for n, policy in enumerate(POLICIES)))
                await house.finish(begun)


async def _leave(stage: FaultTestbed, house: House, phase: str, policy: str, number: int) -> None:
    mark = f"{phase} {stage.trials} {number} {policy}"
    ends = ("completed",) if policy == "continue" else ("cancelled",)
    may = ("cancelled", "completed") if phase == "last" else ends
    told = house.clients.tell(
        Ask(mark, TOKENS, may=may, reads=False, queue={"on_disconnect": policy}, metadata={"mark": mark})
    )
    port = house.ports[number % 2]
    exchange = await Exchange.begin(port, "POST", told.ask.path, told.ask.body)
    reached = await _until_phase(exchange, phase)
    stage.fault(f"leaves at {phase}, {policy}")
    exchange.close()
    house.history.add("left", req=told.req)
    left = time.time()
    view = await _judge(stage, house, told.req, mark, policy, left)
    stage.bit(reached and was_in(phase, view, left), f"it did not leave in {phase}")


async def _until_phase(exchange: Exchange, phase: str) -> bool:
    """Go on reading until then; False: the stream was over before. In the queue and in prefill nothing has come yet:
    only time tells."""
    if phase in ("queue", "prefill"):
        await asyncio.sleep(0.2)
    if phase in ("decode", "last"):
        await exchange.answer()
        seen = 0
        async for _ in exchange.blocks():
            seen += 1
            if seen == (DECODED if phase == "decode" else TOKENS):
                return True
        return False
    return True


def was_in(phase: str, view: Mapping[str, Any], left: float) -> bool:
    """Whether a job was in this phase when its client left (Unix time), by what the job itself says afterwards. One
    that was never accepted is none; whether the last token is the end cannot be seen from outside."""
    times = ("created_at", "started_at", "first_token_at", "completed_at")
    accepted, begun, first, ended = (view.get(name) or math.inf for name in times)
    match phase:
        case "accept":
            return accepted > left
        case "last":
            return first <= left
        case "queue":
            return bool(view) and begun > left
        case "prefill":
            return begun <= left < first
        case "decode":
            return first <= left < ended
    raise ValueError(phase)


async def _judge(stage: FaultTestbed, house: House, req: int, mark: str, policy: str, left: float) -> dict[str, Any]:
    """The job as it says it ended, found by what it was marked with; one that never came to be is none."""
    found: list[str] = []

    async def is_listed() -> bool:
        found.extend(await _marked(house, mark))
        return bool(found)

    if not await becomes(is_listed, 1.5, 0.05):
        stage.must(mark.startswith("accept"), f"no job was ever there for {mark!r}")
        return {}
    house.history.add("accepted", req=req, job=found[0], status=200, ms=0)
    if policy == "continue":
        await house.clients.read_finally(found[0])
        return await _view(house, found[0])
    grace = 1.0 if policy.startswith("grace") else 0.0
    stage.must(await becomes(lambda: _end_of(house, found[0]), 10, 0.1), f"{mark!r}: still at work after 10 s")
    spent = await _end_of(house, found[0]) - left - grace
    key = "left to cancelled s, worst"
    stage.figures[key] = max(float(stage.figures.get(key, 0)), round(spent, 2))
    stage.must(spent <= GONE_S, f"{mark!r}: work ended {spent:.2f} s after the leaving, allowed: {GONE_S} s")
    await house.clients.read_finally(found[0])
    return await _view(house, found[0])


async def _marked(house: House, mark: str) -> list[str]:
    try:
        _, _, body = await fetch(house.ports[0], "GET", "/v1/jobs?limit=30")
    except Cut:
        return []
    return [view["id"] for view in msgspec.json.decode(body)["data"] if view["metadata"].get("mark") == mark]


async def _end_of(house: House, job: str) -> float:
    """When it ended, in Unix seconds; 0 while it has not."""
    return float((await _view(house, job))["completed_at"] or 0)


async def _view(house: House, job: str) -> dict[str, Any]:
    _, _, body = await fetch(house.ports[0], "GET", f"/v1/jobs/{job}")
    view: dict[str, Any] = msgspec.json.decode(body)
    return view


ROWS = (
    FaultRow(
        *("F08", "client leaves", f"in {', '.join(PHASES)}; cancel, continue, grace", 40, f08, 120),
        proves="A client that leaves frees its slot as it asked, at whatever moment it goes.",
        short=20,
    ),
)
