"""The jobs bench: its verdicts, a run of it in short form, and callers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import report
from bench.jobs import __main__ as jobs
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


@pytest.mark.slow
def test_penstock_answers_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: each of them has its cost, and no answer is wrong."""
    monkeypatch.setattr(report, "cores", lambda: 1)  # so many API processes
    monkeypatch.setattr(jobs, "STARTED_S", 0.0)
    monkeypatch.setattr(jobs, "draw", None)
    words = ["--systems", "penstock-jobs", "--rounds", "1", "--callers", "4", "--seconds", "2", "--out", str(tmp_path)]
    assert jobs.main(words) == 0
    found = report.load(tmp_path / "jobs.json")
    (row,) = found.rows
    assert row["jobs_per_s"] > 0 and not any("wrong answers" in note for note in found.notes)
    assert {part.split()[0] for part in row["parts"].split(", ")} == {"redis", "api-1", "worker-1"}
