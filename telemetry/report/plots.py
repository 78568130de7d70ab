"""Plots of the report page, as inline SVG. Colours and fonts come from page.css; each plot says what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from telemetry.report.report import Moment
from telemetry.report.requests import GROUP_OF
from telemetry.report.words import duration, percent, three

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 14, 30
NAMES = {"wait": "wait for a worker", "ttft": "first token", "e2e": "whole answer"}
BAR_WIDTH, BAR_HEIGHT, CHARACTER = 1080, 72, 8.0
"""Of the bar of parts; a label is shown if its piece has room for so much a character."""


def _svg(label: str, inside: str, width: int = WIDTH, height: int = HEIGHT, more: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg"'
        f"{more}>{inside}</svg>"
    )


def _tick(ms: float) -> str:
    """A time at an axis: "10 ms", "100 s"."""
    return f"{ms:,g} ms" if ms < 1000 else f"{ms / 1000:,g} s"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    classes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}>{escape(text)}</text>'


def parts_plot(parts: Mapping[str, float], label: str) -> str:
    """One bar whose pieces are the parts of the time; engine, queue and gateway have a colour each. A narrow screen has
    no room for words in it: there, all stand below."""
    total = sum(parts.values()) or 1.0
    x, pieces, narrow, words = 0.0, list[str](), list[str](), list[str]()
    shades: dict[str, int] = {}
    for name, spent in parts.items():
        width = BAR_WIDTH * spent / total
        if width <= 0:
            continue
        group = GROUP_OF[name]
        shade = shades[group] = shades.get(group, 0) + 1
        pieces.append(
            f'<rect class="{group} s{shade}" x="{x:.2f}" y="0" width="{max(0.0, width - 1):.2f}" height="40" rx="3">'
            f"<title>{escape(name)} {percent(spent / total)}</title></rect>"
        )
        word = name.replace("_", " ")
        words.append(f"{word} {percent(spent / total)}")
        if width >= CHARACTER * len(word) + 24:
            pieces.append(_text(x + 12, 25, word, "on"))
            pieces.append(_text(x + 2, 62, percent(spent / total), "quiet"))
        else:
            narrow.append(words[-1])
        x += width
    rest = (
        f'<p class="on-wide">Too narrow for a name, from the left: {escape(", ".join(narrow))}.</p>' if narrow else ""
    )
    rest += f'<p class="on-narrow">From the left: {escape(", ".join(words))}.</p>'
    return _svg(label, "".join(pieces), BAR_WIDTH, BAR_HEIGHT, ' class="bar" preserveAspectRatio="none"') + rest


def _log_ticks(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _line(points: Sequence[tuple[float, float]], kind: str) -> str:
    path = " ".join(f"{'M' if not n else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
    return f'<path class="line {kind}" d="{path}"/>'


def curve_plot(curves: Mapping[str, Sequence[float]]) -> str:
    """For each latency, the share of requests (upwards) that took at most a time (to the right, logarithmic)."""
    values = [max(value, 0.1) for curve in curves.values() for value in curve]
    if not values:
        return "<p>No request was completed.</p>"
    ticks = _log_ticks(min(values), max(*values, min(values) * 1.01))
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(max(value, 0.1)) - low) / ((high - low) or 1)

    def y_of(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    grid = "".join(
        f'<line class="grid" x1="{x_of(tick):.1f}" x2="{x_of(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        + _text(x_of(tick), HEIGHT - 10, _tick(tick), "quiet", "middle")
        for tick in ticks
    )
    grid += "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(share):.1f}" y2="{y_of(share):.1f}"/>'
        + _text(LEFT - 8, y_of(share) + 4, f"{share:.0%}".replace("%", " %"), "quiet", "end")
        for share in (0.0, 0.5, 0.9, 1.0)
    )
    lines = "".join(
        _line([(x_of(value), y_of(number / 100)) for number, value in enumerate(curve, 1)], name)
        for name, curve in curves.items()
    )
    said = "; ".join(f"{NAMES[name]}: half within {duration(curve[49])}" for name, curve in curves.items())
    return _svg(f"Share of requests by time. {said}.", grid + lines) + _legend((name, NAMES[name]) for name in curves)


def _legend(items: Iterable[tuple[str, str]]) -> str:
    return '<ul class="legend">' + "".join(f'<li class="{name}">{escape(word)}</li>' for name, word in items) + "</ul>"


def _nice(top: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is not below `top`."""
    power = 10.0 ** math.floor(math.log10(top)) if top > 0 else 1.0
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= top)


def time_plot(moments: Sequence[Moment]) -> str:
    """Tokens per second, as an area, and the 90th percentiles of waiting and of the first token, as lines."""
    if not moments:
        return "<p>No request ended.</p>"
    middle = HEIGHT // 2
    rates = [moment.tokens / moment.seconds for moment in moments]
    times = [value for moment in moments for value in (moment.wait_p90, moment.ttft_p90) if value is not None]
    step = (WIDTH - LEFT - RIGHT) / max(1, len(moments))
    x_at = [LEFT + step * (number + 0.5) for number in range(len(moments))]
    top_rate, top_time = _nice(max([*rates, 1.0])), _nice(max([*times, 1.0]))

    def upper(value: float) -> float:
        return middle - 16 - (middle - 16 - TOP) * value / top_rate

    def lower(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - middle - 8) * value / top_time

    bars = "".join(
        f'<rect class="rate" x="{x - step / 2:.1f}" y="{upper(rate):.1f}" width="{max(0.5, step - 1):.1f}" '
        f'height="{max(0.0, upper(0) - upper(rate)):.1f}"/>'
        for x, rate in zip(x_at, rates, strict=True)
    )
    lines = ""
    for name in ("wait", "ttft"):
        values = [getattr(moment, f"{name}_p90") for moment in moments]
        lines += _line([(x, lower(value)) for x, value in zip(x_at, values, strict=True) if value is not None], name)
    axes = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (upper(0), upper(top_rate), lower(0), lower(top_time))
    )
    axes += _text(LEFT - 8, upper(top_rate) + 4, three(top_rate).replace(".00", ""), "quiet", "end")
    axes += _text(LEFT - 8, upper(0) + 4, "0", "quiet", "end") + _text(LEFT - 8, lower(0) + 4, "0", "quiet", "end")
    axes += _text(LEFT - 8, lower(top_time) + 4, _tick(top_time), "quiet", "end")
    for moment, x, anchor in ((moments[0], float(LEFT), "start"), (moments[-1], float(WIDTH - RIGHT), "end")):
        axes += _text(x, HEIGHT - 10, f"{datetime.fromtimestamp(moment.at, UTC):%H:%M:%S}", "quiet", anchor)
    said = f"Tokens per second, at most {three(max(rates))}; below, the 90th percentiles of waiting and of first tokens"
    items = [("rate", "tokens per second"), ("wait", f"{NAMES['wait']}, p90"), ("ttft", f"{NAMES['ttft']}, p90")]
    return _svg(f"{said}, at most {duration(max(times, default=None))}.", axes + bars + lines) + _legend(items)
