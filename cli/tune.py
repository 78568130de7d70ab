"""`penstock tune`: measures a running server and says which settings it should have.

`frontier` measures it over concurrency, finds the knee, and says which batch to set; `goodput` bisects the highest rate
of requests that it answers within the objectives. Both send requests of given lengths, in a closed loop or at a rate.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

import click

from bench.energy import EnergyMeter, used
from bench.load.prompts import PromptSource
from bench.load.target import HttpConnection, NotAServer, TargetServer, TimedAnswer, ask, closed_loop, seen
from cli.client import KEY, Client
from cli.options import DATA_DIR, REDIS_URL, Period, Where
from cli.output import Exit, Problem, ProgressLine, note
from penstock.text import counted, percent
from planner import tuning
from planner.answers import PlanAnswer, PlanTable, seconds, three
from planner.facts.catalogue import PlanError
from planner.goodput import highest_rate
from planner.load import LatencySlo, RequestLengths
from planner.options import LENGTHS, SLO, WORKLOAD, OptionGroup, device_named, model_named, plan_command
from planner.search import Attainment
from planner.trace import Workload
from telemetry.gpu import GpuReadings

SEED = 1
TIMEOUT_S = 600.0
"""Of one request."""
MAX_OPEN = 1024
"""Requests at once of a rate; more are counted as failed."""
MAX_FAILED = 0.1
"""Share of failed requests from which a measurement counts for nothing."""

URL = click.Option(["--url"], help="Base URL of another server, such as http://127.0.0.1:8080/v1.")
SERVER = OptionGroup("where", [DATA_DIR, REDIS_URL, URL], Where)
NO_METER = EnergyMeter(dict, "")

T = TypeVar("T")


def run_until(until: float, task: Coroutine[Any, Any, T]) -> T | None:
    """Run it, or give it up at a moment of time.monotonic(): then None."""

    async def in_time() -> T:
        async with asyncio.timeout(until - time.monotonic()):
            return await task

    try:
        return asyncio.run(in_time())
    except TimeoutError:
        return None


def server_at(where: Where, model: str | None) -> tuple[str, TargetServer]:
    """The server of --url, else the Penstock that other commands would ask, by its base URL; with the first of its
    models unless one is named. Raises Problem."""
    url, key = where.url, os.environ.get(KEY, "")
    if url is None:
        with Client.find(replace(where, url=os.environ.get("PENSTOCK_URL"))) as client:
            url, key = f"{client.url}/v1", client.key
    note(f"asking {url} for its model")
    try:
        server = TargetServer.at(url, model or "", key)
        return url, server if server.model else replace(server, model=server.first_model())
    except NotAServer as error:
        raise Problem(str(error), code="usage") from None
    except OSError as error:
        what, next_step = f"nothing answers at {url}", "penstock up, or another --url"
        raise Problem(what, cause=str(error), next_step=next_step, code="unreachable") from None


def penstock_context(server: TargetServer) -> int | None:
    """The context that a Penstock tells of its model, 0 if it tells none; None: it is no Penstock."""
    try:
        models = server.get(f"{server.path}/models")["data"]
        mine = [each for each in models if each.get("id") == server.model and each.get("owned_by") == "penstock"]
        return int(mine[0].get("context_length") or 0) if mine else None
    except (NotAServer, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


Told: TypeAlias = Callable[[int, int], None]
"""Called with the number of answers so far, and of all."""


class LoadSource:
    """Requests of one length mix to one server. Each prompt begins differently, so that no cached prefix answers it."""

    def __init__(
        self, server: TargetServer, lengths: RequestLengths, timeout_s: float, meter: EnergyMeter = NO_METER
    ) -> None:
        """`timeout_s`: of a request, at most TIMEOUT_S; a server that hangs must not outlast the budget by far."""
        self.server, self.lengths, self.meter = server, lengths, meter
        self._timeout_s = min(TIMEOUT_S, timeout_s)
        self._prompts = PromptSource(server, lengths, SEED)
        self._random = random.Random(SEED)  # noqa: S311 - a workload
        self._fields: dict[str, object] = {"temperature": 0, "ignore_eos": True}

    async def probe(self, clients: int) -> float:
        """Mean seconds of a request, of `clients` at once. Raises Problem if they fail.

        A server that refuses the field `ignore_eos` gets requests without it, whose answers may end early.
        """
        found = await self.level(tuning.SweepLevel(clients, clients))
        if "ignore_eos" in self._fields and "status 4" in found.fault:
            del self._fields["ignore_eos"]
            found = await self.level(tuning.SweepLevel(clients, clients))
        check(found)
        return found.latency_s

    async def level(self, level: tuning.SweepLevel, told: Told = lambda _so_far, _all: None) -> tuning.LevelReading:
        """So many clients, each asking again as soon as it is answered."""
        bodies = self._prompts.bodies(level.requests, self._fields)
        before, answered = self.meter.read(), count(1)
        told(0, len(bodies))
        found = await closed_loop(
            self.server, level.clients, bodies, self._timeout_s, lambda: told(next(answered), len(bodies))
        )
        reading = _reading(level.clients, found.asked, found.answers, found.seconds)
        return replace(reading, joules=used(before, self.meter.read()))

    async def at_rate(self, rate: float, requests: int, told: Told = lambda _so_far, _all: None) -> tuning.LevelReading:
        """Requests with exponential gaps, whether or not earlier ones are answered."""
        open_, idle, answers = 0, list[HttpConnection](), list[TimedAnswer]()
        due = began = time.monotonic()

        async def one(body: bytes) -> None:
            nonlocal open_
            if open_ >= MAX_OPEN:
                answers.append(TimedAnswer(time.monotonic(), [], 0, "too many requests at once"))
                return
            open_ += 1
            line = idle.pop() if idle else HttpConnection(self.server)
            answer = await ask(line, body, 0, self._timeout_s)
            open_ -= 1
            line.close() if answer.fault else idle.append(line)
            answers.append(seen(answer))
            told(len(answers), requests)

        async with asyncio.TaskGroup() as tasks:
            for body in self._prompts.bodies(requests, self._fields):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(one(body))
                due += self._random.expovariate(rate)
        for line in idle:
            line.close()
        return _reading(0, requests, answers, time.monotonic() - began)


def check(found: tuning.LevelReading) -> None:
    """Raises Problem if too many requests failed."""
    if found.failed > MAX_FAILED * found.requests:
        next_step = "see the log of the server; --url is the base URL of OpenAI's API"
        raise Problem(f"{found.failed} of {found.requests} requests failed", cause=found.fault, next_step=next_step)


def _reading(clients: int, asked: int, answers: Sequence[TimedAnswer], seconds: float) -> tuning.LevelReading:
    good = [answer for answer in answers if not answer.fault]
    latency = fmean(answer.times[-1] - answer.sent for answer in good) if good else 0.0
    tokens, times = sum(answer.tokens for answer in good), [(answer.ttft, answer.tpot or 0.0) for answer in good]
    fault = next((answer.fault for answer in answers if answer.fault), "")
    return tuning.LevelReading(
        clients, asked, asked - len(good), tokens / seconds, len(good) / seconds, latency, seconds, times, fault
    )


CLIENTS = 16
"""Of the closed loop whose throughput the search begins with."""
RATES = 8
"""About so many are measured."""
PRECISION = 0.1
"""Relative width at which the bisection ends; single rates are noisy."""


class SearchEnded(Exception):
    """Raised to end a search before its end, with the reason in words."""


@plan_command("goodput", SERVER, LENGTHS, SLO)
@click.option("--model", help="Model to ask for [the first that the server names].")
@click.option("--requests", type=int, default=100, show_default=True, help="Requests of a rate.")
@click.option("--budget", type=Period(needs_unit=True), default="15m", show_default=True, help="Time for all of it.")
def goodput_command(
    where: Where, model: str | None, requests: int, lengths: RequestLengths, slo: LatencySlo, budget: int
) -> PlanAnswer:
    """Find the highest rate at which enough requests keep both latency objectives.

    \b
    Examples:
      penstock tune goodput --ttft-ms 500
    """
    if requests < 10:
        raise PlanError(f"--requests {requests}: a share of 0.9 needs 10 requests or more")
    url, server = server_at(where, model)
    source, until = LoadSource(server, lengths, timeout_s=budget), time.monotonic() + budget
    with ProgressLine() as progress:
        progress.phase("warming up: 1 request")
        asyncio.run(source.probe(1))
        progress.phase("probing: 1 request")
        alone_s = asyncio.run(source.probe(1))
        told = partial(progress.amount, f"probing: {CLIENTS} requests at once")
        closed = asyncio.run(source.level(tuning.SweepLevel(CLIENTS, max(2 * CLIENTS, requests // 2)), told))
    check(closed)
    note(f"{CLIENTS} at once are answered at {three(closed.requests_s)} requests/s; about "
         f"{seconds(RATES * requests / closed.requests_s)} for {RATES} rates, at most {budget} s")  # fmt: skip
    tried: dict[float, Attainment] = {}
    progress = ProgressLine()

    def holds(rate: float) -> bool:
        if time.monotonic() > until:
            raise SearchEnded("The budget ended the search: more may hold.")
        if requests / rate < alone_s:
            told_of = f"{requests} requests of {seconds(alone_s)}"
            raise SearchEnded(f"{told_of} tell of no higher rate: more --requests would.")

        def told(done: int, total: int) -> None:
            detail = f"{three(rate)} requests/s: {done} of {total}"
            progress.amount("measuring", min(len(tried), RATES - 1), RATES, detail)

        told(0, requests)
        reading = asyncio.run(source.at_rate(rate, requests, told))
        if reading.failed:
            asyncio.run(source.probe(1))  # a server that has died keeps no rate, and that says nothing of rates
        tried[rate] = reading.kept(slo)
        progress.say(f"  {three(rate)} requests/s: {100 * tried[rate].both:.0f} % keep both")
        return tried[rate].both >= slo.share

    exit_code = Exit.DONE
    try:
        with progress:
            found, ended = highest_rate(holds, closed.requests_s / 2, PRECISION), ""
    except (SearchEnded, KeyboardInterrupt) as end:
        found = max((rate for rate, each in tried.items() if each.both >= slo.share), default=0.0)
        ended = str(end)
        if isinstance(end, KeyboardInterrupt):
            ended, exit_code = "The search was interrupted: more may hold.", Exit.INTERRUPTED
    value = {
        "url": url, "model": server.model, "in": lengths.prompt, "out": lengths.answer,
        "ttft_ms": 1e3 * slo.ttft_s, "tpot_ms": 1e3 * slo.tpot_s, "share": slo.share,
        "requests_s": found, "is_bisected": not ended, "closed_loop_requests_s": closed.requests_s,
        "rates": [{"requests_s": rate, **each.value} for rate, each in sorted(tried.items())],
    }  # fmt: skip
    rows = [(three(rate), *map(percent, (each.both, each.ttft, each.tpot))) for rate, each in sorted(tried.items())]
    header = ("requests/s", "keep both", "first token", "further tokens")
    tables = [PlanTable(header, rows)] if rows else []
    return PlanAnswer(value, tables, tuning.goodput_words(found, tried, slo, ended), exit_code=exit_code)


PROBE_CLIENTS = 4
MAX_CLIENTS = 256
MIN_LEVELS = 2
"""Without two concurrencies there is no knee."""
FLAT, BUDGET, FAILURES = "flat", "the budget ended", "too many requests failed"
STOPPED = "it was interrupted"
"""Why a pass ended before its last level."""


@dataclass(frozen=True, slots=True)
class MeasuredSweep:
    """All readings by concurrency, and the concurrencies that are missing, with the cause."""

    readings: Mapping[int, Sequence[tuning.LevelReading]]
    left_out: tuple[int, ...] = ()
    cause: str = ""
    interrupted: bool = False


@plan_command("frontier", SERVER, WORKLOAD)
@click.option("--model", help="Model to ask for [the first that the server names].")
@click.option("--requests", type=int, default=500, show_default=True, help="Requests of a concurrency, at most.")
@click.option("--max", "most", type=int, default=MAX_CLIENTS, show_default=True, help="Highest concurrency.")
@click.option("--repeats", type=int, default=tuning.MAX_REPEATS, show_default=True, help="Passes, at most.")
@click.option("--budget", type=Period(needs_unit=True), default="15m", show_default=True, help="Time for all of it.")
@click.option("--card", metavar="NAME", help="Its shape, as `penstock plan` knows it; with --gpu: replicas, too.")
@click.option("--config", type=click.Path(path_type=Path), help="Its own config.json or GGUF instead of --card.")
@click.option("--gpu", metavar="NAME", help="The GPU that it runs on.")
def frontier_command(
    where: Where,
    model: str | None,
    requests: int,
    workload: Workload,
    most: int,
    repeats: int,
    budget: int,
    card: str | None,
    config: Path | None,
    gpu: str | None,
) -> PlanAnswer:
    """Measure throughput and latency over concurrency, and say which batch to set.

    \b
    Examples:
      penstock tune frontier --requests 60
      penstock tune frontier --workload mine.csv
    """
    if requests < 2 or most < 2 or repeats < 1:
        given = f"--requests {requests} --max {most} --repeats {repeats}"
        raise PlanError(f"{given}: whole numbers from 2, and --repeats from 1")
    known = None if card is None and config is None else model_named(card, config)
    device = None if gpu is None else device_named(gpu)
    url, server = server_at(where, model)
    context = penstock_context(server)
    lengths, meter = workload.lengths, EnergyMeter.of(server, GpuReadings.open())
    source = LoadSource(server, lengths, meter=meter, timeout_s=budget)
    began = time.monotonic()
    with ProgressLine() as progress:
        plan = planned(source, requests, most, began + budget, workload.requests, progress)
        levels = ", ".join(str(each.clients) for each in plan.levels)
        progress.say(
            f"measuring {server.model} with {levels} requests at once: about {seconds(plan.expected_s)} a pass, up to "
            f"{repeats} passes, at most {budget} s" + (f" ({plan.note})" if plan.note else "")
        )
        sweep = measured(source, plan, repeats, began + budget, progress)
    found = tuning.frontier_of(sweep.readings, Random(1), sweep.left_out, sweep.cause)  # noqa: S311 - a bootstrap
    wanted = tuning.recommend(found, lengths, known, device, context or 0)
    value = tuning.frontier_json(found, wanted, sweep.readings) | {
        "url": url, "model": server.model, "in": lengths.prompt, "out": lengths.answer,
        "workload": workload.name or None, "energy_source": meter.source or None,
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    notes = [*tuning.frontier_notes(found, wanted), *tuning.power_note(sweep.readings, device, len(meter.read()))]
    if context is not None and not wanted.withheld:
        notes += tuning.settings_lines(server.model, wanted)
    exit_code = Exit.INTERRUPTED if sweep.interrupted else Exit.DONE
    advice, plot = tuning.tuning_advice(found, wanted), tuning.frontier_plot(found)
    return PlanAnswer(value, [tuning.frontier_table(found)], advice, plot, notes, exit_code)


def planned(
    source: LoadSource, requests: int, most: int, until: float, protocol: int, progress: ProgressLine
) -> tuning.SweepPlan:
    """Probe the server, and plan a sweep for the rest of the budget. Raises Problem if it does not answer in time, and
    PlanError if the shortest pass takes longer than what is left."""

    def probed(count: int, name: str) -> float:
        progress.phase(f"{name}: {counted(count, 'request')} at once")
        found = run_until(until, source.probe(count))
        if found is None:
            raise Problem("the budget ended before the server had answered the probes", next_step="a larger --budget")
        return found

    clients = min(PROBE_CLIENTS, most)
    probed(1, "warming up")
    line = tuning.line_of(probed(1, "probing"), clients, probed(clients, "probing"))
    return tuning.sweep_plan(line, requests, most, until - time.monotonic(), protocol)


def measured(
    source: LoadSource, plan: tuning.SweepPlan, repeats: int, until: float, progress: ProgressLine
) -> MeasuredSweep:
    """Pass over the levels until the knee is sure, `repeats` are done, or the next pass would take too long.

    The first pass ends where throughput is flat; later ones repeat its levels. A level whose requests fail, or that
    still runs when the budget ends, ends the measurement; what was measured before counts, if it is two levels or more.
    Raises Problem otherwise. Ctrl-C ends it like the budget.
    """
    found: defaultdict[int, list[tuning.LevelReading]] = defaultdict(list)
    levels, left_out, cause = plan.levels, plan.left_out, BUDGET

    def one_pass(name: str) -> str:
        """Measure each level once more; why the pass ended before the last of them, or ""."""
        for at, level in enumerate(levels):
            began, said = time.monotonic(), ""

            def told(done: int, total: int) -> None:
                nonlocal said
                rate = f", {three(done / (time.monotonic() - began))} requests/s" if done else ""  # noqa: B023
                said = f"{level.clients} at once: {done} of {total} requests{rate}"  # noqa: B023
                progress.amount(name, at, len(levels), said)  # noqa: B023

            try:
                reading = run_until(until, source.level(level, told))
                if reading is not None:
                    check(reading)
            except (KeyboardInterrupt, Problem) as error:
                fault = error.cause if isinstance(error, Problem) else ""
                progress.say(f"  {level.clients} at once: {error} ({fault})" if fault else f"  {said}")
                if len(found) < MIN_LEVELS:
                    raise
                return FAILURES if fault else STOPPED
            if reading is None and len(found) < MIN_LEVELS:
                what = f"the budget ended before {MIN_LEVELS} concurrencies were measured"
                raise Problem(what, next_step="a larger --budget, or fewer --requests")
            if reading is None:
                return BUDGET
            found[level.clients].append(reading)
            progress.say(f"  {level.clients} at once: {three(reading.tokens_s)} tokens/s")
            if len(found[1]) == 1 and tuning.is_flat({each: ones[0].tokens_s for each, ones in found.items()}):
                return FLAT
        return ""

    for number in range(repeats):
        began = time.monotonic()
        ended = one_pass(f"pass {number + 1}")
        if number == 0:
            missing = tuple(level.clients for level in levels if level.clients not in found)
            left_out = () if ended == FLAT else (*missing, *plan.left_out)
            cause = ended or BUDGET
        levels = tuple(level for level in levels if level.clients in found)
        rates = {each: [one.tokens_s for one in ones] for each, ones in found.items()}
        if ended in (BUDGET, FAILURES, STOPPED) or 2 * time.monotonic() - began > until:
            break
        if tuning.is_settled(rates, Random(1)):  # noqa: S311 - a bootstrap
            break
    return MeasuredSweep(dict(found), left_out, cause if left_out else "", interrupted=ended == STOPPED)
