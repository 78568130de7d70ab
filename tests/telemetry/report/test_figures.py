"""Figures of a report are those of the raw lines: compared with a naive computation from the files themselves."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import BEGIN_S, sample

from telemetry.latency import PARTS
from telemetry.records.schema import ENCODER, DeliveryRecord, RequestRecord
from telemetry.report.report import RequestReport, Scope, report_of

LANES, MODELS, TENANTS = ("interactive", "standard", "batch"), ("m", "n"), ("t", "u", "")
STATES = ("completed", "failed", "cancelled", "expired")
WINDOW = Scope(BEGIN_S, BEGIN_S + 7200)

gaps = st.integers(0, 3_000_000)


@st.composite
def lines(draw: st.DrawFn) -> list[bytes]:
    """Records of up to twenty requests, some refused, some never claimed, some without a delivery, torn lines between
    them; a few lie outside the window."""
    found = []
    for number in range(draw(st.integers(0, 20))):
        at = BEGIN_S * 1_000_000 + draw(st.integers(-5_000_000, 7_205_000_000))
        if draw(st.integers(0, 9)) == 0:
            found.append(ENCODER.encode(RequestRecord(id=f"req_{number}", ended_us=at, state="refused", model="")))
            continue
        state = draw(st.sampled_from(STATES))
        stamps = [at]
        for _ in range(draw(st.integers(2, 8)) if state != "completed" else 8):
            stamps.append(stamps[-1] + draw(gaps))
        names = ("received_us", "accepted_us", "started_us", "claimed_us", "released_us", "scheduled_us", "first_us")
        known: dict[str, Any] = dict(zip((*names, "last_us"), stamps[:-1], strict=False))
        continued = draw(st.integers(0, 5))
        record = RequestRecord(
            id=f"job_{number}", ended_us=stamps[-1], state=state, model=draw(st.sampled_from(MODELS)),
            lane=draw(st.sampled_from(LANES)), tenant=draw(st.sampled_from(TENANTS)), by="worker-1",
            prompt_tokens=draw(st.integers(0, 500)), completion_tokens=draw(st.integers(0, 40)) + continued,
            continued_tokens=continued, choices=draw(st.integers(1, 3)), attempts=1, **known,
        )  # fmt: skip
        found.append(ENCODER.encode(record))
        if state == "completed" and draw(st.booleans()):
            first, last = record.first_us + draw(gaps), record.last_us + draw(gaps)
            whole = draw(st.booleans())
            found.append(ENCODER.encode(DeliveryRecord(
                id=record.id, first_got_us=0 if whole else first, first_sent_us=0 if whole else first,
                last_got_us=last, last_sent_us=last, whole=whole,
            )))  # fmt: skip
        if draw(st.booleans()):
            found.append(found[-1][: draw(st.integers(1, 30))])
    return found


def reported(text: bytes) -> RequestReport:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "20270115T080000.000-worker-1.jsonl"
        file.write_bytes(text)
        os.utime(file, (BEGIN_S + 7200, BEGIN_S + 7200))
        return report_of(Path(folder), WINDOW, {})


def naive(text: bytes) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Requests of the window and deliveries by id, read without any code of the report."""
    requests, deliveries = [], {}
    for line in text.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["kind"] == "delivery":
            deliveries[row["id"]] = row
        elif BEGIN_S * 1_000_000 <= row["ended_us"] < (BEGIN_S + 7200) * 1_000_000:
            requests.append(row)
    return requests, deliveries


def ranks(values: list[Fraction]) -> list[float] | None:
    """The 50th, 90th and 99th percentile and the most: the first value that enough of all values do not exceed."""
    if not values:
        return None
    found = []
    for share in (Fraction(50, 100), Fraction(90, 100), Fraction(99, 100), Fraction(1)):
        fits = [value for value in values if sum(other <= value for other in values) >= share * len(values)]
        found.append(float(min(fits)))
    return found


def ms(us: int) -> Fraction:
    return Fraction(us, 1000)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(lines())
