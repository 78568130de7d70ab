"""`penstock report`: what happened in a time window, where time went, and what to change first, from the records."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
import msgspec

from cli.deployment import load_deployment
from cli.errors import DONE, FAILED, INTERRUPTED, USAGE, Problem
from cli.instance import DataDir
from cli.options import TIME_HINT, Command, Where, config_option, json_option, moment, where_options
from cli.output import note, print_json
from cli.progress import ProgressLine
from cli.report_view import compared, emit_styled, shown
from penstock.files import write_file
from telemetry.records.schema import RecordSettings
from telemetry.report.page import page
from telemetry.report.report import RequestReport, Scope, report_of

WHOLE = "FROM..TO, or a folder of records"
READING = "reading records"


@click.command(cls=Command)
@click.option("--since", help="Begin so long ago: 15m, 2h, 7d [1h].")
@click.option("--from", "start", help="Begin at this time (UTC), or so long ago.")
@click.option("--to", "end", help="End at this time (UTC), or so long ago [now].")
@click.option("--model", default="", help="Only this model.")
@click.option("--lane", default="", help="Only this lane.")
@click.option("--tenant", default="", help="Only this tenant.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@click.option("--compare", nargs=2, metavar="A B", help=f"Compare two windows; each is {WHOLE}.")
@config_option
@where_options(url=False)
@json_option
def report(
    since: str | None,
    start: str | None,
    end: str | None,
    model: str,
    lane: str,
    tenant: str,
    html: Path | None,
    compare: tuple[str, str] | None,
    config: Path | None,
    where: Where,
    as_json: bool,
) -> int:
    """Say what happened, where the time went and what to change first, from the records of this machine.

    Records are lines on the local disk, which every process keeps; see docs/records.md.
    """
    folder, prices = source(where, config)
    now = time.time()
    only = {"model": model, "lane": lane, "tenant": tenant}
    if compare is not None:
        if since or start or end or html:
            raise Problem("--compare has its own windows", next_step="leave out --since, --from, --to and --html",
                          exit_code=USAGE)  # fmt: skip
        pair = [_made(*window(each, folder, now, only), prices, quiet=as_json) for each in compare]
        if as_json:
            print_json({name: msgspec.to_builtins(each) for name, each in zip("ab", pair, strict=True)})
        else:
            emit_styled(*compared(pair[0], pair[1], compare))
        return _exit_code(*pair)
    if since and start:
        raise Problem("--since and --from both say when to begin", next_step="leave one out", exit_code=USAGE)
    scope = Scope(moment(start or since or "1h", now), moment(end, now) if end else now, **only)
    found = _made(folder, scope, prices, quiet=as_json)
    if html is not None:
        _save(html, found)
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif html is None:
        emit_styled(*shown(found))
    if not found.figures.whole.requests and not as_json:
        note(f"no request ended in this window, by the records in {folder}")
    return _exit_code(found)


def _exit_code(*found: RequestReport) -> int:
    return INTERRUPTED if any(each.interrupted for each in found) else DONE


def source(where: Where, config: Path | None) -> tuple[Path, Mapping[str, float]]:
    """The folder of records, and what a worker of each model costs in an hour. Raises ConfigError, Problem."""
    deployment = load_deployment(where.flags, os.environ, Path.cwd(), config)
    settings = deployment.config.section("records", RecordSettings)
    folder = Path(settings.dir) if settings.dir else DataDir(deployment.up.data_dir).records
    if not folder.is_dir():
        why = "records are switched off (records.enabled)" if not settings.enabled else "nothing has run here yet"
        raise Problem(f"there are no records in {folder}", cause=why, next_step="penstock up", exit_code=FAILED)
    return folder, {name: model.cost_per_hour for name, model in deployment.models.items() if model.cost_per_hour}


def window(text: str, folder: Path, now: float, only: Mapping[str, str]) -> tuple[Path, Scope]:
    """One side of a comparison: all records of a folder, or a window of this one. Raises Problem."""
    if Path(text).is_dir():
        return Path(text), Scope(0.0, math.inf, **only)
    first, dots, last = text.partition("..")
    if not dots:
        raise Problem(f"--compare {text}: no folder and no window", next_step=f"write {WHOLE}; {TIME_HINT}",
                      exit_code=USAGE)  # fmt: skip
    return folder, Scope(moment(first, now), moment(last, now) if last else now, **only)


def _made(folder: Path, scope: Scope, prices: Mapping[str, float], *, quiet: bool) -> RequestReport:
    if scope.until <= scope.since:
        raise Problem("the window ends before it begins", next_step=TIME_HINT, exit_code=USAGE)
    try:
        with ProgressLine(sys.stderr, os.environ, quiet=quiet, delay_s=1.0) as progress:
            progress.phase(READING)
            return report_of(folder, scope, prices, partial(progress.amount, READING))
    except OSError as error:
        raise Problem(f"{folder} cannot be read", cause=error.strerror or str(error), exit_code=FAILED) from error


def _save(path: Path, found: RequestReport) -> None:
    try:
        write_file(path, page(found).encode())
    except OSError as error:
        raise Problem(f"{path} cannot be written", cause=error.strerror or str(error), exit_code=FAILED) from error
    note(f"written to {path}")
