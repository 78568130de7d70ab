"""Telemetry recorder of a worker: work counters, job metrics, and of each job its log lines, record and spans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from penstock.engine import Stats
from streaming.fleet.process import Served
from streaming.jobs.codec import Terminal
from streaming.jobs.job import JobState
from streaming.jobs.lease import HANDED_BACK
from streaming.jobs.records import JobRecord, end_record, request_record
from streaming.jobs.spans import attempt_id, link_before, own_attempts, requested, span_name, write_lost
from telemetry import tracing as names
from telemetry.gpu import GpuReading
from telemetry.latency import PARTS, engine_parts, lost_between
from telemetry.logs import EventLog
from telemetry.metrics import Metrics
from telemetry.otlp import Attributes
from telemetry.records.schema import RequestRecord
from telemetry.records.writer import NO_RECORDS, RecordSink
from telemetry.tracing import TRACEPARENT, Span, Tracing, extract, is_sampled
from workers.attempt import Attempt
from workers.gate import GateReason
from workers.writer import StepWrite

RATE_WINDOW_S, MIN_RATE_S = 4.0, 1.0
"""The rate of tokens is of two heartbeats, and of at least a second."""
MANY_ATTEMPTS = 10
"""From this attempt on, all share one label: a job that is handed back may have any number of attempts."""
events = EventLog(__name__)

ATTEMPTS = (*map(str, range(MANY_ATTEMPTS)), f"{MANY_ATTEMPTS}+")


class WorkCounters:
    """Counts engine steps, and ended jobs by lane, for the scheduler, which derives rates. One per worker process."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = 0.0
        self.step_tokens = 0
        self.served: dict[str, Served] = {}
        """By lane."""
        self.tokens = 0
        """Tokens written to the store, with those that fallback models gave."""
        self._marks = deque([(time.monotonic(), 0)])
        """Times, and `tokens` then."""
        self._last: float | None = None

    def step(self, tokens: int, now: float, *, more: bool) -> None:
        """Count an engine step that produced `tokens` at `now` (monotonic seconds); `more`: some job still runs.

        A step's duration is the time since the previous one; the first step after a pause is not counted.
        """
        if self._last is not None:
            self.steps += 1
            self.step_s += now - self._last
            self.step_tokens += tokens
        self._last = now if more else None

    def tokens_per_s(self, now: float) -> float:
        """The rate of `tokens` since a call that is RATE_WINDOW_S old, or since the oldest one."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= now - RATE_WINDOW_S:
            marks.popleft()
        since, tokens = marks[0]
        marks.append((now, self.tokens))
        return (self.tokens - tokens) / max(now - since, MIN_RATE_S)

    def ended(self, lane: str, end: Terminal) -> None:
        """Count a job that ended."""
        before = self.served.get(lane) or Served()
        failed = end.failure is not None and end.failure.status >= 500
        tokens = before.tokens + end.usage.prompt + end.usage.completion
        self.served[lane] = Served(before.jobs + 1, tokens, before.failed + failed)


class Recorder:
    """Writes what happened to attempts as metrics, log lines, records and spans. One per worker process.

    An attempt whose trace is sampled has up to four spans: `queue`, from the acceptance (or from the end of the attempt
    before) to the claim; the attempt itself, from the claim until the store has its end, named as the GenAI conventions
    ask; in it `engine`, from the hand-over to the last token; and `finish`, the write of its end. The span of an
    attempt links to that of the attempt before it, whichever worker had that one (streaming/jobs/spans.py).
    """

    def __init__(
        self,
        model: str,
        metrics: Metrics,
        tracing: Tracing,
        tally: WorkCounters | None = None,
        sink: RecordSink = NO_RECORDS,
        process: str = "",
        worker: str = "",
    ) -> None:
        """
        Args:
            sink: gets a record of each job, of `process`.
            worker: its name in `penstock ps`.
        """
        self.sink, self._process = sink, process
        self._model, self.metrics = model, metrics
        self.tracing, self._worker = tracing, worker
        self._spans: dict[str, tuple[Attempt, Span]] = {}
        """By job, the spans of attempts that are open."""
        self._finishing: dict[str, Span] = {}
        """By job, the spans of ends that are being written."""
        self._prompt, self._cached = (metrics.tokens.labels(model, kind) for kind in ("prompt", "cached"))
        self._parts = {part.name: metrics.parts.labels(model, part.name) for part in PARTS[:-1]}
        self._tally = tally or WorkCounters()
        self._evictions = self._miscounted = self._swaps = 0

    def claimed(self, attempt: Attempt, now_us: int = 0) -> None:
        """Record that the worker claimed a job. `now_us`: Redis time, 0: not known."""
        job, claim = attempt.job, attempt.claim
        self.metrics.claims.labels(self._model, job.priority).inc()
        attempt_label = ATTEMPTS[min(claim.attempt, MANY_ATTEMPTS)]
        self.metrics.attempts.labels(self._model, attempt_label).inc()
        if attempt.seq:
            self.metrics.continuations.labels(self._model).inc()
        if claim.attempt == 1:
            waited_s = max(0, claim.claimed_ms - claim.created_ms) / 1000
            self.metrics.queue_time.labels(self._model, job.priority).observe(waited_s)
        self._begin_spans(attempt, max(0, now_us - claim.claimed_us) if now_us and claim.claimed_us else 0)

    def ended(self, attempt: Attempt, end: Terminal) -> None:
        """Record a job's terminal state."""
        metrics, usage = self.metrics, end.usage
        self._tally.ended(attempt.job.priority, end)
        metrics.jobs.labels(self._model, end.state).inc()
        if end.state is JobState.COMPLETED:
            self._count_parts(attempt, end)
        if end.served_by:
            self._served_by_others(attempt)
        else:
            self._prompt.inc(usage.prompt)
            self._cached.inc(usage.cached)
        if cancelled_at := attempt.stamps.cancelled:
            metrics.cancel_to_abort.labels(self._model).observe(time.monotonic() - cancelled_at)
        if end.state is JobState.EXPIRED:
            metrics.deadline_misses.labels("running").inc()
        if end.state is JobState.FAILED:
            self.failed(end)
        if (found := self._spans.get(end.job)) is not None:
            self._write_engine_span(*found)
            self._finishing[end.job] = self.tracing.span(
                "finish", found[1].carrier(), attributes={names.JOB_STATE: end.state}
            )

    def _count_parts(self, attempt: Attempt, end: Terminal) -> None:
        """Count how long the job took by part, up to the engine's last token; the API counts the rest."""
        claim, made = attempt.claim, end.generated
        started_us = claim.started_us or claim.claimed_us
        times = (attempt.job.received_us, claim.accepted_us, started_us)
        here, lost_us, parts = (claim.claimed_us, made.released, made.scheduled, made.first), 0, self._parts
        if made.shown:
            here = (made.shown_claimed, 0, 0, made.shown)
            lost_us = lost_between(made.shown, made.first or made.last, made.kept)
        for part, spent_us in engine_parts((*times, *here, made.last), lost_us).items():
            parts[part].observe(spent_us / 1_000_000)

    def logged(self, step: StepWrite) -> None:
        """Count the tokens of a step that the store has."""
        for model, count in step.tokens.items():
            self._tally.tokens += count
            self.metrics.tokens.labels(model or self._model, "completion").inc(count)

    def _served_by_others(self, attempt: Attempt) -> None:
        """Count the prompts of a job whose answer, or a part of it, another model gave."""
        for model, usage in attempt.usage_by_model().items():
            for kind, count in (("prompt", usage.prompt), ("cached", usage.cached)):
                self.metrics.tokens.labels(model, kind).inc(count)
            if model != self._model:
                self.metrics.fallbacks.labels(self._model, model).inc()

    def written(self, ended: Sequence[tuple[Attempt, Terminal]], now_us: int, worker: str) -> None:
        """Log the ends of jobs that the store has, one line for each state, and write their records. A job that another
        worker ends, or that a script has ended before, gets its record there. `now_us`: Redis time, 0: not known."""
        for attempt, end in ended:
            if self.sink is not NO_RECORDS:
                self.sink.write(self._record_of(attempt, end, now_us or wall_us()))
            self._end_spans(attempt, end)
        for state in dict.fromkeys([end.state for _, end in ended]):
            those = [(attempt, end) for attempt, end in ended if end.state is state]
            trace_ids = [attempt.trace[3:35] for attempt, _ in those]
            events.write(f"jobs {state}", jobs=[end.job for _, end in those], worker=worker, trace_ids=trace_ids)

    def unreadable(self, end: Terminal, ended_us: int) -> None:
        """Record the end of a job that cannot be read."""
        ended_us, code = ended_us or wall_us(), end.failure.code if end.failure else ""
        record = RequestRecord(
            id=end.job, ended_us=ended_us, state=end.state.value, model=self._model, by=self._process, code=code
        )
        self.sink.write(record)
        self.failed(end)

    def ended_by_script(self, record: JobRecord) -> None:
        """Write the record of a job that a script ended, which this process's sweep has found."""
        self.sink.write(request_record(record, self._process))

    def failed(self, end: Terminal) -> None:
        """Count a failed job by its reason."""
        self.metrics.job_failures.labels(end.failure.code if end.failure else "job_failed").inc()

    def waits_at_gate(self, reason: GateReason) -> None:
        """Count a text that the gate did not let begin at once."""
        self.metrics.gate_waits.labels(self._model, reason).inc()

    def gate(self, peak: int, reserve: float) -> None:
        """Set the gauges of the gate: tokens of KV cache that the running texts will hold at most, and the reserve."""
        self.metrics.gate_peak.labels(self._model).set(peak)
        self.metrics.gate_reserve.labels(self._model).set(reserve)

    def preempted(self) -> None:
        """Record that a job gave up its slot for one of lane interactive."""
        self.metrics.preemptions.labels(self._model).inc()

    def released(self, job_id: str, outcome: str = HANDED_BACK) -> None:
        """Record that the worker put a job back unfinished. `outcome`: HANDED_BACK, PREEMPTED or RETURNED."""
        if (found := self._spans.pop(job_id, None)) is not None:
            attempt, span = found
            self._write_engine_span(attempt, span)
            span.add_event(outcome)
            span.end(attributes={names.JOB_STATE: outcome, **_continued(attempt)})

    def lost(self, job_id: str) -> None:
        """Record that a job is no longer this worker's: another one runs it, or has ended it. That process, or the
        job's record, says what became of it."""
        self._spans.pop(job_id, None)
        self._finishing.pop(job_id, None)

    def engine(self, stats: Stats, reserved: int = 0) -> None:
        """Set the gauges of the engine's slots and cache, and count what it has evicted since the last call."""
        metrics, model = self.metrics, self._model
        metrics.worker_slots.labels(model).set(stats.slots)
        metrics.worker_running.labels(model).set(stats.running)
        metrics.worker_reserved.labels(model).set(reserved)
        if stats.kv_tokens:
            metrics.worker_kv.labels(model).set(stats.kv_tokens)
            metrics.worker_kv_used.labels(model).set(stats.kv_used)
        metrics.evictions.labels(model).inc(_grown(self._evictions, stats.evictions))
        metrics.miscounted.labels(model).inc(_grown(self._miscounted, stats.miscounted))
        metrics.swaps.labels(model).inc(_grown(self._swaps, stats.swaps))
        self._evictions, self._miscounted, self._swaps = stats.evictions, stats.miscounted, stats.swaps

    def gpus(self, readings: Mapping[str, GpuReading]) -> None:
        """Set the gauges of this machine's GPUs, by UUID; what a GPU does not tell has no series."""
        metrics = self.metrics
        gauges = (metrics.gpu_energy, metrics.gpu_busy, metrics.gpu_power, metrics.gpu_memory)  # in a reading's order
        for gpu, reading in readings.items():
            for gauge, value in zip(gauges, reading, strict=True):
                if value is not None:
                    gauge.labels(gpu).set(value)

    # --- records and spans of attempts --------------------------------------------------------------------------------

    def _record_of(self, attempt: Attempt, end: Terminal, ended_us: int) -> RequestRecord:
        job, claim = attempt.job, attempt.claim
        return end_record(
            job,
            end,
            claim.earlier_attempts,
            ended_us=ended_us,
            state=end.state.value,
            model=self._model,
            by=self._process,
            received_us=job.received_us,
            accepted_us=claim.accepted_us,
            started_us=claim.started_us or claim.claimed_us,
            claimed_us=claim.claimed_us,
            continued_tokens=sum(attempt.continued_tokens),
            choices=attempt.choices,
            stream=job.stream,
            attempts=claim.attempt,
        )

    def _begin_spans(self, attempt: Attempt, ago_us: int) -> None:
        """Write the span of the wait that has ended, and begin that of the attempt. `ago_us`: since the claim."""
        job, claim = attempt.job, attempt.claim
        attempt.trace = extract(job.trace).get(TRACEPARENT, "")
        if not (self.tracing.recording and is_sampled(job.trace)):
            return
        claimed_ns, earlier = time.time_ns() - 1000 * ago_us, own_attempts(job, claim.earlier_attempts)
        # The store's clock measured the wait; this process's clock places it.
        waits_since_ms = earlier[-1].ended_ms if earlier else claim.created_ms
        about: Attributes = {names.JOB_ID: job.id, names.PRIORITY: str(job.priority), names.ATTEMPT: claim.attempt}
        began_ns = claimed_ns - max(0, claim.claimed_ms - waits_since_ms) * 1_000_000
        self.tracing.span("queue", job.trace, "consumer", began_ns, about).end(claimed_ns)
        span = self.tracing.span(
            span_name(job),
            job.trace,
            "internal",
            claimed_ns,
            {**about, **requested(job), names.TENANT: job.tenant, names.WORKER: self._worker},
            link_before(job, earlier),
            attempt_id(job, claim.claimed_ms),
        )
        attempt.trace = span.carrier()[TRACEPARENT]
        self._spans[job.id] = attempt, span

    def _end_spans(self, attempt: Attempt, end: Terminal) -> None:
        """The store has this end."""
        if (finishing := self._finishing.pop(end.job, None)) is not None:
            finishing.end()
        if (found := self._spans.pop(end.job, None)) is not None:
            error = end.failure.code if end.failure else None
            found[1].end(error=error, attributes={**answered(attempt, end), **_continued(attempt)})
            write_lost(self.tracing, attempt.job, attempt.claim.earlier_attempts, attempt.claim.attempt)

    def _write_engine_span(self, attempt: Attempt, parent: Span) -> None:
        stamps = attempt.stamps
        if not stamps.released:
            return
        since_ns = time.time_ns() - time.monotonic_ns()

        def at_ns(seconds: float) -> int:
            return since_ns + int(seconds * 1e9)

        span = self.tracing.span("engine", parent.carrier(), "internal", at_ns(stamps.released))
        if stamps.scheduled:
            span.add_event("scheduled", at_ns(stamps.scheduled))
        if stamps.first:
            span.add_event("next token" if attempt.first_ms else "first token", at_ns(stamps.first))
        span.end(at_ns(stamps.last) if stamps.last else None)


