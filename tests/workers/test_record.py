"""What a worker tells the outside about its jobs: numbers, and spans of its attempts."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from otlp_collector import Collector, attributes_of, collector
from prometheus_client.parser import text_string_to_metric_families
from sim_worker import a_claim

from penstock.config import Config
from penstock.engine import ChatTurn, Failure, Sampling, Stats
from penstock.process import Launch
from streaming.fleet.processes import this_process
from streaming.jobs.codec import Generated, Terminal, Usage, decode_job, encode
from streaming.jobs.job import Chat, Job, JobState, PastAttempt
from streaming.jobs.lease import PREEMPTED
from streaming.jobs.spans import attempt_id
from streaming.order import Priority
from telemetry.gpu import GpuReading
from telemetry.metrics import Metrics
from telemetry.process import start_tracing
from telemetry.tracing import Tracing
from workers.__main__ import WorkerProcess
from workers.attempt import Attempt
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import MANY_ATTEMPTS, Recorder

__all__ = ["collector"]  # a fixture

PROMPT = Chat((ChatTurn("user", "hi"),))
JOB = Job(id="0-job", model="m", tenant="t", priority=Priority.BATCH, prompt=PROMPT, sampling=Sampling())


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


def test_the_end_of_each_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each state, with the jobs' ids, by which `penstock logs --job` finds it."""
    recorder = Recorder("m", Metrics.start("", "worker"), Tracing())
    ends = [("a", JobState.FAILED), ("b", JobState.COMPLETED), ("c", JobState.COMPLETED)]
    with caplog.at_level(logging.INFO):
        recorder.written([(attempt(1), Terminal("x", JobState.CANCELLED, 0))], 1, "worker-1")
        recorder.written([(attempt(1), Terminal(job, state, 0)) for job, state in ends], 1, "worker-1")
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
    launch = Launch(Namespace(), Config({}), lifeline, ExitStack())
    engine = SimEngine("sim", SimSettings())
    process = WorkerProcess(this_process("worker", "worker-1"), launch, engine, metrics, Tracing())
    assert (process._facts()["gpus"], process._facts()["gpu_busy"]) == ({}, {})
    process._gpus = SimpleNamespace(read=lambda: readings)
    facts = process._facts()
    assert facts["gpus"] == {"GPU-1": 7.5, "GPU-3": 9.0}
    assert facts["gpu_busy"] == {"GPU-1": 0.5, "GPU-2": 0.0}


REPLAYED = PastAttempt("worker-0", 1, 2, 0, "lost")
REPLAY: Job = replace(JOB, past=(REPLAYED,))


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    tracing = start_tracing("worker", collector.url)
    yield tracing
    tracing.close()


def claimed(job: Job, number: int, claimed_ms: int, earlier: tuple[PastAttempt, ...] = ()) -> Attempt:
    return Attempt(a_claim(job, number, claimed_ms=claimed_ms, earlier_attempts=earlier))


def a_recorder(tracing: Tracing, worker: str = "worker-1") -> Recorder:
    return Recorder("m", Metrics.start("", "worker"), tracing, worker=worker)


def end(traces: Recorder, attempt: Attempt) -> None:
    """Its job is completed, and that is written."""
    terminal = Terminal(attempt.job.id, JobState.COMPLETED, 0, usage=Usage(1, 2))
    traces.ended(attempt, terminal)
    traces.written([(attempt, terminal)], 1, "worker-1")


def sampled(tracing: Tracing) -> Job:
    return replace(REPLAY, trace=tracing.enter("chat").carrier())


def test_a_claim_that_waited_for_its_worker_ends_the_wait_when_it_was_made(
    tracing: Tracing, collector: Collector
) -> None:
    """The time between the claim and the worker's hand-over to its engine belongs to the attempt, not to no span."""
    job = sampled(tracing)
    traces, held = a_recorder(tracing), claimed(job, 1, 3_000)
    now_ns = time.time_ns()
    held.claim = replace(held.claim, claimed_us=1_000_000)
    traces.claimed(held, 6_000_000)
    end(traces, held)
    tracing.close()
    wait, attempt = (next(span for span in collector.sent if span.name == name) for name in ("queue", "chat m"))
    assert wait.end_time_unix_nano == attempt.start_time_unix_nano <= now_ns - 4_000_000_000
    assert wait.end_time_unix_nano - wait.start_time_unix_nano == 2_000_000_000


