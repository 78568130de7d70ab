"""Report page: the report as one HTML file without external assets, for light and dark screens and for paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.report.figures import Distribution, GroupFigures, group_shares
from telemetry.report.plots import curve_plot, parts_plot, time_plot
from telemetry.report.report import RequestReport
from telemetry.report.requests import GROUP_OF
from telemetry.report.words import duration, percent, shared, three

GROUP_WORDS = {
    "engine": "generating",
    "queue": "waiting",
    "gateway": "path around the engine",
    "recovery": "lost to retries",
}


def page(report: RequestReport) -> str:
    """The whole file."""
    body = (
        _head(report),
        _tiles(report),
        _advice(report),
        _plots(report),
        _groups(report),
        _run_times(report),
        _processes(report),
        _foot(report),
    )
    style = files("telemetry").joinpath("report", "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>Penstock report, {_window(report)}</title>'
        f"<style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _window(report: RequestReport) -> str:
    return f"{_at(report.since)} to {_at(report.until)} UTC"


def _head(report: RequestReport) -> str:
    chosen = [f"{name} {value}" for name in ("model", "lane", "tenant") if (value := getattr(report, name))]
    only = f" · only {escape(', '.join(chosen))}" if chosen else ""
    window = f'<p class="window">Penstock report · {_window(report)}{only}</p>'
    return f"<header>{window}<h1>{escape(report.verdict)}</h1></header>"


def _tiles(report: RequestReport) -> str:
    whole, usage = report.figures.whole, report.figures.usage
    cpu = "not known: the CPU is that of all requests" if usage.shared else "CPU of Penstock's processes"
    tiles = [
        ("requests", f"{whole.requests:,}", _states(whole)),
        ("wait, p50 / p99", _pair(whole.wait), "from acceptance to the first claim"),
        ("first token, p50 / p99", _pair(whole.ttft), "from receipt"),
        ("between tokens, p50 / p99", _pair(whole.itl), "mean of each request, in the engine"),
        ("whole answer, p50 / p99", _pair(whole.e2e), "from receipt to the end"),
        ("tokens per second", three(usage.tokens_per_s), f"{usage.tokens:,} generated"),
        ("tokens per core-second", three(usage.tokens_per_core_s), cpu),
    ]
    if usage.tokens_per_joule is not None:
        tiles.append(("tokens per joule", three(usage.tokens_per_joule), f"{three(usage.joules)} J of all GPUs"))
    if (energy := usage.energy) is not None:
        idle = percent(energy.idle_joules / energy.joules) if energy.joules else "–"
        tiles.append(("joules a request", three(energy.joules_per_request), f"{idle} of all while idle"))
    if usage.slots_in_use is not None:
        tiles.append(("slots in use", percent(usage.slots_in_use), "of the workers' places, over their samples"))
    if usage.tokens_per_cost is not None:
        tiles.append(("tokens per unit of cost", three(usage.tokens_per_cost), "cost_per_hour of the workers"))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _states(figures: GroupFigures) -> str:
    return ", ".join(f"{number:,} {state}" for state, number in figures.states.items()) or "none"


def _pair(found: Distribution | None) -> str:
    return "–" if found is None else f"{duration(found.p50)} / {duration(found.p99)}"


def _advice(report: RequestReport) -> str:
    if not report.advice:
        return "<section><h2>What to change first</h2><p>Nothing stands out: no threshold is exceeded.</p></section>"
    items = "".join(
        f"<li><h3>{escape(each.title)}</h3><p>{escape(each.reason)}</p><p class=change>{escape(each.change)}</p></li>"
        for each in report.advice
    )
    return f'<section><h2>What to change first</h2><ol class="advice">{items}</ol></section>'


def _plots(report: RequestReport) -> str:
    whole = report.figures.whole
    if not any(whole.parts.values()):
        return ""
    shares = group_shares(whole)
    words = ", ".join(f"{GROUP_WORDS[name]} {percent(share)}" for name, share in shares.items())
    done = whole.states.get("completed", 0)
    rows = [
        (part.name, GROUP_OF[part.name], duration(whole.parts[part.name] / done), part.meaning)
        for part in PARTS
        if whole.parts[part.name]
    ]
    if whole.egress_first is not None:
        rows.append((EGRESS_FIRST.name, "beside decode", duration(whole.egress_first.mean), EGRESS_FIRST.meaning))
    return (
        '<section class="parts"><h2>Where the time went</h2>'
        f"{parts_plot(whole.parts, f'Time of completed requests by part: {words}.')}"
        f"{_table('Mean of a completed request', ('part', 'group', 'time', 'meaning'), rows, numbers={2})}</section>"
        f'<section class="pair"><div><h2>Over time</h2>{time_plot(report.timeline)}</div>'
        f"<div><h2>How long requests took</h2>{curve_plot(report.curves)}</div></section>"
    )


def _table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] | None = None
) -> str:
    """`numbers`: columns that are set to the right; all but the first, if not given."""
    right = set(range(1, len(header))) if numbers is None else set(numbers)

    def cell(kind: str, column: int, text: str, scope: str = "") -> str:
        classes = " class=n" if column in right else ""
        return f"<{kind}{scope}{classes}>{escape(text)}</{kind}>"

    head = "".join(cell("th", column, text, " scope=col") for column, text in enumerate(header))
    lines = []
    for row in rows:
        first, *others = row
        cells = cell("th", 0, first, " scope=row") + "".join(cell("td", n, text) for n, text in enumerate(others, 1))
        lines.append(f"<tr>{cells}</tr>")
    label = escape(caption)
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


GROUP_HEADER = ("requests", "tokens", "wait p50", "p99", "first p50", "p99", "between p50", "whole p50", "p99")


def group_row(group: GroupFigures) -> tuple[str, ...]:
    """The name of a group, and its cells, as GROUP_HEADER names them."""

    def two(found: Distribution | None) -> tuple[str, str]:
        return ("–", "–") if found is None else (duration(found.p50), duration(found.p99))

    return (
        group.name,
        f"{group.requests:,}",
        f"{group.completion_tokens:,}",
        *two(group.wait),
        *two(group.ttft),
        two(group.itl)[0],
        *two(group.e2e),
    )


def _groups(report: RequestReport) -> str:
    figures = report.figures
    tables = [
        _table(f"By {name}", (name, *GROUP_HEADER), map(group_row, groups))
        for name, groups in (
            ("model", figures.models),
            ("lane", figures.lanes),
            ("tenant", figures.tenants),
            ("hour (UTC)", figures.hours),
        )
        if groups
    ]
    return f'<section class="even"><h2>Who</h2>{"".join(tables)}</section>' if tables else ""


def _run_times(report: RequestReport) -> str:
    if not report.run_times:
        return ""
    header = (
        "model",
        "observed",
        "alone here",
        "alone on the fastest",
        "contention",
        "waiting",
        "sharing",
        "fitted to",
    )
    rows = [
        (
            each.model,
            duration(each.observed),
            duration(each.denoised),
            duration(each.idealized),
            shared(each.contention),
            duration(each.waiting),
            shared(each.sharing),
            f"{each.fitted} with at most {each.beside} beside",
        )
        for each in report.run_times
    ]
    return (
        "<section><h2>What sharing cost</h2><p>Mean of a request from acceptance to its last token, beside what it "
        "would take alone: on its own worker (denoised), and on the fastest worker of its model (idealized).</p>"
        f"{_table('Run time', header, rows)}</section>"
    )


def _processes(report: RequestReport) -> str:
    if not report.figures.processes:
        return ""
    header = ("process", "role", "CPU", "cores used", "memory, most", "loop late, most", "slots used")
    rows = [
        (
            each.process,
            each.role,
            duration(1000 * each.cpu_s),
            three(each.cpu_s / each.seconds) if each.seconds else "–",
            f"{each.max_rss_bytes / 1e6:,.0f} MB",
            duration(each.max_lag_ms),
            "–" if each.mean_running is None else f"{three(each.mean_running)} of {each.slots}",
        )
        for each in report.figures.processes
    ]
    return f"<section><h2>Processes</h2>{_table('Samples', header, rows, numbers={2, 3, 4, 5, 6})}</section>"


def _foot(report: RequestReport) -> str:
    skipped = report.torn_lines + report.newer_lines
    lost = f" {skipped} lines could not be read." if skipped else ""
    return f"<footer><p>Made from the records on this machine; docs/records.md defines every figure.{lost}</p></footer>"
