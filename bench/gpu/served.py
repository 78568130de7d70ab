"""Penstock in front of a GPU engine: closed loops direct and through it in turn, energy, and a killed worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.energy import Counters, counters_of, used
from bench.gpu.killed import STREAMS, KilledStreams, killed_streams
from bench.gpu.loads import ClosedLoad, Unanswered, as_rows, length_mix, served_text
from bench.gpu.tuned import tuned_frontier
from bench.gpu.upstream import NAME as PENSTOCK
from bench.gpu.upstream import SAMPLE_S, UpstreamPenstock
from bench.load.prompts import PromptSource
from bench.processes import Processes
from bench.program import Testbed
from bench.report import write
from bench.table1.client import ConcurrencyLevel, TargetServer, closed_loop
from planner.load import RequestLengths
from planner.search import quantile
from telemetry.gpu import GpuReadings

DIRECT = "direct"
TURNS = (DIRECT, PENSTOCK, PENSTOCK, DIRECT)
"""A drift of the machine that is steady over four turns cancels out; both of Penstock's lie in one window of energy."""
FIELDS = {"temperature": 0}
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 240.0, 120.0
RECORDS_S = 3.0
"""Until the records of a load are on the disk."""


class ServedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and how it is loaded."""

    model: str = "opt-1.3b"
    device: str = "cuda"
    slots: int = 64
    context: int = 1024
    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompts: tuple[int, int] = (128, 384)
    answers: tuple[int, int] = (64, 192)
    """Tokens, evenly between, in all combinations."""
    rounds: int = 6
    """Requests of each client."""
    least: int = 20
    """Requests of a load at least."""
    killed_tokens: int = 600
    """Of each answer whose worker is killed."""
    tune: tuple[str, ...] = ("--requests", "32", "--repeats", "1", "--budget", "90s")

    @property
    def lengths(self) -> RequestLengths:
        """Of the requests of a load."""
        return length_mix(self.prompts, self.answers)


QUICK = ServedOptions(
    model="tiny", device="cpu", slots=8, levels=(1, 2, 4, 8), prompts=(16, 48), answers=(8, 24), rounds=4, least=24,
    killed_tokens=60, tune=("--requests", "8", "--repeats", "1", "--budget", "5m"),
)  # fmt: skip


class LevelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What one closed loop cost, beside its requests."""

    clients: int
    tokens: int
    seconds: float
    itl_p50_s: float
    itl_p99_s: float
    """Between two pieces of an answer; those that come together have none between them."""
    penstock_cpu_s: float
    """Of all its processes, in the direct turns too: what it takes with nothing to do."""
    engine_cpu_s: float
    client_cpu: float
    """Share of a core that the load generator took."""
    joules: float | None
    """By NVML; None: the driver tells none."""


class ServedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """All levels once, one way."""

    way: str
    requests: list[list[float]]
    """As `as_rows` of bench/frontier has them."""
    costs: list[LevelCosts]


class EnergyReadings(msgspec.Struct, frozen=True, kw_only=True):
    """Joules of one window around both turns through Penstock, as three readers have them."""

    seconds: float
    tokens: int
    nvml_j: float | None
    metric_j: float | None
    """By penstock_gpu_energy_joules."""
    report_j: float | None
    report_j_token: float | None
    """By `penstock report`."""


class ServedMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run has measured."""

    device: str
    options: ServedOptions
    logits_off_by: float
    turns: list[ServedTurn]
    energy: EnergyReadings
    tuned: dict[str, Any]
    """What `penstock tune frontier` said of Penstock."""
    killed: KilledStreams


def measured(options: ServedOptions, device: str, off_by: float, stage: Testbed, raw: Path) -> ServedMeasurement:
    """`raw` is a file for what is measured so far: time on a GPU is scarce, and what fails later must not cost it.

    Raises Died, NotAServer, Unanswered, CalledProcessError, TimeoutError.
    """
    stage.say("starting the engine")
    with (
        _engine(options, "graphs", stage) as (engine, direct),
        UpstreamPenstock(stage.room("penstock"), _url(direct), options.model, options.slots) as penstock,
    ):
        turns, energy = _turns(_Loads(options, engine, direct, penstock, stage))
        write(raw, {"device": device, "options": options, "turns": turns, "energy": energy})
        stage.say("penstock tune frontier")
        words = (*options.tune, "--max", str(options.levels[-1]))
        tuned = tuned_frontier(penstock.target, options.lengths, stage.folder, words)
        stage.done()
    stage.say("starting the engine again, in one size of steps")
    with (
        _engine(options, "exact", stage) as (_, direct),
        UpstreamPenstock(stage.room("killed"), _url(direct), options.model, options.slots) as penstock,
    ):
        stage.say("killing the worker")
        killed = killed_streams(direct, penstock, options.killed_tokens, min(STREAMS, options.slots))
        stage.done()
    return ServedMeasurement(
        device=device, options=options, logits_off_by=off_by, turns=turns, energy=energy, tuned=tuned, killed=killed
    )


def measurements(options: ServedOptions) -> int:
    """How many steps of progress `measured` makes."""
    return len(TURNS) * len(options.levels) + 2


@contextmanager
def _engine(options: ServedOptions, kind: str, stage: Testbed) -> Iterator[tuple[Processes, TargetServer]]:
    """The engine's server, once it is warm. Raises Died."""
    with Processes(stage.room("engine", kind)) as processes:
        words = (options.model, options.device, f"{options.slots}", f"{options.context}", kind)
        port = processes.serve("engine", "bench.gpu.server", *words, seconds=START_TIMEOUT_S)
        yield processes, TargetServer.at(f"http://127.0.0.1:{port}/v1", options.model, name=DIRECT)


