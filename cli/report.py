"""`penstock report`: what happened in a time window, where time went, and what to change first, from the records."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.console import Group as Stack
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cli.deployment import load_deployment
from cli.instance import DataDir
from cli.options import TIME_HINT, Where, command, config_option, moment
from cli.output import (
    WIDTH,
    Exit,
    Problem,
    ProgressLine,
    explaining,
    note,
    print_json,
    rich_console,
    terminal_width,
    visible,
)
from penstock.files import write_file
from penstock.text import duration, percent, shared, three
from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.records.reader import GROUP_OF
from telemetry.records.schema import RecordSettings
from telemetry.report.figures import EnergyFigures, GroupFigures, WindowUsage
from telemetry.report.report import RequestReport, Scope, report_of

BAR = 30
PAGE_WIDTH = 110
"""Columns of the report as a file."""
CUT_SHORT = "Interrupted: this is of the records that were read."
LATENCIES = ("wait for a worker", "first token", "between tokens (engine)", "whole answer")
COLOURS = {"engine": "cyan", "queue": "yellow", "gateway": "magenta", "recovery": "red"}


class Visible:
    """Blocks of rich, an empty line behind each, whose text is escaped before it gets its styles. So text from others
    cannot style the terminal, and a style is never escaped."""

    def __init__(self, blocks: Sequence[RenderableType]) -> None:
        self._blocks = blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for block in self._blocks:
            for segment in console.render(Padding(block, (0, 0, 1, 0)), options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)


def html(blocks: Sequence[RenderableType]) -> str:
    """The blocks as one HTML file without external assets."""
    console = Console(record=True, file=io.StringIO(), width=PAGE_WIDTH, highlight=False, emoji=False, markup=False)
    console.print(Visible(blocks))
    return console.export_html(inline_styles=True)


def emit_styled(blocks: Sequence[RenderableType]) -> None:
    """Write blocks of rich to stdout, an empty line between them, in at most 80 columns."""
    width = min(WIDTH, terminal_width(sys.stdout)) if sys.stdout.isatty() else WIDTH
    console = rich_console(width)
    with console.capture() as capture:
        console.print(Visible(blocks))
    sys.stdout.write("\n".join(line.rstrip() for line in capture.get().rstrip().split("\n")) + "\n")


def shown(report: RequestReport) -> list[RenderableType]:
    """The report for people, in blocks."""
    figures, whole = report.figures, report.figures.whole
    blocks: list[RenderableType] = [Text(CUT_SHORT, "bold yellow")] if report.interrupted else []
    states = ", ".join(f"{number:,} {state}" for state, number in whole.states.items())
    since, until = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}" for at in (report.since, report.until))
    said = f"\n{since} to {until} UTC; {whole.requests:,} requests{f': {states}' if states else ''}"
    blocks.append(Text.assemble((report.verdict, "bold"), (said, "dim")))
    if report.advice:
        blocks.append(_advice(report))
    elif whole.requests:
        blocks.append(Text("Nothing stands out: no threshold is exceeded.", "dim"))
    if whole.requests:
        latencies = _table("latency", "p50", "p90", "p99", "most", "mean", "requests")
        for name, found in zip(LATENCIES, (whole.wait, whole.ttft, whole.itl, whole.e2e), strict=True):
            times = (found.p50, found.p90, found.p99, found.max, found.mean) if found else ()
            latencies.add_row(
                name, *(map(duration, times) if found else ["–"] * 5), f"{found.count:,}" if found else "–"
            )
        blocks += [latencies, _parts(whole), *_groups(report), _usage(figures.usage)]
        if figures.usage.energy is not None:
            blocks += _energy(figures.usage.energy)
    if report.run_times:
        table = _table("run time", "observed", "alone", "alone on the fastest", "contention", "fitted to")
        for each in report.run_times:
            spent = map(duration, (each.observed, each.denoised, each.idealized))
            table.add_row(each.model, *spent, shared(each.contention), f"{each.fitted} (≤ {each.beside} beside)")
        blocks.append(table)
    if lost := report.torn_lines + report.newer_lines:
        blocks.append(Text(f"{lost} lines of the records could not be read and are left out.", "dim"))
    return blocks


def _advice(report: RequestReport) -> RenderableType:
    found: list[RenderableType] = [Text("What to change first", "bold underline")]
    for number, each in enumerate(report.advice, 1):
        title = (f"{number}. {each.title}. ", "bold yellow")
        found.append(Text.assemble(title, f"{each.reason} ", (each.change, "dim")))
    return Stack(*found)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold", header_style="dim")
    return table


def _parts(whole: GroupFigures) -> RenderableType:
    total, done = sum(whole.parts.values()), whole.states.get("completed", 0)
    if not total:
        return Text("No request was completed, so there are no parts.", "dim")
    table = _table("part of the time", "mean", "share", "")
    table.columns[3].justify = "left"
    for part in PARTS:
        spent = whole.parts[part.name]
        bar = "█" * round(BAR * spent / total)
        shares = duration(spent / done), percent(spent / total)
        table.add_row(part.name.replace("_", " "), *shares, Text(bar, COLOURS[GROUP_OF[part.name]]))
    if whole.egress_first is not None:
        name = EGRESS_FIRST.name.replace("_", " ")
        table.add_row(name, duration(whole.egress_first.mean), "–", Text("beside decode", "dim"))
    return table


def _groups(report: RequestReport) -> Iterable[RenderableType]:
    figures = report.figures
    for title, groups in (("model", figures.models), ("lane", figures.lanes), ("tenant", figures.tenants),
                          ("hour (UTC)", figures.hours)):  # fmt: skip
        if len(groups) < (1 if title == "lane" else 2):
            continue
        table = _table(title, "requests", "tokens", "wait p50", "p99", "first p50", "p99", "whole p99")
        for group in groups:
            pairs = [
                (duration(each.p50), duration(each.p99)) if each else ("–", "–") for each in (group.wait, group.ttft)
            ]
            counts = f"{group.requests:,}", f"{group.completion_tokens:,}"
            table.add_row(group.name, *counts, *pairs[0], *pairs[1], duration(group.e2e.p99) if group.e2e else "–")
        yield table


def _usage(usage: WindowUsage) -> RenderableType:
    words = [f"{usage.tokens:,} tokens in {duration(1000 * usage.seconds)}: {three(usage.tokens_per_s)} per second"]
    for value, shown_as, meaning in (
        (usage.tokens_per_core_s, three, "per core-second of Penstock's processes"),
        (usage.gateway_cpu_s_per_1000, three, "s of CPU in API processes for 1,000 requests"),
        (usage.tokens_per_joule, three, "per joule of the GPUs"),
        (usage.slots_in_use, percent, "of the workers' slots in use"),
        (usage.tokens_per_cost, three, "per unit of cost_per_hour"),
    ):
        words += [f"{shown_as(value)} {meaning}"] if value is not None else []
    more = " CPU, energy and cost are of all requests, so what these took of them is not known." if usage.shared else ""
    return Text("; ".join(words) + "." + more)


def _energy(energy: EnergyFigures) -> Iterable[RenderableType]:
    """What the GPUs used, and for whom."""
    table = _table("GPU", "energy", "power", "idle", "busy")
    for each in energy.gpus:
        idle = percent(each.idle_joules / each.joules) if each.joules else "–"
        busy = percent(each.busy) if each.busy is not None else "–"
        table.add_row(each.gpu, f"{three(each.joules)} J", f"{three(each.watts)} W", idle, busy)
    yield table
    words = [f"{three(energy.joules_per_request)} J a request", f"{three(energy.joules_per_token)} J a token"]
    words += [f"{name} {three(joules)} J" for name, joules in energy.tenants.items()]
    yield Text("; ".join(words) + f"; idle {three(energy.idle_joules)} J.")


# --- comparison ------------------------------------------------------------------------------------------------------


def ratio(before: float | None, after: float | None) -> str:
    """The second divided by the first, as people read it."""
    return "–" if after is None or not before else f"x {after / before:.2f}"


def compared(before: RequestReport, after: RequestReport, names: Sequence[str]) -> list[RenderableType]:
    """Two reports side by side, in blocks."""
    table, one, two = _table("", names[0], names[1], "B / A"), before.figures, after.figures
    counts = one.whole.requests, two.whole.requests
    table.add_row("requests", *(f"{each:,}" for each in counts), ratio(*counts))
    for name, attribute in zip(LATENCIES, ("wait", "ttft", "itl", "e2e"), strict=True):
        for rank in ("p50", "p99"):
            x, y = (getattr(getattr(each.whole, attribute), rank, None) for each in (one, two))
            table.add_row(f"{name} {rank}", duration(x), duration(y), ratio(x, y))
    for name in ("tokens_per_s", "tokens_per_core_s", "tokens_per_joule", "tokens_per_cost"):
        x, y = getattr(one.usage, name), getattr(two.usage, name)
        if x is not None or y is not None:
            table.add_row(name.replace("_", " "), three(x), three(y), ratio(x, y))
    cut = [Text(CUT_SHORT, "bold yellow")] if before.interrupted or after.interrupted else []
    verdicts = Stack(*cut, Text(f"A: {before.verdict}"), Text(f"B: {after.verdict}"))
    titles = [[each.title for each in report.advice] for report in (before, after)]
    changes = [f"Only in A: {title}." for title in titles[0] if title not in titles[1]]
    changes += [f"Only in B: {title}." for title in titles[1] if title not in titles[0]]
    return [verdicts, table, *([Text("\n".join(changes))] if changes else [])]


WHOLE = "FROM..TO, or a folder of records"


@command("report")
@click.option("--since", help="Begin so long ago: 15m, 2h, 7d [1h].")
@click.option("--from", "start", help="Begin at this time (UTC), or so long ago.")
@click.option("--to", "end", help="End at this time (UTC), or so long ago [now].")
@click.option("--model", default="", help="Only this model.")
@click.option("--lane", default="", help="Only this lane.")
@click.option("--tenant", default="", help="Only this tenant.")
@click.option("--html", "target", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@click.option("--compare", nargs=2, metavar="A B", help=f"Compare two windows; each is {WHOLE}.")
@config_option
def report(
    since: str | None,
    start: str | None,
    end: str | None,
    target: Path | None,
    compare: tuple[str, str] | None,
    config: Path | None,
    where: Where,
    as_json: bool,
    **only: str,
) -> int:
    """Say what happened, where the time went and what to change first, from the records of this machine.

    Records are lines on the local disk, which every process keeps; see docs/records.md.

    \b
    Examples:
      penstock report --since 1h
      penstock report --since 24h --lane interactive --html report.html
      penstock report --compare 2h..1h 1h..
    """
    folder, prices = source(where, config)
    now = time.time()
    if compare is not None:
        if since or start or end or target:
            next_step = "leave out --since, --from, --to and --html"
            raise Problem("--compare has its own windows", next_step=next_step, code="usage")
        pair = [_made(*window(each, folder, now, only), prices, quiet=as_json) for each in compare]
        if as_json:
            print_json({name: msgspec.to_builtins(each) for name, each in zip("ab", pair, strict=True)})
        else:
            emit_styled(compared(pair[0], pair[1], compare))
        return Exit.INTERRUPTED if any(each.interrupted for each in pair) else Exit.DONE
    if since and start:
        raise Problem("--since and --from both say when to begin", next_step="leave one out", code="usage")
    scope = Scope(moment(start or since or "1h", now), moment(end, now) if end else now, **only)
    found = _made(folder, scope, prices, quiet=as_json)
    if target is not None:
        with explaining(f"{target} cannot be written"):
            write_file(target, html(shown(found)).encode())
        note(f"written to {target}")
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif target is None:
        emit_styled(shown(found))
    if not found.figures.whole.requests and not as_json:
        note(f"no request ended in this window, by the records in {folder}")
    return Exit.INTERRUPTED if found.interrupted else Exit.DONE


def source(where: Where, config: Path | None) -> tuple[Path, Mapping[str, float]]:
    """The folder of records, and what a worker of each model costs in an hour. Raises ConfigError, Problem."""
    deployment = load_deployment(where.flags, os.environ, Path.cwd(), config)
    settings = deployment.config.section("records", RecordSettings)
    folder = Path(settings.dir) if settings.dir else DataDir(deployment.up.data_dir).records
    if not folder.is_dir():
        why = "records are switched off (records.enabled)" if not settings.enabled else "nothing has run here yet"
        raise Problem(f"there are no records in {folder}", cause=why, next_step="penstock up")
    return folder, {name: model.cost_per_hour for name, model in deployment.models.items() if model.cost_per_hour}


def window(text: str, folder: Path, now: float, only: Mapping[str, str]) -> tuple[Path, Scope]:
    """One side of a comparison: all records of a folder, or a window of this one. Raises Problem."""
    if Path(text).is_dir():
        return Path(text), Scope(0.0, math.inf, **only)
    first, dots, last = text.partition("..")
    if not dots:
        what = f"--compare {text}: no folder and no window"
        raise Problem(what, next_step=f"write {WHOLE}; {TIME_HINT}", code="usage")
    return folder, Scope(moment(first, now), moment(last, now) if last else now, **only)


def _made(folder: Path, scope: Scope, prices: Mapping[str, float], *, quiet: bool) -> RequestReport:
    if scope.until <= scope.since:
        raise Problem("the window ends before it begins", next_step=TIME_HINT, code="usage")
    line = ProgressLine(quiet=quiet or not sys.stderr.isatty())
    with explaining(f"{folder} cannot be read"), line as progress:
        return report_of(folder, scope, prices, partial(progress.amount, "reading records"))