def _grown(before: int, now: int) -> int:
    """By how much an engine's count has grown; it begins anew with a new engine, and is then less than before."""
    return now - before if now >= before else now


def wall_us() -> int:
    """This machine's time in microseconds."""
    return int(time.time() * 1_000_000)


@runtime_checkable
class CallTracer(Protocol):
    """An engine that records its calls to other servers as spans under `Request.trace`."""

    def trace_calls(self, tracing: Tracing) -> None:
        """Called once, before the engine starts."""


def answered(attempt: Attempt, end: Terminal) -> dict[str, str | int | float | bool | Sequence[str]]:
    """What the answer has."""
    found: dict[str, str | int | float | bool | Sequence[str]] = {
        names.JOB_STATE: str(end.state),
        names.RESPONSE_ID: end.job,
        names.RESPONSE_MODEL: end.served_by[0] if end.served_by else attempt.job.full_model,
        names.INPUT_TOKENS: end.usage.prompt,
        names.CACHED_TOKENS: end.usage.cached,
        names.OUTPUT_TOKENS: end.usage.completion,
    }
    if end.failure is not None:
        found[names.ERROR_TYPE] = end.failure.code
    if reasons := [reason for reason in end.finishes if reason]:
        found[names.FINISH_REASONS] = reasons
    stamps = attempt.stamps
    if attempt.job.stream and stamps.first and stamps.released and not attempt.claim.earlier_runs:
        found[names.FIRST_CHUNK] = round(stamps.first - stamps.released, 6)
    return found


def _continued(attempt: Attempt) -> dict[str, int]:
    count = sum(attempt.continued_tokens)
    return {names.CONTINUED_TOKENS: count} if count else {}
