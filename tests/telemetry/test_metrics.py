"""Metrics: what they are called, what a tally counts, and the sum over processes, the dead ones included."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from telemetry.catalogue import JobMetrics
from telemetry.latency import inter_token_latency
from telemetry.metrics import FOLDER_VARIABLE, GaugeSample, Metrics

ROOT = Path(__file__).parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

CHILD = """
import sys
from telemetry.metrics import *
folder, role, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
metrics = Metrics.start(folder, role)
metrics.requests.labels("m", "chat", "200").inc(count)
metrics.worker_slots.labels("m").set(count)
metrics.open_streams.set(count)
metrics.time_to_first_token.labels("chat", "m").observe(0.03)
metrics.time_per_output_token.labels("chat", "m").observe(0.012, count)
metrics.flush()
print("counted", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
"""Counts, then does what it is told, line by line, until its stdin ends."""


class Child:
    """A process that counts into a folder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self._read("counted")

    def do(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        self._read("done")

    def page(self, into: Path) -> Samples:
        """Its /metrics page."""
        self.do(f"open({str(into)!r}, 'wb').write(metrics.expose())")
        return samples(into.read_bytes())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def _read(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == expected


@contextmanager
def child(folder: Path, role: str, count: int) -> Iterator[Child]:
    command = [sys.executable, "-c", CHILD, str(folder), role, str(count)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def samples(page: bytes) -> Samples:
    """Every sample of a page by name and labels."""
    families = text_string_to_metric_families(page.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(page: Samples, name: str, **labels: str) -> float | None:
    return page.get((name, tuple(sorted(labels.items()))))


GEN_AI = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m"}


def test_two_processes_make_one_sum_and_the_dead_stay_counted(tmp_path: Path) -> None:
    """Either process shows both; after SIGKILL counts stay and live gauges go at once."""
    folder, page = tmp_path / "metrics", tmp_path / "page"
    request = {"model": "m", "endpoint": "chat", "code": "200"}
    with child(folder, "api", 3) as first, child(folder, "worker", 4) as second:
        for each in (first, second):
            shown = each.page(page)
            assert value(shown, "penstock_requests_total", **request) == 7
            assert value(shown, "penstock_worker_slots", model="m") == 7
            assert value(shown, "penstock_open_streams") == 7
            assert value(shown, "penstock_processes", role="worker") == 1
            assert value(shown, "gen_ai_server_time_to_first_token_seconds_count", **GEN_AI) == 2
            assert value(shown, "gen_ai_server_time_per_output_token_seconds_count", **GEN_AI) == 7
        second.kill()
        shown = first.page(page)
        assert value(shown, "penstock_requests_total", **request) == 7
        assert value(shown, "penstock_worker_slots", model="m") == 3
        assert value(shown, "penstock_open_streams") == 3
        assert value(shown, "penstock_processes", role="worker") is None
        assert value(shown, "gen_ai_server_time_per_output_token_seconds_count", **GEN_AI) == 7
        assert value(shown, "gen_ai_server_time_per_output_token_seconds_bucket", le="0.015", **GEN_AI) == 7
        assert value(shown, "gen_ai_server_time_per_output_token_seconds_bucket", le="0.01", **GEN_AI) == 0


def test_a_clean_end_leaves_counts_and_takes_gauges(tmp_path: Path) -> None:
    """`close` flushes the buffers and removes this process's live gauges. The file of another process, which exists
    empty for an instant while it is created, is left out of the page."""
    folder, page = tmp_path / "metrics", tmp_path / "page"
    with child(folder, "api", 1) as reader, child(folder, "worker", 2) as leaver:
        leaver.do('metrics.time_per_output_token.labels("chat", "m").observe(0.012)')
        leaver.do("metrics.close()")
        (folder / "counter_999999.db").touch()
        shown = reader.page(page)
    assert value(shown, "penstock_worker_slots", model="m") == value(shown, "penstock_open_streams") == 1
    assert value(shown, "gen_ai_server_time_per_output_token_seconds_count", **GEN_AI) == 4


def test_equal_observations_count_as_so_many_alike() -> None:
    """The gaps between the tokens of one chunk, as the formula has them."""
    metrics = Metrics.start("", "api")
    one, together = (metrics.time_per_output_token.labels("chat", label) for label in ("one", "together"))
    for before, now, tokens in ((1.0, 1.03, 3), (1.03, 1.04, 1), (1.04, 1.05, 1), (1.05, 3.05, 2)):
        one.observe(inter_token_latency(before, now, tokens), tokens)
        together.observe_equal(now - before, tokens)
    assert together._counts == one._counts and sum(one._counts) == 7
    assert together._total == pytest.approx(one._total)


def test_a_tally_counts_what_is_within_each_bound() -> None:
    """However often it is flushed in between."""
    metrics = Metrics.start("", "api")
    tally = metrics.time_per_output_token.labels("chat", "a")
    times = [0.0, 0.001, 0.0011, 0.01, 0.4, 99.0, 0.01]
    for number, seconds in enumerate(times):
        tally.observe(seconds)
        if number % 3 == 0:
            metrics.flush()
    shown, name = samples(metrics.expose()), "gen_ai_server_time_per_output_token_seconds"
    labels = GEN_AI | {"gen_ai_request_model": "a"}
    assert value(shown, f"{name}_count", **labels) == 7
    assert value(shown, f"{name}_sum", **labels) == pytest.approx(sum(times))
    for bound in ("0.001", "0.0025", "0.01", "0.5", "2.5", "+Inf"):
        assert value(shown, f"{name}_bucket", le=bound, **labels) == sum(each <= float(bound) for each in times)


def test_an_observation_in_the_middle_of_a_fold_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush may happen in another thread at any moment: what comes meanwhile is in the next, exactly once."""
    metrics = Metrics.start("", "api")
    tally = metrics.time_per_output_token.labels("chat", "b")
    inc, still = values.ValueClass.inc, [5]

    def interrupted(self: object, amount: float) -> None:
        if still[0]:
            still[0] -= 1
            tally.observe(0.01)
        inc(self, amount)

    monkeypatch.setattr(values.ValueClass, "inc", interrupted)
    tally.observe(0.01, 2)
    tally.observe(0.3)
    metrics.flush()
    shown = samples(metrics.expose())
    labels = GEN_AI | {"gen_ai_request_model": "b"}
    assert still == [0]
    name = "gen_ai_server_time_per_output_token_seconds"
    assert value(shown, f"{name}_count", **labels) == 8
    assert value(shown, f"{name}_sum", **labels) == pytest.approx(0.37)


def test_live_gauges_are_shown_as_they_are_given() -> None:
    """Samples computed by the caller appear under their gauge's name, labels escaped."""
    metrics = Metrics.start("", "api")
    page = metrics.expose(
        [
            GaugeSample(JobMetrics.lane_waiting, ("m", "standard"), 3),
            GaugeSample(JobMetrics.lane_waiting, ('odd "name"\n', "batch"), 1),
            GaugeSample(JobMetrics.lane_oldest, ("m", "standard"), 1.5),
        ]
    )
    shown = samples(page)
    assert value(shown, "penstock_lane_waiting", model="m", priority="standard") == 3
    assert value(shown, "penstock_lane_waiting", model='odd "name"\n', priority="batch") == 1
    assert value(shown, "penstock_lane_oldest_seconds", model="m", priority="standard") == 1.5
    assert page.count(b"# TYPE penstock_lane_waiting gauge") == 1


def test_a_process_alone_shows_its_own_numbers() -> None:
    """Without a folder, another Metrics of the same process does not mix in, and nobody counts creation times."""
    one, other = Metrics.start("", "api"), Metrics.start("", "worker")
    other.claims.labels("m", "batch").inc(5)
    one.claims.labels("m", "batch").inc()
    shown = samples(one.expose())
    assert value(shown, "penstock_claims_total", model="m", priority="batch") == 1
    assert value(shown, "penstock_processes", role="api") == 1
    assert not any(name.endswith("_created") for name, _ in shown)


def test_a_worker_serves_its_own_page_with_fresh_numbers() -> None:
    """GET /metrics on the port of its own, flushed as it is read; after close the port is free."""
    metrics = Metrics.start("", "worker")
    port = metrics.serve(0)
    metrics.time_per_output_token.labels("chat", "c").observe(0.01)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        shown = samples(answer.read())
    labels = GEN_AI | {"gen_ai_request_model": "c"}
    assert value(shown, "gen_ai_server_time_per_output_token_seconds_count", **labels) == 1
    metrics.close()
    again = Metrics.start("", "worker")
    assert again.serve(port) == port
    again.close()


def test_a_folder_comes_too_late_once_the_library_is_loaded(tmp_path: Path) -> None:
    """The mode is fixed at import; starting in the other one is an error that says so, not silent loss."""
    Metrics.start("", "api")
    with pytest.raises(RuntimeError, match=r"imported before Metrics\.start"):
        Metrics.start(str(tmp_path), "api")
    assert FOLDER_VARIABLE not in os.environ
