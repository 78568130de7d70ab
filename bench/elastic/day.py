"""A day, compressed, twice: simulated with the real decision code, and live on real processes; how far they are apart.

Both have the same requests at the same seconds, the same limits, and the same time model of the engine. The simulation
decides with the scheduler's policy, the order of the queue, the gate and the choice of victims, as the processes do.
It is told one thing that is measured: how long a worker takes to start, on this machine, before the day.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import plots
from bench.elastic.testbed import MODEL, ElasticTestbed
from bench.replay.__main__ import ReplayedRequest, ReplayLimits, replay
from bench.report import Ratio, Report
from bench.table1.client import TargetServer
from planner.simulator.engine import EngineShape, ModelText, StepCosts
from planner.simulator.pool import PoolEngine, PoolSimulation
from planner.simulator.queues import PenstockQueue, PenstockWorker
from planner.simulator.trace import DAY_S, Burst, Lengths, TraceRow, WorkloadShape, requests
from scheduler.policy.decide import PolicyState, decide
from scheduler.policy.snapshot import TARGETS, ScalingLimits
from telemetry.records.reader import Skipped, read_records
from telemetry.records.schema import RequestRecord

STEP_S, TEXT_S, SLOTS, KV_TOKENS = 0.025, 0.0005, 8, 1500
MAX_WORKERS, IDLE_S, COVER, TICK_S = 6, 20.0, 0.9, 1.0
BATCH_SHARE = 0.15
"""Of the requests that are not of people."""
SAMPLE_INTERVAL_S = 0.25
"""Between two counts of the processes."""
DRAIN_S = 600.0
"""After the day, for what still waits or runs; so long a client waits, too."""
STARTS = 2
"""Cold starts that are measured before the day."""
BURSTS = (Burst(9.5 * 3600, 5400, 1.9, 900), Burst(14 * 3600, 3600, 1.7, 600), Burst(20 * 3600, 7200, 1.6, 900))
"""Of the day: a morning's rush, one after lunch, and an evening's."""


@dataclass(frozen=True, slots=True)
class DaySize:
    """How long the day takes, live, and how many requests a second it has in the mean without bursts."""

    seconds: float = 1200.0
    rate: float = 7.2
    seed: int = 7


SHORT_DAY = DaySize(seconds=150.0)


@dataclass(slots=True)
class DayOutcome:
    """One of the two days. Times in seconds from its begin."""

    waits: dict[str, list[float]] = field(default_factory=lambda: {lane: [] for lane in TARGETS})
    """From arrival to the first claim, by lane."""
    asked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    worker_s: float = 0.0
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(time, workers there)."""

    def within(self, lane: str) -> float:
        """Per cent of a lane's requests that were begun within its target."""
        return 100 * sum(wait <= TARGETS[lane] for wait in self.waits[lane]) / max(1, self.asked[lane])


def rows_of(size: DaySize) -> list[TraceRow]:
    """The day's requests, at the seconds at which they come. The same for the same size."""
    squeeze = size.seconds / DAY_S
    shape = WorkloadShape(
        rate=size.rate * squeeze, cv=1.2, wave=0.6, bursts=BURSTS, prompts=Lengths(8, 16), answers=Lengths(20, 16)
    )
    chance = random.Random(size.seed)  # noqa: S311 - a workload, not a secret
    rows = []
    for row in requests(shape, size.seed):
        lane = "batch" if row.lane == "standard" and chance.random() < BATCH_SHARE else row.lane
        rows.append(replace(row, at=row.at * squeeze, lane=lane))
    return [row for row in rows if row.at < size.seconds]


def limits_of(cold_start_s: float) -> ScalingLimits:
    """Those of the model, as the scheduler has them."""
    return ScalingLimits(1, MAX_WORKERS, idle_s=IDLE_S, cover=COVER, cold_start_s=cold_start_s)


MODEL_SETTINGS: Mapping[str, object] = {"min_workers": 1, "max_workers": MAX_WORKERS}
SETTINGS: Mapping[str, object] = {
    "sim.step_ms": 1000 * STEP_S,
    "sim.step_ms_per_text": 1000 * TEXT_S,
    "sim.prefill_ms": 0,
    "sim.slots": SLOTS,
    "sim.kv_tokens": KV_TOKENS,
    "sim.kv_policy": "MAX_UTILIZATION",
    "sim.load_ms": 2000,
    "scheduler.tick_s": TICK_S,
    "scheduler.idle_s": IDLE_S,
    "scheduler.cover": COVER,
}


