"""What a worker tells the outside about its jobs, in numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from sim_worker import a_claim

from penstock.config import Config
from penstock.engine import ChatTurn, Failure, Sampling, Stats
from streaming.fleet.processes import this_process
from streaming.jobs.codec import Generated, Terminal
from streaming.jobs.job import Chat, Job, JobState
from streaming.order import Priority
from telemetry.gpu import GpuReading
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.__main__ import WorkerProcess
from workers.attempt import Attempt
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import MANY_ATTEMPTS, Recorder

JOB = Job(
    id="0-job",
    model="m",
    tenant="t",
    priority=Priority.BATCH,
    prompt=Chat((ChatTurn("user", "hi"),)),
    sampling=Sampling(),
)


def attempt(number: int) -> Attempt:
    """Of a job that has waited for two seconds."""
    return Attempt(a_claim(JOB, number))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics.start("", "worker")


def shown(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """A metric's numbers on the page, by its labels' values, sorted by the labels' names."""
    families = text_string_to_metric_families(metrics.expose().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in samples}


def test_jobs_are_counted_by_how_often_they_were_begun(metrics: Metrics) -> None:
    """From some number on together: a job that is handed back may have any. Only its first claim ends its wait."""
    recorder = Recorder("m", metrics, Tracing())
    for number in (1, 2, 2, MANY_ATTEMPTS, MANY_ATTEMPTS + 30):
        recorder.claimed(attempt(number))
    assert shown(metrics, "penstock_attempts_total") == {("1", "m"): 1, ("2", "m"): 2, ("10+", "m"): 2}
    assert shown(metrics, "penstock_claims_total") == {("m", "batch"): 5}
    assert shown(metrics, "penstock_queue_time_seconds_count") == {("m", "batch"): 1}
    assert shown(metrics, "penstock_queue_time_seconds_sum") == {("m", "batch"): 2}


def test_failed_jobs_alone_are_counted_as_failures(metrics: Metrics) -> None:
    """By their reasons; the codes of cancelled and expired ones are no failures."""
    recorder = Recorder("m", metrics, Tracing())
    for state, code in ((JobState.FAILED, "engine_error"), (JobState.CANCELLED, "c"), (JobState.EXPIRED, "e")):
        recorder.ended(attempt(1), Terminal(JOB.id, state, 0, failure=Failure(code, "", 500)))
    recorder.ended(attempt(1), Terminal(JOB.id, JobState.COMPLETED, 0))
    assert shown(metrics, "penstock_job_failures_total") == {("engine_error",): 1}
    assert shown(metrics, "penstock_jobs_total").keys() == {("m", str(state)) for state in JobState if state.final}


def test_the_parts_of_completed_jobs_are_counted(metrics: Metrics) -> None:
    """In seconds, up to the engine's last token; not of a job that failed, and not a part whose end is not known."""
    recorder, held = Recorder("m", metrics, Tracing()), attempt(1)
    held.claim = replace(held.claim, accepted_us=1_000_000, claimed_us=3_000_000)
    made = Generated(3_500_000, 0, 4_000_000, 9_000_000)
    recorder.ended(held, Terminal(JOB.id, JobState.FAILED, 0, failure=Failure("x", "", 500), generated=made))
    recorder.ended(held, Terminal(JOB.id, JobState.COMPLETED, 0, generated=made))
    counts = {part: count for (_, part), count in shown(metrics, "penstock_part_seconds_count").items() if count}
    sums = {part: spent for (_, part), spent in shown(metrics, "penstock_part_seconds_sum").items() if part in counts}
    assert sums == {"queue": 2.0, "retries": 0.0, "gate": 0.5, "prefill": 0.5, "decode": 5.0}
    assert counts == dict.fromkeys(sums, 1)


def test_the_slots_of_the_engine_are_shown(metrics: Metrics) -> None:
    """All there are, those that jobs hold, and those kept for jobs that come."""
    Recorder("m", metrics, Tracing()).engine(Stats(slots=8, running=5), 2)
    names = ("slots", "running", "reserved_slots")
    assert [shown(metrics, f"penstock_worker_{name}") for name in names] == [{("m",): 8}, {("m",): 5}, {("m",): 2}]


