"""Part `eta`: what waiting jobs are told, beside how long they waited, on real processes with the simulated engine.

Clients keep a steady backlog: each puts a job of random length, waits for its end and puts the next one. In the second
case, interactive jobs arrive beside them and go first. Watchers read waiting jobs again and again.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.penstock import MODEL, Penstock
from bench.program import ProgramRun, Testbed
from bench.report import Ratio, Report, columns
from penstock.client import AsyncPenstockClient
from penstock.client_protocol import Json

COLUMNS = columns("""
    case: case; jobs: jobs measured; waited_s: median wait, s; error_s: median absolute error, s .2;
    error: of the wait, %; before_s: before calibration, s .2; inside: in the band, %; below: sooner, %;
    above: later, %; width_s: band, s; looks: looks at waiting jobs; rises: rises of eta_ms
""")
NOTES = (
    "before calibration: the same error, of the jobs that were put before their process had measured 20 waits. "
    "in the band: waits between eta_low_ms and eta_high_ms, which should hold 80 %.",
    "rises: looks that showed a greater eta_ms than the one before, though no more jobs were ahead.",
    "Simulated engine: 8 slots, 10 ms a step, answers of 20 to 120 tokens; one worker, one API process, one scheduler.",
)
SETTINGS = {"sim.step_ms": 10, "sim.prefill_ms": 10, "sim.slots": 8}
WATCHERS = 4
WATCH_INTERVAL_S = 0.5
GREETING = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True, slots=True)
class EtaSize:
    clients: int = 150
    seconds: float = 150.0
    interactive_s: float = 1.0
    """Between two interactive jobs, in the mean, in the second case."""
    seed: int = 41


QUICK = EtaSize(clients=60, seconds=45.0)
CASES = {"one lane": False, "interactive jobs beside it": True}


@dataclass(slots=True)
class Waits:
    """What the jobs of one case were told and met, in seconds; and what watchers saw."""

    told: list[tuple[float, float | None, float | None, float]] = field(default_factory=list)
    """By job: estimate, low and high end of the band, measured wait."""
    looks: int = 0
    rises: int = 0

    def note(self, put: Json, ended: Json) -> None:
        """Compare the answer to a put with the ended job. A job without an estimate is left out."""
        if put["eta_ms"] is not None and ended["started_at"] is not None:
            low, high = (None if put[end] is None else put[end] / 1000 for end in ("eta_low_ms", "eta_high_ms"))
            self.told.append((put["eta_ms"] / 1000, low, high, ended["started_at"] - ended["created_at"]))


class Load:
    """The clients of one case."""

    def __init__(self, client: AsyncPenstockClient, size: EtaSize, *, interactive: bool) -> None:
        self._client, self._size, self._interactive = client, size, interactive
        self._random = random.Random(size.seed)  # noqa: S311 - a load
        self._ends = time.monotonic() + size.seconds
        self._waiting: dict[str, None] = {}
        """The jobs that were put and have not ended, oldest first."""
        self.waits = Waits()

    async def run(self) -> Waits:
        """Until every job has ended."""
        watching = [asyncio.create_task(self._watch()) for _ in range(WATCHERS)]
        chats = asyncio.create_task(self._chat()) if self._interactive else None
        await asyncio.gather(*(self._repeat() for _ in range(self._size.clients)))
        for task in (*watching, *([chats] if chats else ())):
            await task
        return self.waits

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._ends

    def _body(self, priority: str) -> Json:
        tokens = self._random.randint(20, 120)
        return GREETING | {"max_tokens": tokens, "queue": {"priority": priority}}

    async def _repeat(self) -> None:
        """One client: a job after the other."""
        await asyncio.sleep(self._random.uniform(0, 2))
        while not self._over:
            put = await self._client.submit(self._body("standard"))
            self._waiting[put["id"]] = None
            ended = await self._client.wait(put["id"])
            del self._waiting[put["id"]]
            self.waits.note(put, ended)

    async def _chat(self) -> None:
        while not self._over:
            await self._client.submit(self._body("interactive"))
            await asyncio.sleep(self._random.expovariate(1 / self._size.interactive_s))

    async def _watch(self) -> None:
        """Follow one waiting job after the other until it starts."""
        while not self._over:
            job_id = next(reversed(self._waiting), None)
            shown: Json | None = None
            while job_id is not None and not self._over:
                job = await self._client.get(job_id)
                if job["status"] != "queued" or job["eta_ms"] is None:
                    break
                self.waits.looks += 1
                if shown and job["eta_ms"] > shown["eta_ms"] and job["queue_position"] <= shown["queue_position"]:
                    self.waits.rises += 1
                shown = job
                await asyncio.sleep(WATCH_INTERVAL_S)
            await asyncio.sleep(WATCH_INTERVAL_S)


def measured(run: ProgramRun) -> Report:
    """Start processes, load them, show and keep."""
    size = QUICK if run.args.quick else EtaSize()
    rows: list[dict[str, Any]] = []
    with Testbed(run.console, "starting", len(CASES)) as testbed:
        for case, interactive in CASES.items():
            testbed.say(case)
            with _serving(testbed.room(case)) as url:
                rows.append({"case": case, **row_of(asyncio.run(_load(url, size, interactive=interactive)))})
            testbed.done()
    title = f"What waiting jobs are told, with {size.clients} of them at a time"
    rises = Ratio.none("one lane: rises of eta_ms while no more jobs are ahead", rows[0]["rises"])
    return run.keep(
        run.result("order-eta", title, COLUMNS, rows, () if run.args.quick else (rises,), NOTES, **asdict(size))
    )


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    with Penstock(folder, schedulers=1, settings=SETTINGS, config="min_workers = 1\nmax_workers = 1\n") as penstock:
        yield penstock.url


async def _load(url: str, size: EtaSize, *, interactive: bool) -> Waits:
    async with AsyncPenstockClient(url) as client:
        return await Load(client, size, interactive=interactive).run()


def row_of(waits: Waits) -> dict[str, Any]:
    """The figures of one case."""
    banded = [(eta, low, high, waited) for eta, low, high, waited in waits.told if low is not None and high is not None]
    early = [abs(eta - waited) for eta, low, _, waited in waits.told if low is None]
    if not banded:
        raise ValueError("no job was told a band: the run was too short")
    error_s = statistics.median(abs(eta - waited) for eta, _, _, waited in banded)
    waited_s = statistics.median(waited for *_, waited in banded)
    below = sum(waited < low for _, low, _, waited in banded)
    above = sum(waited > high for _, _, high, waited in banded)
    count = len(banded)
    return {
        "jobs": count,
        "waited_s": waited_s,
        "error_s": error_s,
        "error": 100 * error_s / waited_s if waited_s else 0.0,
        "before_s": statistics.median(early) if early else None,
        "inside": 100 * (count - below - above) / count,
        "below": 100 * below / count,
        "above": 100 * above / count,
        "width_s": statistics.median(high - low for _, low, high, _ in banded),
        "looks": waits.looks,
        "rises": waits.rises,
    }
