"""`penstock tune goodput`: bisects the highest rate of requests that a server answers within the objectives."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import click

from cli.options import Where, where_options
from cli.output import DONE, INTERRUPTED, note
from cli.progress import ProgressLine
from cli.scale import Period
from cli.tune.load import LoadSource, check, server_at
from planner.commands.answers import PlanAnswer, PlanTable, seconds, three
from planner.commands.inputs import LENGTHS, SLO, plan_command
from planner.commands.tuning import goodput_words, kept
from planner.facts.catalogue import PlanError
from planner.goodput import highest_rate
from planner.load import RequestLengths
from planner.search import Attainment, LatencySlo
from planner.tuning import SweepLevel

CLIENTS = 16
"""Of the closed loop whose throughput the search begins with."""
RATES = 8
"""About so many are measured."""
PRECISION = 0.1
"""Relative width at which the bisection ends; single rates are noisy."""


class SearchEnded(Exception):
    """Raised to end a search before its end, with the reason in words."""


@plan_command("goodput", LENGTHS, SLO)
@where_options(url=False)
@click.option("--url", help="Base URL of another server, such as http://127.0.0.1:8080/v1.")
@click.option("--model", help="Model to ask for [the first that the server names].")
@click.option("--requests", type=int, default=100, show_default=True, help="Requests of a rate.")
@click.option("--budget", type=Period(needs_unit=True), default="15m", show_default=True, help="Time for all of it.")
def goodput(
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
    with ProgressLine(sys.stderr, os.environ) as progress:
        progress.phase("warming up: 1 request")
        asyncio.run(source.probe(1))
        progress.phase("probing: 1 request")
        alone_s = asyncio.run(source.probe(1))
        told = partial(progress.amount, f"probing: {CLIENTS} requests at once")
        closed = asyncio.run(source.level(SweepLevel(CLIENTS, max(2 * CLIENTS, requests // 2)), told))
    check(closed)
    note(f"{CLIENTS} at once are answered at {three(closed.requests_s)} requests/s; about "
         f"{seconds(RATES * requests / closed.requests_s)} for {RATES} rates, at most {budget} s")  # fmt: skip
    tried: dict[float, Attainment] = {}
    progress = ProgressLine(sys.stderr, os.environ)

    def holds(rate: float) -> bool:
        if time.monotonic() > until:
            raise SearchEnded("The budget ended the search: more may hold.")
        if requests / rate < alone_s:
            raise SearchEnded(
                f"{requests} requests of {seconds(alone_s)} tell of no higher rate: more --requests would."
            )

        def told(done: int, total: int) -> None:
            detail = f"{three(rate)} requests/s: {done} of {total}"
            progress.amount("measuring", min(len(tried), RATES - 1), RATES, detail)

        told(0, requests)
        reading = asyncio.run(source.at_rate(rate, requests, told))
        if reading.failed:
            asyncio.run(source.probe(1))  # a server that has died keeps no rate, and that says nothing of rates
        tried[rate] = kept(reading, slo)
        progress.say(f"  {three(rate)} requests/s: {100 * tried[rate].both:.0f} % keep both")
        return tried[rate].both >= slo.share

    exit_code = DONE
    try:
        with progress:
            found, ended = highest_rate(holds, closed.requests_s / 2, PRECISION), ""
    except (SearchEnded, KeyboardInterrupt) as end:
        found = max((rate for rate, each in tried.items() if each.both >= slo.share), default=0.0)
        ended = str(end)
        if isinstance(end, KeyboardInterrupt):
            ended, exit_code = "The search was interrupted: more may hold.", INTERRUPTED
    value = {
        "url": url, "model": server.model, "in": lengths.prompt, "out": lengths.answer,
        "ttft_ms": 1e3 * slo.ttft_s, "tpot_ms": 1e3 * slo.tpot_s, "share": slo.share,
        "requests_s": found, "is_bisected": not ended, "closed_loop_requests_s": closed.requests_s,
        "rates": [{"requests_s": rate, "kept_both": each.both, "kept_ttft": each.ttft, "kept_tpot": each.tpot}
                  for rate, each in sorted(tried.items())],
    }  # fmt: skip
    rows = [
        (three(rate), f"{100 * each.both:.0f} %", f"{100 * each.ttft:.0f} %", f"{100 * each.tpot:.0f} %")
        for rate, each in sorted(tried.items())
    ]
    header = ("requests/s", "keep both", "first token", "further tokens")
    tables = [PlanTable(header, rows)] if rows else []
    return PlanAnswer(value, tables, goodput_words(found, tried, slo, ended), exit_code=exit_code)