def test_the_end_of_each_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each state, with the jobs' ids, by which `penstock logs --job` finds it."""
    recorder = Recorder("m", Metrics.start("", "worker"), Tracing())
    ends = [("a", JobState.FAILED), ("b", JobState.COMPLETED), ("c", JobState.COMPLETED)]
    with caplog.at_level(logging.INFO):
        recorder.written([Terminal("x", JobState.CANCELLED, 0)], "worker-1")
        recorder.written([Terminal(job, state, 0) for job, state in ends], "worker-1")
    found = [(each.message, vars(each)["jobs"], vars(each)["worker"]) for each in caplog.records]
    assert found == [
        ("jobs cancelled", ["x"], "worker-1"),
        ("jobs failed", ["a"], "worker-1"),
        ("jobs completed", ["b", "c"], "worker-1"),
    ]


def test_evictions_are_counted_once_and_a_cache_without_a_limit_is_absent(metrics: Metrics) -> None:
    """The engine counts from its start: less than before means that it has begun anew."""
    recorder = Recorder("m", metrics, Tracing())
    recorder.engine(Stats(slots=4, evictions=2))
    assert shown(metrics, "penstock_worker_kv_tokens") == {}
    for evictions in (5, 5, 1):
        recorder.engine(Stats(slots=4, kv_tokens=100, kv_used=30, evictions=evictions))
    assert shown(metrics, "penstock_engine_evictions_total") == {("m",): 6}
    assert shown(metrics, "penstock_worker_kv_tokens") == {("m",): 100}
    assert shown(metrics, "penstock_worker_kv_used_tokens") == {("m",): 30}


def test_a_sample_has_the_energy_and_the_load_of_the_gpus_that_tell_them(metrics: Metrics) -> None:
    """A report finds joules by them, so 0 joules of a GPU that does not tell would be energy for nothing."""
    readings = {"GPU-1": GpuReading(7.5, 0.5), "GPU-2": GpuReading(busy=0.0, watts=310.5), "GPU-3": GpuReading(9.0)}
    lifeline: Any = SimpleNamespace(say=lambda state, detail="": None)
    engine = SimEngine("sim", SimSettings())
    process = WorkerProcess(this_process("worker", "worker-1"), Config({}), engine, metrics, Tracing(), lifeline)
    assert (process._facts()["gpus"], process._facts()["gpu_busy"]) == ({}, {})
    process._gpus = SimpleNamespace(read=lambda: readings)
    facts = process._facts()
    assert facts["gpus"] == {"GPU-1": 7.5, "GPU-3": 9.0}
    assert facts["gpu_busy"] == {"GPU-1": 0.5, "GPU-2": 0.0}


def test_gpus_that_tell_nothing_have_no_series(metrics: Metrics) -> None:
    """Absent, never 0."""
    recorder = Recorder("m", metrics, Tracing())
    recorder.gpus({})
    assert shown(metrics, "penstock_gpu_energy_joules") == {} == shown(metrics, "penstock_gpu_busy_ratio")
    recorder.gpus({"GPU-1": GpuReading(joules=7.5), "GPU-2": GpuReading(busy=0.0, watts=310.5)})
    assert shown(metrics, "penstock_gpu_energy_joules") == {("GPU-1",): 7.5}
    assert shown(metrics, "penstock_gpu_busy_ratio") == {("GPU-2",): 0.0}
    assert shown(metrics, "penstock_gpu_power_watts") == {("GPU-2",): 310.5}
    assert shown(metrics, "penstock_gpu_memory_used_bytes") == {}


def test_a_job_that_goes_on_with_earlier_tokens_is_counted(metrics: Metrics) -> None:
    """One that begins anew is not."""
    recorder = Recorder("m", metrics, Tracing())
    recorder.claimed(attempt(2))
    continued = attempt(2)
    continued.seq = 3
    recorder.claimed(continued)
    assert shown(metrics, "penstock_continuations_total") == {("m",): 1}
