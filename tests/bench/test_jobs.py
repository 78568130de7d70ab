"""The jobs bench: its verdicts."""

from __future__ import annotations

import pytest

from bench.jobs.__main__ import ratios, rows
from bench.jobs.systems import JobsReading


def reading(jobs: int, cpu: float = 1.0, client: float = 0.5, p50: float = 1.0) -> JobsReading:
    return JobsReading(
        jobs=jobs, seconds=2.0, wrong=[], p50_ms=p50, p99_ms=2 * p50, client_cpu_s=client, cpu={"redis": cpu}
    )


def test_penstock_is_held_against_the_best_of_each_rival() -> None:
    crowd = {
        "penstock": [reading(5000)],
        "penstock-stream": [reading(6000)],
        "penstock-jobs": [reading(3000)],
        "celery-prefork": [reading(1000)],
        "celery-threads": [reading(1200, client=9.0)],
        "arq": [reading(3001)],
    }
    found = ratios(rows(crowd, {"penstock-stream": [reading(5, p50=2.5)]}))
    values = {ratio.what: (ratio.value, ratio.verdict) for ratio in found}
    assert values == {
        "CPU per job without the callers, celery's / Penstock's, one request each": (pytest.approx(5.0), "reached"),
        "Penstock's jobs/s, one request each / celery's": (5.0, "reached"),
        "Penstock's jobs/s, put and wait / celery's": (2.5, "missed"),
        "CPU per job without the callers, arq's / Penstock's, one request each": (pytest.approx(6000 / 3001), "missed"),
        "Penstock's jobs/s, one request each / arq's": (pytest.approx(6000 / 3001), "missed"),
        "Penstock's jobs/s, put and wait / arq's": (pytest.approx(3000 / 3001), "missed"),
        "one request alone: request to first token, p50 ms": (2.5, "reached"),
    }
