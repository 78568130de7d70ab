"""Planted bugs of traces: a trace that is cut where a worker dies, and clients that decide what is recorded."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

TRACING = "tests/telemetry/test_tracing.py::test_"
ATTEMPTS = "tests/workers/test_attempt_traces.py::test_"
SPANS = "telemetry/recorded_spans.py"

TRACES = (
    bug(
        "a lost attempt without a span",
        "The trace of a request whose worker was killed links to a span that nobody ever sees.",
        Edit(
            "streaming/jobs/attempt_spans.py",
            "        if past.outcome != LOST:\n",
            "        if past.outcome == LOST:\n",
        ),
        ATTEMPTS + "an_attempt_that_others_have_now_is_not_written_here",
    ),
    bug(
        "an attempt without a link",
        "Two attempts stand beside each other in a trace, and nothing says which came first.",
        Edit("workers/attempt_traces.py", "            link_before(job, earlier),\n", "            [],\n"),
        ATTEMPTS + "a_preempted_attempt_and_the_next_one_are_linked",
    ),
    bug(
        "a claim that is traced when its worker sees it",
        "What held a claimed job up before its worker began it is in no span: the trace has a gap.",
        Edit(
            "workers/attempt_traces.py",
            "        claimed_ns, earlier = time.time_ns() - 1000 * max(0, ago_us), own",
            "        claimed_ns, earlier = time.time_ns(), own",
        ),
        ATTEMPTS + "a_claim_that_waited_for_its_worker_ends_the_wait_when_it_was_made",
    ),
    bug(
        "a client that decides what is recorded",
        "Clients that sample all of their own traces fill the collector, whatever the ratio is.",
        Edit(
            SPANS,
            "if random.random() >= self._ratio:",
            "if not is_sampled(carried) and random.random() >= self._ratio:",
        ),
        TRACING + "the_ratio_decides_and_not_the_caller",
    ),
    bug(
        "sampling by the caller's trace id",
        "A client that sends an id which is in the sample has all of its requests recorded.",
        Edit(
            SPANS,
            "if random.random() >= self._ratio:",
            'if int((trace_id_of(carried) or "0")[:16], 16) / 2**64 >= self._ratio:',
        ),
        TRACING + "a_share_of_the_traces_is_recorded_whatever_ids_clients_choose",
    ),
    bug(
        "tracestate for upstream servers",
        "What a client writes into its tracestate reaches hosted servers.",
        Edit(
            "workers/engines/upstream/http/client.py",
            '            lines.append(f"traceparent: {trace}")\n',
            '            lines += [f"traceparent: {trace}", "tracestate: a=b"]\n',
        ),
        "tests/workers/engines/upstream/test_engine.py::test_each_call_is_a_span_and_carries_it_on",
    ),
    bug(
        "a GPU that uses nothing",
        "A machine without NVML shows 0 joules, and its tokens are free.",
        Edit(
            "workers/record.py",
            "                if value is not None:\n                    gauge.labels(gpu).set(value)",
            "                gauge.labels(gpu).set(value or 0.0)",
        ),
        "tests/workers/test_record.py::test_gpus_that_tell_nothing_have_no_series",
    ),
    bug(
        "a GPU that draws 9.2 million million million watts",
        "DCGM's mark for a value that it does not know counts as a reading.",
        Edit("telemetry/records/dcgm.py", " and not any(low <= value < high for low, high in BLANKS)", ""),
        "tests/telemetry/records/test_dcgm.py::test_what_dcgm_does_not_know_is_absent",
    ),
    bug(
        "a span that ends twice",
        "An attempt whose end is told by two callbacks is in its trace twice.",
        Edit(SPANS, "        self.ended = True\n", ""),
        "tests/telemetry/test_tracing.py::test_a_failure_is_told_and_an_end_counts_once",
    ),
    bug(
        "a counter that is first seen at 1",
        "No alert tells of the first batch turn that fails: for Prometheus it has not grown.",
        Edit("telemetry/metrics.py", "for value in spec.values if len(spec.labels) == 1 else ():", "for value in ():"),
        "tests/docker/test_monitoring.py::test_what_an_alert_waits_for_is_shown_before_it_happens",
    ),
    bug(
        "tasks that are texts in metrics and spans",
        "Embeddings count as texts, in the latencies of these too.",
        Edit("streaming/jobs/operation.py", "job.task.kind if job.task is not None else None", "None"),
        "tests/system/test_operation_names.py::test_every_endpoint_has_one_operation",
    ),
)
