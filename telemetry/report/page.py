"""Report page: the report as one HTML file without external assets, for light and dark screens and for paper.

Its plots are inline SVG; colours and fonts come from page.css, and each plot says what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from telemetry.latency import EGRESS_FIRST, PARTS
from telemetry.report.figures import Distribution, GroupFigures, ProcessFigures, group_shares
from telemetry.report.ideal import ModelRunTime
from telemetry.report.report import Moment, RequestReport
from telemetry.report.requests import GROUP_OF
from telemetry.report.words import duration, percent, shared, three

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta name="color-scheme" content="light dark"><title>Penstock report, {window}</title><style>{style}</style></head>\
<body><main><header><p class="window">Penstock report · {window}{only}</p><h1>{verdict}</h1></header>{sections}\
<footer><p>Made from the records on this machine; docs/records.md defines every figure.{lost}</p></footer>\
</main></body></html>
"""
GROUP_WORDS = {
    "engine": "generating",
    "queue": "waiting",
    "gateway": "path around the engine",
    "recovery": "lost to retries",
}
NAMES = {"wait": "wait for a worker", "ttft": "first token", "e2e": "whole answer"}
GROUP_HEADER = ("requests", "tokens", "wait p50", "p99", "first p50", "p99", "between p50", "whole p50", "p99")
RUN_TIME_HEADER = ("model", "observed", "alone here", "alone on the fastest", "contention", "waiting", "sharing",
                   "fitted to")  # fmt: skip
PROCESS_HEADER = ("process", "role", "CPU", "cores used", "memory, most", "loop late, most", "slots used")
SHARING = (
    "<p>Mean of a request from acceptance to its last token, beside what it would take alone: on its own worker "
    "(denoised), and on the fastest worker of its model (idealized).</p>"
)


def page(report: RequestReport) -> str:
    """The whole file."""
    figures = report.figures
    groups = (
        ("model", figures.models),
        ("lane", figures.lanes),
        ("tenant", figures.tenants),
        ("hour (UTC)", figures.hours),
    )
    who = (_table(f"By {name}", (name, *GROUP_HEADER), map(_group, each)) for name, each in groups if each)
    run_times = _table("Run time", RUN_TIME_HEADER, map(_run_time, report.run_times)) if report.run_times else ""
    processes = _table("Samples", PROCESS_HEADER, map(_process, figures.processes), left=(0, 1))
    sections = (
        _tiles(report),
        _advice(report),
        _plots(report),
        _section("Who", "".join(who), ' class="even"'),
        _section("What sharing cost", SHARING + run_times if run_times else ""),
        _section("Processes", processes if figures.processes else ""),
    )
    skipped = report.torn_lines + report.newer_lines
    chosen = [f"{name} {value}" for name in ("model", "lane", "tenant") if (value := getattr(report, name))]
    return PAGE.format(
        window=f"{_at(report.since)} to {_at(report.until)} UTC",
        only=f" · only {escape(', '.join(chosen))}" if chosen else "",
        style=files("telemetry").joinpath("report", "page.css").read_text(encoding="utf-8"),
        verdict=escape(report.verdict),
        sections="".join(sections),
        lost=f" {skipped} lines could not be read." if skipped else "",
    )


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _section(title: str, inside: str, more: str = "") -> str:
    return f"<section{more}><h2>{title}</h2>{inside}</section>" if inside else ""