def test_the_trace_of_a_later_version_goes_on(tracing: Tracing, collector: Collector) -> None:
    """A job of version N+1 in a mixed fleet: a traceparent with more in it, and fields that nobody knows yet."""
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    carried = {"traceparent": f"01-{trace_id}-{span_id}-01-later", "tracestate": "a=b", "unheard-of": "x"}
    job: Job = replace(REPLAY, trace=carried)
    job = decode_job(encode(job))
    traces, held = a_recorder(tracing), claimed(job, 1, 3_000)
    traces.claimed(held)
    end(traces, held)
    tracing.close()
    spans = {span.name: span for span in collector.sent}
    assert {"queue", "chat m", "finish"} <= spans.keys()
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert spans["chat m"].parent_span_id.hex() == span_id
    assert held.trace == f"00-{trace_id}-{spans['chat m'].span_id.hex()}-01"


def test_a_preempted_attempt_and_the_next_one_are_linked(tracing: Tracing, collector: Collector) -> None:
    """Each worker writes its own span; the second finds the id of the first from the record. The wait of the second is
    that since the first ended."""
    job = sampled(tracing)
    first, second = a_recorder(tracing), a_recorder(tracing, "worker-2")
    first.claimed(claimed(job, 1, 3_000))
    first.released(job.id, PREEMPTED)
    heir = claimed(job, 2, 9_500, (PastAttempt("worker-1", 3_000, 9_000, None, PREEMPTED),))
    second.claimed(heir)
    end(second, heir)
    tracing.close()
    one, two = (span for span in collector.sent if span.name == "chat m")
    assert (attributes_of(one)["penstock.worker"], attributes_of(two)["penstock.worker"]) == ("worker-1", "worker-2")
    assert one.span_id.hex() == attempt_id(job, 3_000) and [link.span_id for link in two.links] == [one.span_id]
    assert attributes_of(one)["penstock.job.state"] == PREEMPTED
    queued = [span for span in collector.sent if span.name == "queue"]
    assert [(span.end_time_unix_nano - span.start_time_unix_nano) // 1_000_000 for span in queued] == [2_000, 500]


def test_an_attempt_that_others_have_now_is_not_written_here(tracing: Tracing, collector: Collector) -> None:
    """A worker that was fenced says nothing: whoever ends the job describes it as lost, under the same id."""
    job = sampled(tracing)
    traces = a_recorder(tracing)
    lost = claimed(job, 1, 3_000)
    traces.claimed(lost)
    traces.lost(job.id)
    traces.written([(lost, Terminal(job.id, JobState.COMPLETED, 0))], 1, "worker-1")
    heir = claimed(job, 2, 9_500, (PastAttempt("worker-1", 3_000, 9_000, None, "lost"),))
    traces.claimed(heir)
    end(traces, heir)
    tracing.close()
    chats = [span for span in collector.sent if span.name == "chat m"]
    assert [attributes_of(span)["penstock.job.state"] for span in chats].count("lost") == 1
    assert sorted(span.span_id.hex() for span in chats) == sorted({attempt_id(job, 3_000), attempt_id(job, 9_500)})


def test_a_job_without_a_sampled_trace_costs_no_span(tracing: Tracing, collector: Collector) -> None:
    """Neither one that is not sampled, nor one of a version that wrote no context, nor one with a broken one; the
    engine's calls carry on only what is well-formed."""
    traces = a_recorder(tracing)
    known = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    for context, passed in (({}, ""), ({"traceparent": known}, known), ({"traceparent": "a\r\nb: c"}, "")):
        attempt = claimed(replace(REPLAY, trace=context), 1, 3_000)
        traces.claimed(attempt)
        assert attempt.trace == passed
        end(traces, attempt)
    tracing.close()
    assert collector.sent == []