# --- simulated -------------------------------------------------------------------------------------------------------


def simulated(rows: Sequence[TraceRow], seconds: float, start_s: float) -> DayOutcome:
    """The day on the simulator, from one ready worker on."""
    outcome = DayOutcome()
    for row in rows:
        outcome.asked[row.lane] += 1

    def begun(text: ModelText, waited_s: float) -> None:
        outcome.waits[text.lane].append(waited_s)

    costs = StepCosts(STEP_S, TEXT_S, held_s=0.0, prefill_s=0.0)
    engine = PoolEngine(EngineShape(KV_TOKENS, SLOTS, costs=costs), start_s)
    pool = PoolSimulation(
        engine,
        queue=PenstockQueue(),
        make_worker=lambda each: PenstockWorker(each, random.Random(1)),  # noqa: S311 - a simulation
        on_begun=begun,
        limit_of=lambda answer: answer,
    )
    pool.order(at_once=True)
    pool.feed(rows)
    limits = limits_of(start_s)
    state: PolicyState | None = None

    def steer(now_s: float) -> None:
        nonlocal state
        plan = decide(pool.snapshot(), limits, state, now_s)
        state = plan.state
        pool.resize(plan.want, [cordon.worker for cordon in plan.cordon])

    def sample(now_s: float) -> None:
        if now_s < seconds:
            outcome.curve.append((now_s, len(pool.workers)))

    pool.every(TICK_S, steer)
    pool.every(SAMPLE_INTERVAL_S, sample)
    pool.run(seconds)
    outcome.worker_s = pool.total_worker_s()
    pool.run(seconds + DRAIN_S)
    return outcome


# --- live ------------------------------------------------------------------------------------------------------------


async def cold_start_s(testbed: ElasticTestbed) -> float:
    """Seconds from the order of a worker until it is ready, in the mean of a few starts."""
    found = []
    for _ in range(STARTS):
        await testbed.settled(1)
        began_s = await testbed.now_s()
        await testbed.overrides.put(MODEL, 2, "show")
        ordered = await testbed.first(began_s, "up")
        await testbed.settled(2)
        found.append(await testbed.now_s() - ordered.at_ms / 1000)
        await testbed.overrides.put(MODEL, 1, "show")
    await testbed.settled(1)
    await testbed.overrides.end(MODEL, "show")
    return fmean(found)


async def live(folder: Path, size: DaySize, say: Callable[[str], None]) -> tuple[DayOutcome, float, list[str]]:
    """The day on real processes; the cold start that was measured before it; and what was wrong with answers."""
    rows, outcome = rows_of(size), DayOutcome()
    async with ElasticTestbed(folder / "testbed", MODEL_SETTINGS, SETTINGS) as testbed:
        say("measuring cold starts")
        start_s = await cold_start_s(testbed)
        say(f"a day of {size.seconds:g} s: {len(rows)} requests")
        began_s = await testbed.now_s()
        counting = asyncio.create_task(_counted(testbed, outcome, size.seconds))
        server = TargetServer.at(f"http://127.0.0.1:{testbed.port}/v1", MODEL)
        asked = await replay(server, rows, ReplayLimits(limit_s=size.seconds, timeout_s=DRAIN_S), lambda: None)
        await counting
        await asyncio.sleep(1.0)  # records are written twice a second
        for row in rows:
            outcome.asked[row.lane] += 1
        for lane, wait_s in _waits(testbed.records, began_s):
            outcome.waits[lane].append(wait_s)
    return outcome, start_s, _faults(asked)


