"""The jobs bench: its arithmetic, its callers, and Penstock's door, which answers every form."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench.jobs.__main__ import ratios, rows
from bench.jobs.callers import CallerPlan
from bench.jobs.frontend import CHAT
from bench.jobs.systems import ClientFailed, JobsReading, PenstockJobs, ServingJobs, measure
from bench.load.streams import Framing
from bench.penstock import start_redis
from bench.processes import Processes


def reading(jobs: int, cpu: float = 1.0, client: float = 0.5, p50: float = 1.0) -> JobsReading:
    return JobsReading(
        jobs=jobs, seconds=2.0, wrong=[], p50_ms=p50, p99_ms=2 * p50, client_cpu_s=client, cpu={"redis": cpu}
    )


def test_a_row_is_the_median_of_its_rounds() -> None:
    (row,) = rows({"arq": [reading(1000), reading(4000), reading(2000)]}, {"arq": [reading(10, p50=5.0)]})
    assert row["jobs_per_s"] == 1000.0 and row["alone_p50_ms"] == 5.0
    assert row["cpu_ms_per_job"] == pytest.approx(0.75) and row["client_ms_per_job"] == pytest.approx(0.25)
    assert row["parts"] == "redis 500"


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


def test_a_ratio_shows_what_it_was_in_each_round() -> None:
    """A round of each with the best of either side, unless somebody did not answer in one."""
    crowd = {
        "penstock": [reading(4000), reading(8000)],
        "penstock-stream": [reading(6000), reading(5000)],
        "arq": [reading(2000), reading(1000)],
    }
    cost, rate, alone = ratios(rows(crowd, {}))
    assert rate.rounds == pytest.approx((3.0, 8.0)) and cost.rounds == pytest.approx((3.0, 8.0)) and not alone.rounds
    assert rate.value == pytest.approx(5.5) and cost.value == pytest.approx(5.5), "the median of the rounds"
    crowd["arq"].append(reading(1000))
    assert [ratio.rounds for ratio in ratios(rows(crowd, {}))] == [(), (), ()]


def measured(serving: ServingJobs, store: Processes) -> JobsReading:
    """Soon, or for longer where the machine stood still meanwhile and not one job was answered."""
    for seconds in (0.3, 2.0):
        with suppress(ClientFailed):
            return measure(serving, store, CallerPlan(serving.url, 4, 0.1, seconds))
    return measure(serving, store, CallerPlan(serving.url, 4, 0.1, 15.0))


@pytest.mark.slow
def test_every_form_is_answered_at_the_door(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with Processes(tmp_path / "store") as store:
        url = start_redis(store)
        (tmp_path / "door").mkdir()
        with PenstockJobs("chat", "", "chat", 1).serve(tmp_path / "door", url) as serving:
            *program, last = serving.client
            assert last == "chat"
            for form in ("chat", "stream", "jobs"):
                found = measured(replace(serving, client=[*program, form]), store)
                assert found.jobs > 0 and found.wrong == [] and set(found.cpu) == {"redis", "api-1", "worker-1"}


def test_an_answer_is_whole_at_its_end_and_not_before() -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ):
        framing = Framing()
        whole = [framing.ends_with(answer[at : at + 1]) for at in range(len(answer))]
        assert whole == [False] * (len(answer) - 1) + [True]
    assert b'"max_tokens":1' in CHAT


def test_callers_that_come_to_grief_are_an_error_with_their_last_words(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        serving = ServingJobs(processes, [sys.executable, "-c", "raise SystemExit('no such server')"], "")
        with pytest.raises(ClientFailed, match="no such server"):
            measure(serving, processes, CallerPlan("", 1, 0.0, 0.1))