def _url(server: TargetServer) -> str:
    return f"http://{server.host}:{server.port}{server.path}"


class _Loads:
    """Loads of one engine, direct and through the Penstock in front of it."""

    def __init__(
        self,
        options: ServedOptions,
        engine: Processes,
        direct: TargetServer,
        penstock: UpstreamPenstock,
        stage: Testbed,
    ) -> None:
        self.options, self.penstock, self._engine, self._stage = options, penstock, engine, stage
        self._servers = {DIRECT: direct, PENSTOCK: penstock.target}
        self.gpus = GpuReadings.open()

    def joules(self) -> Counters:
        return self.gpus.joules() if self.gpus is not None else {}

    def warm_up(self) -> None:
        """All clients once, each way. Raises Unanswered."""
        most = self.options.levels[-1]
        for way in self._servers:
            self._load(way, most, self._source(way, 0).bodies(most, FIELDS))

    def turn(self, way: str, number: int) -> ServedTurn:
        """All levels once; turns of one number have the same prompts. Raises Unanswered."""
        source, loads, costs = self._source(way, number), [], []
        for clients in self.options.levels:
            self._stage.say(f"{way}: {clients} at once")
            bodies = source.bodies(max(self.options.least, self.options.rounds * clients), FIELDS)
            before = self.joules(), self.penstock.cpu_s(), sum(self._engine.cpu_s().values())
            level = self._load(way, clients, bodies)
            after = self.joules(), self.penstock.cpu_s(), sum(self._engine.cpu_s().values())
            cpu = (after[1] - before[1], after[2] - before[2])
            costs.append(_costs(level, cpu, used(before[0], after[0])))
            texts = sorted(level.answers, key=lambda answer: answer.sent)
            loads.append(ClosedLoad(clients, [served_text(each) for each in texts]))
            self._stage.done()
        return ServedTurn(way=way, requests=as_rows(loads), costs=costs)

    def _source(self, way: str, number: int) -> PromptSource:
        return PromptSource(self._servers[way], self.options.lengths, seed=number, chats=False)

    def _load(self, way: str, clients: int, bodies: Sequence[bytes]) -> ConcurrencyLevel:
        server = self._servers[way]
        level = asyncio.run(closed_loop(server, clients, bodies, REQUEST_TIMEOUT_S, lambda: None))
        if faults := {answer.fault for answer in level.answers if answer.fault}:
            raise Unanswered(f"{way}, {clients} at once: {', '.join(sorted(faults))}")
        return level


def _costs(level: ConcurrencyLevel, cpu_s: tuple[float, float], joules: float | None) -> LevelCosts:
    gaps = sorted(after - before for answer in level.answers for before, after in pairwise(answer.times))
    return LevelCosts(
        clients=level.streams,
        tokens=sum(answer.tokens for answer in level.answers),
        seconds=level.seconds,
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        penstock_cpu_s=cpu_s[0],
        engine_cpu_s=cpu_s[1],
        client_cpu=level.own_cpu,
        joules=joules,
    )


def _turns(loads: _Loads) -> tuple[list[ServedTurn], EnergyReadings]:
    """All turns, and the energy of those through Penstock."""
    loads.warm_up()
    found = [loads.turn(TURNS[0], 1)]
    begin = _reading(loads)
    found += [loads.turn(way, number) for number, way in enumerate(TURNS[1:3], 1)]
    end = _reading(loads)
    found.append(loads.turn(TURNS[3], 2))
    tokens = sum(each.tokens for turn in found if turn.way == PENSTOCK for each in turn.costs)
    time.sleep(max(0.0, RECORDS_S + end[0] - time.time()))
    # The reading that was waited for is some hundredths of a second older than the moment that it was seen.
    usage = loads.penstock.report(begin[0] - SAMPLE_S / 2, end[0])["figures"]["usage"]
    report = usage["energy"] or {}
    return found, EnergyReadings(
        seconds=end[0] - begin[0],
        tokens=tokens,
        nvml_j=used(begin[1], end[1]),
        metric_j=used(begin[2], end[2]),
        report_j=report.get("joules"),
        report_j_token=report.get("joules_per_token"),
    )


def _reading(loads: _Loads) -> tuple[float, Counters, Counters]:
    """The moment at which Penstock's counters have just been read anew, in Unix seconds; NVML's then, and its own."""
    target, until = loads.penstock.target, time.monotonic() + 5 * SAMPLE_S
    first = found = counters_of(target)
    while first and found == first and time.monotonic() < until:
        time.sleep(0.02)
        found = counters_of(target)
    return time.time(), loads.joules(), found