async def _counted(testbed: ElasticTestbed, outcome: DayOutcome, seconds: float) -> None:
    """Count the processes of workers, from start to end, for so long."""
    loop = asyncio.get_running_loop()
    began_s = before_s = loop.time()
    while (now_s := loop.time()) - began_s < seconds:
        workers = len(testbed.worker_processes())
        outcome.worker_s += workers * (now_s - before_s)
        outcome.curve.append((now_s - began_s, workers))
        before_s = now_s
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _waits(folder: Path, began_s: float) -> list[tuple[str, float]]:
    """Lane and seconds until the first claim, of every request that was claimed."""
    return [
        (record.lane, (record.started_us - record.accepted_us) / 1e6)
        for record in read_records(folder, began_s, float("inf"), Skipped())
        if isinstance(record, RequestRecord) and record.started_us and record.accepted_us
    ]


def _faults(asked: Sequence[ReplayedRequest]) -> list[str]:
    return [each.answer.fault for each in asked if each.answer.fault]


# --- compared --------------------------------------------------------------------------------------------------------


def compared(real: DayOutcome, model: DayOutcome, start_s: float, faults: Sequence[str]) -> list[dict[str, Any]]:
    """The rows: each figure of both, and how far they are apart."""
    rows = [_row("cold start that was measured before", start_s, start_s, "s")]
    rows.append(_row("worker-hours", real.worker_s / 3600, model.worker_s / 3600, "h"))
    rows[-1]["apart"] = apart_pct(real, model)
    for lane in TARGETS:
        rows.append(_row(f"{lane} begun within {TARGETS[lane]:g} s", real.within(lane), model.within(lane), "%"))
        rows.append(_row(f"{lane} requests", real.asked[lane], model.asked[lane], ""))
    most = [max(count for _, count in each.curve) for each in (real, model)]
    rows.append(_row("most workers", most[0], most[1], ""))
    rows.append(_row("answers with a fault", len(faults), 0, ""))
    return rows


def _row(what: str, live: float, simulated: float, unit: str) -> dict[str, Any]:
    return {"what": what, "live": live, "simulated": simulated, "apart": abs(live - simulated), "unit": unit}


def apart_pct(real: DayOutcome, model: DayOutcome) -> float:
    """Per cent by which the worker-hours of the simulation differ from the live ones."""
    return 100 * abs(model.worker_s / real.worker_s - 1) if real.worker_s else 100.0


def goals_of(real: DayOutcome, model: DayOutcome, faults: Sequence[str]) -> list[Ratio]:
    """Worker-hours, attainment of each lane, and that nothing went wrong live."""
    found = [Ratio.held("elastic.day_hours", "day: worker-hours apart, %", apart_pct(real, model))]
    for lane in TARGETS:
        points = abs(real.within(lane) - model.within(lane))
        found.append(Ratio.held("elastic.day_slo", f"day: {lane} begun in time, points apart", points))
    return [*found, Ratio.none("day: answers with a fault", len(faults))]


def draw(found: Report, folder: Path) -> list[Path]:
    """Workers over the day, live and simulated, and the load."""
    (row,) = [each for each in found.rows if "curves" in each]
    hours = 24 / row["seconds"]
    series: dict[str, plots.Points] = {
        name: [(at * hours, value) for at, value in points] for name, points in row["curves"].items()
    }
    x, y = plots.Axis(title="hours of the day"), plots.Axis(title="workers")
    return plots.lines(folder / "elastic-day", "A day, live and simulated", series, x=x, y=y, marked=False)


def curves(real: DayOutcome, model: DayOutcome, rows: Sequence[TraceRow], seconds: float) -> dict[str, Any]:
    """What the plot shows, a point every hundredth of the day: workers, and slots that the load would fill."""
    width = seconds / 100
    load = [0.0] * 101
    for row in rows:
        load[int(row.at / width)] += row.answer * (STEP_S + SLOTS * TEXT_S) / SLOTS / width
    names = {"live": real.curve, "simulated": model.curve}
    found = {name: _thinned(curve, width) for name, curve in names.items()}
    return found | {"load: workers with all slots in use": [(n * width, value) for n, value in enumerate(load[:100])]}


def _thinned(curve: Sequence[tuple[float, int]], width: float) -> list[tuple[float, float]]:
    """The mean of each hundredth."""
    parts: dict[int, list[int]] = {}
    for at, count in curve:
        parts.setdefault(int(at / width), []).append(count)
    return [(place * width, fmean(counts)) for place, counts in sorted(parts.items())]
