"""Rates out of the counters of two readings."""

from __future__ import annotations

from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram

from api.admin.overview import FIRST_TOKEN, RateWindow, Reading, read

HALF = {0.1: 0.0, 0.2: 50.0, 0.4: 100.0, inf: 100.0}


def test_the_first_reading_says_what_was_since_the_start() -> None:
    rates = RateWindow().add(Reading(100.0, first_token=HALF, ended={"failed": 3}))
    assert rates.window_s is None and rates.jobs_per_s is None and rates.failed == 0
    assert rates.first_token_ms is not None
    assert [round(value) for value in rates.first_token_ms.values()] == [200, 380]


def test_throughput_is_of_seconds_and_latency_of_a_minute() -> None:
    window = RateWindow()
    window.add(Reading(0.0, first_token=HALF))
    for second in range(1, 101):
        rates = window.add(Reading(float(second), first_token=HALF, ended={"completed": 2 * second}))
    assert rates.window_s == 60.0 and rates.first_token_ms is None, "nothing was answered in the last minute"
    assert rates.jobs_per_s == 2.0


def test_after_a_pause_the_last_reading_is_the_base() -> None:
    window = RateWindow()
    window.add(Reading(0.0, ended={"completed": 100}))
    rates = window.add(Reading(600.0, ended={"completed": 700}, lapsed=1))
    assert (rates.window_s, rates.jobs_per_s, rates.lapsed) == (600.0, 1.0, 1)


def test_a_process_that_was_restarted_gives_no_negative_rate() -> None:
    window = RateWindow()
    window.add(Reading(0.0, ended={"completed": 5, "failed": 2}, first_token=HALF))
    rates = window.add(Reading(2.0))
    assert (rates.jobs_per_s, rates.failed, rates.first_token_ms) == (0.0, 0, None)


def test_what_lies_beyond_the_last_bound_is_said_to_be_that() -> None:
    rates = RateWindow().add(Reading(0.0, first_token={0.1: 0.0, 60.0: 0.0, inf: 9.0}))
    assert rates.first_token_ms == {"p50": 60_000.0, "p95": 60_000.0}


def test_readings_sum_over_models() -> None:
    registry = CollectorRegistry()
    seen = Histogram(FIRST_TOKEN, "", ("model",), buckets=(0.1, 1), registry=registry)
    jobs = Counter("penstock_jobs_total", "", ("model", "state"), registry=registry)
    for model in ("a", "b"):
        seen.labels(model).observe(0.05)
        jobs.labels(model, "completed").inc(4)
    reading = read(registry.collect(), 7.0)
    assert reading.first_token == {0.1: 2, 1.0: 2, inf: 2} and reading.ended == {"completed": 8} and reading.at == 7.0
