"""Answers of `penstock tune`: readings of a server as a frontier, what it speaks for, and the rate kept, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.commands.answers import PlanTable, plot, seconds, three
from planner.facts.catalogue import Accelerator
from planner.search import Attainment, LatencySlo
from planner.tuning import LevelReading, MeasuredFrontier, Recommendation


def frontier_json(
    found: MeasuredFrontier, wanted: Recommendation, readings: Mapping[int, Sequence[LevelReading]]
) -> dict[str, Any]:
    """The frontier with its knee and what it speaks for."""
    return {
        "points": [
            {
                "concurrency": point.batch,
                "tokens_s": point.tokens_s,
                "requests_s": point.requests_s,
                "latency_s": point.latency_s,
                "joules_per_token": point.joules_token,
                "is_dominated": point not in found.kept,
                "repeats": len(readings[point.batch]),
                "requests": sum(each.requests for each in readings[point.batch]),
                "failed": sum(each.failed for each in readings[point.batch]),
            }
            for point in found.points
        ],
        "knee": {
            "concurrency": found.knee.batch,
            "gain_of_twice": found.knee.gain,
            "confidence": found.knee.confidence if found.repeats > 1 and not found.is_open else None,
            "is_beyond": found.knee.is_beyond,
            "by_single_doublings": found.knee.ruled,
            "is_fitted": found.knee.is_fitted,
            "reason": found.knee.reason,
        },
        "recommended": {
            "max_batch_size": None if wanted.withheld else wanted.max_batch_size,
            "kv_tokens": None if wanted.withheld else wanted.kv_tokens,
            "kv_bytes": wanted.kv_bytes,
            "spare_bytes": wanted.spare_bytes,
            "replicas": wanted.replicas,
            "withheld": wanted.withheld or None,
        },
        "left_out": found.left_out,
        "curve": found.curve,
        "held_out_error": found.error,
    }


def frontier_table(found: MeasuredFrontier) -> PlanTable:
    """Joules have a column if they are known."""
    header, known = ["at once", "tokens/s", "requests/s", "request"], any(point.joules_token for point in found.points)
    rows = []
    for point in found.points:
        row = [f"{point.batch}", three(point.tokens_s), three(point.requests_s), seconds(point.latency_s)]
        row += ["-" if point.joules_token is None else three(point.joules_token)] * known
        rows.append([*row, "knee" if point.batch == found.knee.batch else "" if point in found.kept else "dominated"])
    return PlanTable((*header, *["J/token"] * known, "note"), rows)


def power_note(readings: Mapping[int, Sequence[LevelReading]], device: Accelerator | None, gpus: int) -> list[str]:
    """How near to its limit the GPU was at the highest concurrency whose energy is known: a line of advice."""
    known = [(clients, one) for clients, ones in readings.items() for one in ones if one.joules is not None]
    if device is None or not device.watts or not known:
        return []
    clients, reading = max(known, key=lambda each: each[0])
    watts = (reading.joules or 0.0) / reading.seconds
    share = watts / (device.watts * max(1, gpus))
    return [f"At {clients} at once the GPUs draw {watts:.0f} W, {100 * share:.0f} % of their limit ({device.name})."]


def frontier_plot(found: MeasuredFrontier) -> str:
    points = [(float(point.batch), point.tokens_s) for point in found.points]
    marked = next(point for point in points if point[0] == found.knee.batch)
    return plot(points, "requests at once", "tokens/s", marked, "the knee")


def frontier_notes(found: MeasuredFrontier, wanted: Recommendation) -> list[str]:
    if found.knee.is_beyond:
        notes = [f"The knee is at least {found.knee.batch}; how far beyond was not measured."]
    elif found.left_out:
        notes = []
    else:
        once = "measured once: its confidence is unknown"
        sure = f"{100 * found.knee.confidence:.0f} % sure" if found.repeats > 1 else once
        notes = [f"The knee is {sure}. KV cache of that batch: {wanted.kv_tokens:,} tokens."]
    if found.error is not None:
        notes.append(
            f"The curve of every second concurrency predicts the throughput of the others to {100 * found.error:.0f} %."
        )
    return notes


BATCH_KEY = {"trtllm": "max_batch_size", "sim": "slots", "llamacpp": "slots"}
"""By engine, the option of the requests at once."""
KV_KEY = {"trtllm": "kv_cache.max_tokens", "sim": "kv_tokens"}
"""By engine, the option of the cache's tokens; llama.cpp's follows from slots and context."""


def settings_lines(model: str, wanted: Recommendation) -> list[str]:
    """The settings of a Penstock that serves the model, by engine."""
    found = ["Put this into penstock.toml, and restart the instance: penstock down, penstock up", f'[models."{model}"]']
    for engine, key in BATCH_KEY.items():
        cache = f", options.{KV_KEY[engine]} = {wanted.kv_tokens}" if engine in KV_KEY else ""
        found.append(f"# engine {engine}: options.{key} = {wanted.max_batch_size}{cache}")
    return found + ([f"max_workers = {wanted.replicas}"] if wanted.replicas else [])


def kept(reading: LevelReading, slo: LatencySlo) -> Attainment:
    """Shares of all requests that kept the objectives; one that failed kept none."""
    ttft = [answer.ttft <= slo.ttft_s for answer in reading.answers]
    tpot = [(answer.tpot or 0.0) <= slo.tpot_s for answer in reading.answers]
    both = [one and other for one, other in zip(ttft, tpot, strict=True)]
    return Attainment(*(sum(each) / reading.requests for each in (both, ttft, tpot)))


def goodput_words(found: float, tried: dict[float, Attainment], slo: LatencySlo, ended: str) -> str:
    """The rate, what gives way first, and why the search ended before its end, if it did."""
    share = f"{100 * slo.share:.0f} %"
    end = f" {ended}" if ended else ""
    if not found and not tried:
        return f"No rate was measured.{end}"
    if not found:
        worst = min(tried.values(), key=lambda each: each.both)
        first = "first token" if worst.ttft < worst.tpot else "time between tokens"
        return f"At no rate do {share} of the requests keep {slo.words}: the {first} gives way.{end}"
    over = [each for rate, each in tried.items() if rate > found]
    gives = ""
    if over:
        gives = f"; beyond it the {'first token' if over[0].ttft < over[0].tpot else 'time between tokens'} gives way"
    return f"{three(found)} requests a second keep {slo.words} for {share} of them{gives}.{end}"
