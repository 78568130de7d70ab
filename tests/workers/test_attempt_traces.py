"""Spans of attempts in one worker: how long a job waited, and which attempt each one follows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from otlp_collector import Collector, attributes_of, collector
from sim_worker import a_claim

from penstock.engine import ChatTurn, Sampling
from streaming.jobs.codec import Terminal, Usage, decode_job, encode
from streaming.jobs.job import Chat, Job, JobState, PastAttempt
from streaming.jobs.lease import PREEMPTED
from streaming.jobs.reaper import attempt_id, own_attempts
from streaming.order import Priority
from telemetry.process import start_tracing
from telemetry.tracing import Tracing
from workers.attempt import Attempt
from workers.record import AttemptTraces

__all__ = ["collector"]  # a fixture

REPLAYED = PastAttempt("worker-0", 1, 2, 0, "lost")
JOB = Job(
    id="0-job",
    model="m",
    tenant="t",
    priority=Priority.BATCH,
    prompt=Chat((ChatTurn("user", "hi"),)),
    sampling=Sampling(),
    past=(REPLAYED,),
)


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    tracing = start_tracing("worker", collector.url)
    yield tracing
    tracing.close()


def claimed(job: Job, number: int, claimed_ms: int, earlier: tuple[PastAttempt, ...] = ()) -> Attempt:
    return Attempt(a_claim(job, number, claimed_ms=claimed_ms, earlier_attempts=earlier))


def sampled(tracing: Tracing) -> Job:
    changed: Job = replace(JOB, trace=tracing.enter("chat").carrier())
    return changed


def test_a_claim_that_waited_for_its_worker_ends_the_wait_when_it_was_made(
    tracing: Tracing, collector: Collector
) -> None:
    """The time between the claim and the worker's hand-over to its engine belongs to the attempt, not to no span."""
    job = sampled(tracing)
    traces, held = AttemptTraces(tracing, "worker-1"), claimed(job, 1, 3_000)
    now_ns = time.time_ns()
    traces.claimed(held, 5_000_000)
    end = Terminal(job.id, JobState.COMPLETED, 0)
    traces.over(held, end)
    traces.written([end])
    tracing.close()
    wait, attempt = (next(span for span in collector.sent if span.name == name) for name in ("queue", "chat m"))
    assert wait.end_time_unix_nano == attempt.start_time_unix_nano <= now_ns - 4_000_000_000
    assert wait.end_time_unix_nano - wait.start_time_unix_nano == 2_000_000_000


def test_the_trace_of_a_later_version_goes_on(tracing: Tracing, collector: Collector) -> None:
    """A job of version N+1 in a mixed fleet: a traceparent with more in it, and fields that nobody knows yet."""
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    carried = {"traceparent": f"01-{trace_id}-{span_id}-01-later", "tracestate": "a=b", "unheard-of": "x"}
    job: Job = replace(JOB, trace=carried)
    job = decode_job(encode(job))
    traces, held = AttemptTraces(tracing, "worker-1"), claimed(job, 1, 3_000)
    traces.claimed(held)
    end = Terminal(job.id, JobState.COMPLETED, 0)
    traces.over(held, end)
    traces.written([end])
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
    first, second = AttemptTraces(tracing, "worker-1"), AttemptTraces(tracing, "worker-2")
    first.claimed(claimed(job, 1, 3_000))
    first.put_back(job.id, PREEMPTED)
    heir = claimed(job, 2, 9_500, (PastAttempt("worker-1", 3_000, 9_000, None, PREEMPTED),))
    second.claimed(heir)
    end = Terminal(job.id, JobState.COMPLETED, 0, usage=Usage(1, 2))
    second.over(heir, end)
    second.written([end])
    tracing.close()
    one, two = (span for span in collector.sent if span.name == "chat m")
    assert (attributes_of(one)["penstock.worker"], attributes_of(two)["penstock.worker"]) == ("worker-1", "worker-2")
    assert one.span_id.hex() == attempt_id(job, 3_000) and [link.span_id for link in two.links] == [one.span_id]
    assert attributes_of(one)["penstock.job.state"] == PREEMPTED
    waits = [
        (span.end_time_unix_nano - span.start_time_unix_nano) // 1_000_000
        for span in collector.sent
        if span.name == "queue"
    ]
    assert waits == [2_000, 500]


def test_an_attempt_that_others_have_now_is_not_written_here(tracing: Tracing, collector: Collector) -> None:
    """A worker that was fenced says nothing: whoever ends the job describes it as lost, under the same id."""
    job = sampled(tracing)
    traces = AttemptTraces(tracing, "worker-1")
    traces.claimed(claimed(job, 1, 3_000))
    traces.forget(job.id)
    traces.written([Terminal(job.id, JobState.COMPLETED, 0)])
    heir = claimed(job, 2, 9_500, (PastAttempt("worker-1", 3_000, 9_000, None, "lost"),))
    traces.claimed(heir)
    end = Terminal(job.id, JobState.COMPLETED, 0)
    traces.over(heir, end)
    traces.written([end])
    tracing.close()
    assert [
        attributes_of(span)["penstock.job.state"]
        for span in sorted(collector.sent, key=lambda each: each.name)
        if span.name == "chat m"
    ].count("lost") == 1
    ids = [span.span_id.hex() for span in collector.sent if span.name == "chat m"]
    assert sorted(ids) == sorted({attempt_id(job, 3_000), attempt_id(job, 9_500)})


def test_attempts_at_the_job_that_is_replayed_are_not_its_own() -> None:
    """Their spans belong to another job, whose ids nobody can find from this one."""
    own = PastAttempt("worker-1", 3_000, 9_000, None, "lost")
    assert own_attempts(JOB, (REPLAYED, own)) == [own]


def test_a_job_without_a_sampled_trace_costs_no_span(tracing: Tracing, collector: Collector) -> None:
    """Neither one that is not sampled, nor one of a version that wrote no context, nor one with a broken one; the
    engine's calls carry on only what is well-formed."""
    traces = AttemptTraces(tracing, "worker-1")
    known = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    for context, passed in (({}, ""), ({"traceparent": known}, known), ({"traceparent": "a\r\nb: c"}, "")):
        attempt = claimed(replace(JOB, trace=context), 1, 3_000)
        traces.claimed(attempt)
        assert attempt.trace == passed
        end = Terminal(JOB.id, JobState.COMPLETED, 0)
        traces.over(attempt, end)
        traces.written([end])
    tracing.close()
    assert collector.sent == []