def test_figures_equal_the_raw_lines(found: list[bytes]) -> None:
    """Counts, tokens and percentiles; parts sum to the end-to-end time, within a microsecond each; each request is in
    one model, lane and hour, but for those that have none."""
    text = b"\n".join(found) + b"\n"
    report, (rows, deliveries) = reported(text), naive(text)
    whole = report.figures.whole
    assert whole.requests == len(rows) and whole.states == Counter(row["state"] for row in rows)
    for field in ("prompt_tokens", "completion_tokens"):
        assert getattr(whole, field) == sum(row.get(field, 0) for row in rows)
    done = [row for row in rows if row["state"] == "completed"]
    waits = [
        ms((row.get("started_us") or row["ended_us"]) - row["accepted_us"]) for row in rows if row.get("accepted_us")
    ]
    firsts, wholes, gaps, ways = [], [], [], []
    for row in done:
        sent = deliveries.get(row["id"], {})
        first = sent["last_sent_us"] if sent.get("whole") else sent.get("first_sent_us") or row["first_us"]
        firsts.append(ms(first - row["received_us"]))
        wholes.append(ms((sent.get("last_sent_us") or row["last_us"]) - row["received_us"]))
        if sent.get("first_sent_us"):
            ways.append(ms(sent["first_sent_us"] - row["first_us"]))
        each = Fraction(row.get("completion_tokens", 0) - row.get("continued_tokens", 0), row.get("choices", 1))
        if each > 1:
            gaps.append(ms(row["last_us"] - row["first_us"]) / (each - 1))
    kinds = ((whole.wait, waits), (whole.ttft, firsts), (whole.e2e, wholes), (whole.itl, gaps))
    for known, values in (*kinds, (whole.egress_first, ways)):
        expected = ranks(values)
        assert (known is None) == (expected is None)
        if known is not None and expected is not None:
            got = [known.p50, known.p90, known.p99, known.max]
            assert all(abs(one - two) <= 1e-6 * max(1.0, two) for one, two in zip(got, expected, strict=True))
            assert abs(known.mean - float(sum(values) / len(values))) <= 1e-6 * max(1.0, known.mean)
    total = 0.0 if whole.e2e is None else whole.e2e.mean * whole.e2e.count
    assert abs(sum(whole.parts[part.name] for part in PARTS) - total) <= 0.001 * max(1, whole.requests)
    refused = whole.states.get("refused", 0)
    for groups in (report.figures.models, report.figures.lanes):
        assert sum(group.requests for group in groups) == whole.requests - refused
    assert sum(group.requests for group in report.figures.hours) == whole.requests
    assert sum(group.completion_tokens for group in report.figures.hours) == whole.completion_tokens


def test_usage_is_of_what_is_known() -> None:
    samples = [
        sample("worker", "worker-1", 0, 1.0, model="m", slots=4, running=4, gpus={"a": 100.0}),  # type: ignore[arg-type]
        sample("worker", "worker-1", 10_000, 3.0, model="m", slots=4, running=2, gpus={"a": 400.0}),  # type: ignore[arg-type]
        sample("api", "api-1", 0, 0.5),
        sample("api", "api-1", 10_000, 1.0),
    ]
    record = RequestRecord(
        id="job_1", ended_us=(BEGIN_S + 10) * 1_000_000, received_us=BEGIN_S * 1_000_000, state="completed", model="m",
        completion_tokens=500,
    )  # fmt: skip
    text = b"\n".join(map(ENCODER.encode, [*samples, record])) + b"\n"
    usage = reported(text).figures.usage
    assert (usage.tokens_per_s, usage.cpu_s, usage.tokens_per_core_s) == (50.0, 2.5, 200.0)
    assert (usage.joules, usage.tokens_per_joule) == (300.0, 500 / 300)
    assert (usage.cost, usage.tokens_per_cost) == (None, None), "no price is set"
    without = reported(ENCODER.encode(record) + b"\n").figures.usage
    assert (without.joules, without.tokens_per_joule, without.cpu_s, without.tokens_per_core_s) == (None,) * 4