def _tiles(report: RequestReport) -> str:
    whole, usage = report.figures.whole, report.figures.usage
    states = ", ".join(f"{number:,} {state}" for state, number in whole.states.items()) or "none"
    cpu = "not known: the CPU is that of all requests" if usage.shared else "CPU of Penstock's processes"
    tiles = [
        ("requests", f"{whole.requests:,}", states),
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


def _pair(found: Distribution | None) -> str:
    return " / ".join(_two(found)) if found else "–"


def _two(found: Distribution | None) -> tuple[str, str]:
    return (duration(found.p50), duration(found.p99)) if found else ("–", "–")


def _advice(report: RequestReport) -> str:
    items = "".join(
        f"<li><h3>{escape(each.title)}</h3><p>{escape(each.reason)}</p><p class=change>{escape(each.change)}</p></li>"
        for each in report.advice
    )
    nothing = "<p>Nothing stands out: no threshold is exceeded.</p>"
    return _section("What to change first", f'<ol class="advice">{items}</ol>' if items else nothing)


def _plots(report: RequestReport) -> str:
    whole = report.figures.whole
    if not any(whole.parts.values()):
        return ""
    words = ", ".join(f"{GROUP_WORDS[name]} {percent(share)}" for name, share in group_shares(whole).items())
    done = whole.states.get("completed", 0)
    rows = [
        (part.name, GROUP_OF[part.name], duration(whole.parts[part.name] / done), part.meaning)
        for part in PARTS
        if whole.parts[part.name]
    ]
    if whole.egress_first is not None:
        rows.append((EGRESS_FIRST.name, "beside decode", duration(whole.egress_first.mean), EGRESS_FIRST.meaning))
    table = _table("Mean of a completed request", ("part", "group", "time", "meaning"), rows, left=(0, 1, 3))
    bar = _parts_plot(whole.parts, f"Time of completed requests by part: {words}.")
    return (
        _section("Where the time went", bar + table, ' class="parts"')
        + f'<section class="pair"><div><h2>Over time</h2>{_time_plot(report.timeline)}</div>'
        f"<div><h2>How long requests took</h2>{_curve_plot(report.curves)}</div></section>"
    )


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """`left`: columns that are set to the left; the others hold numbers."""

    def row(cells: Sequence[str], kind: str, scope: str) -> str:
        texts = []
        for column, text in enumerate(cells):
            name, more = (kind, "") if column else ("th", f" scope={scope}")
            classes = "" if column in left else " class=n"
            texts.append(f"<{name}{more if name == 'th' else ''}{classes}>{escape(text)}</{name}>")
        return f"<tr>{''.join(texts)}</tr>"

    label, lines = escape(caption), "".join(row(each, "td", "row") for each in rows)
    return (
        f'<div class="wide" role="region" aria-label="{label}" tabindex="0"><table><caption>{label}</caption>'
        f"<thead>{row(header, 'th', 'col')}</thead><tbody>{lines}</tbody></table></div>"
    )


def _group(group: GroupFigures) -> tuple[str, ...]:
    """The cells of a group, as GROUP_HEADER names them behind its name."""
    counts = (group.name, f"{group.requests:,}", f"{group.completion_tokens:,}")
    return (*counts, *_two(group.wait), *_two(group.ttft), _two(group.itl)[0], *_two(group.e2e))


def _run_time(each: ModelRunTime) -> tuple[str, ...]:
    times = map(duration, (each.observed, each.denoised, each.idealized))
    costs = (shared(each.contention), duration(each.waiting), shared(each.sharing))
    return (each.model, *times, *costs, f"{each.fitted} with at most {each.beside} beside")


def _process(each: ProcessFigures) -> tuple[str, ...]:
    return (
        each.process,
        each.role,
        duration(1000 * each.cpu_s),
        three(each.cpu_s / each.seconds) if each.seconds else "–",
        f"{each.max_rss_bytes / 1e6:,.0f} MB",
        duration(each.max_lag_ms),
        "–" if each.mean_running is None else f"{three(each.mean_running)} of {each.slots}",
    )


# --- plots -----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 14, 30
BAR_WIDTH, BAR_HEIGHT, CHARACTER = 1080, 72, 8.0
"""Of the bar of parts; a label is shown if its piece has room for so much a character."""


def _svg(label: str, inside: str, width: int = WIDTH, height: int = HEIGHT, more: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg"'
        f"{more}>{inside}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "quiet", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _across(y: float, text: str = "") -> str:
    """A line of the grid at a height, and what it stands for."""
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + (_text(LEFT - 8, y + 4, text, anchor="end") if text else "")


def _line(points: Iterable[tuple[float, float]], kind: str) -> str:
    path = " ".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
    return f'<path class="line {kind}" d="{path}"/>'


def _legend(items: Iterable[tuple[str, str]]) -> str:
    return '<ul class="legend">' + "".join(f'<li class="{name}">{escape(word)}</li>' for name, word in items) + "</ul>"


def _tick(ms: float) -> str:
    """A time at an axis: "10 ms", "100 s"."""
    return f"{ms:,g} ms" if ms < 1000 else f"{ms / 1000:,g} s"


def _parts_plot(parts: Mapping[str, float], label: str) -> str:
    """One bar whose pieces are the parts of the time; engine, queue and gateway have a colour each. Most pieces are too
    narrow for words: all stand below."""
    total = sum(parts.values()) or 1.0
    x, pieces, words = 0.0, list[str](), list[str]()
    shades: dict[str, int] = {}
    for name, spent in parts.items():
        width, word, share = BAR_WIDTH * spent / total, name.replace("_", " "), percent(spent / total)
        if width <= 0:
            continue
        group = GROUP_OF[name]
        shades[group] = shades.get(group, 0) + 1
        pieces.append(
            f'<rect class="{group} s{shades[group]}" x="{x:.2f}" y="0" width="{max(0.0, width - 1):.2f}" height="40" '
            f'rx="3"><title>{escape(name)} {share}</title></rect>'
        )
        words.append(f"{word} {share}")
        if width >= CHARACTER * len(word) + 24:
            pieces += [_text(x + 12, 25, word, "on"), _text(x + 2, 62, share)]
        x += width
    bar = _svg(label, "".join(pieces), BAR_WIDTH, BAR_HEIGHT, ' class="bar" preserveAspectRatio="none"')
    return f"{bar}<p>From the left: {escape(', '.join(words))}.</p>"


def _curve_plot(curves: Mapping[str, Sequence[float]]) -> str:
    """For each latency, the share of requests (upwards) that took at most a time (to the right, logarithmic)."""
    values = [max(value, 0.1) for curve in curves.values() for value in curve]
    if not values:
        return "<p>No request was completed.</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(*values, min(values) * 1.01)))

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(max(value, 0.1)) - low) / ((high - low) or 1)

    def y_of(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    grid = "".join(_across(y_of(share), f"{100 * share:.0f} %") for share in (0.0, 0.5, 0.9, 1.0))
    for tick in (10.0**power for power in range(low, high + 1)):
        x = x_of(tick)
        grid += f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        grid += _text(x, HEIGHT - 10, _tick(tick), anchor="middle")
    lines = "".join(
        _line([(x_of(value), y_of(number / 100)) for number, value in enumerate(curve, 1)], name)
        for name, curve in curves.items()
    )
    said = "; ".join(f"{NAMES[name]}: half within {duration(curve[49])}" for name, curve in curves.items())
    return _svg(f"Share of requests by time. {said}.", grid + lines) + _legend((name, NAMES[name]) for name in curves)


def _nice(top: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is not below `top`."""
    power = 10.0 ** math.floor(math.log10(top)) if top > 0 else 1.0
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= top)


def _time_plot(moments: Sequence[Moment]) -> str:
    """Tokens per second, as an area, and the 90th percentiles of waiting and of the first token, as lines."""
    if not moments:
        return "<p>No request ended.</p>"
    middle, step = HEIGHT // 2, (WIDTH - LEFT - RIGHT) / len(moments)
    rates = [moment.tokens / moment.seconds for moment in moments]
    tails = {"wait": [each.wait_p90 for each in moments], "ttft": [each.ttft_p90 for each in moments]}
    times = [value for values in tails.values() for value in values if value is not None]
    xs = [LEFT + step * (number + 0.5) for number in range(len(moments))]
    top_rate, top_time = _nice(max([*rates, 1.0])), _nice(max([*times, 1.0]))

    def upper(value: float) -> float:
        return middle - 16 - (middle - 16 - TOP) * value / top_rate

    def lower(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - middle - 8) * value / top_time

    inside = _across(upper(0), "0") + _across(upper(top_rate), three(top_rate).replace(".00", ""))
    inside += _across(lower(0), "0") + _across(lower(top_time), _tick(top_time))
    for x, rate in zip(xs, rates, strict=True):
        inside += (
            f'<rect class="rate" x="{x - step / 2:.1f}" y="{upper(rate):.1f}" width="{max(0.5, step - 1):.1f}" '
            f'height="{max(0.0, upper(0) - upper(rate)):.1f}"/>'
        )
    for name, values in tails.items():
        inside += _line([(x, lower(value)) for x, value in zip(xs, values, strict=True) if value is not None], name)
    for moment, x, anchor in ((moments[0], LEFT, "start"), (moments[-1], WIDTH - RIGHT, "end")):
        inside += _text(x, HEIGHT - 10, f"{datetime.fromtimestamp(moment.at, UTC):%H:%M:%S}", anchor=anchor)
    said = (
        f"Tokens per second, at most {three(max(rates))}; below, the 90th percentiles of waiting and of first tokens, "
        f"at most {duration(max(times, default=None))}."
    )
    items = [("rate", "tokens per second"), ("wait", f"{NAMES['wait']}, p90"), ("ttft", f"{NAMES['ttft']}, p90")]
    return _svg(said, inside) + _legend(items)
