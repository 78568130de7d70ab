"""Energy of a window: each GPU once, idle apart, and the parts sum to the whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.records.reader import evidence_of
from telemetry.records.schema import ENCODER, RequestRecord, SampleRecord
from telemetry.report.figures import energy_of
from telemetry.report.report import Scope, report_of


def sample(
    process: str, at_s: float, joules: float, steps: int = 0, running: int = 0, busy: float = 0.0
) -> SampleRecord:
    return SampleRecord(
        at_us=int(at_s * 1e6), role="worker", process=process, pid=1, cpu_s=0.0, slots=4, steps=steps, running=running,
        gpus={"GPU-a": joules}, gpu_busy={"GPU-a": busy},
    )  # fmt: skip


def request(tenant: str, tokens: int, state: str = "completed") -> RequestRecord:
    return RequestRecord(
        id=f"job_{tenant}", ended_us=1, state=state, model="m", tenant=tenant, completion_tokens=tokens
    )


def test_idle_energy_belongs_to_nobody() -> None:
    """10 s idle at 50 W, 10 s of work at 300 W, of two workers that see the same GPU; one of them works."""
    samples = [
        *(sample("worker-1", at, joules, steps, busy=busy) for at, joules, steps, busy in
          ((0, 0, 0, 0.0), (10, 500, 0, 0.0), (20, 3500, 90, 0.8))),
        *(sample("worker-2", at, joules) for at, joules in ((0, 0), (10, 500), (20, 3500))),
    ]  # fmt: skip
    found = energy_of(evidence_of([*samples, request("ann", 750), request("bob", 250), request("eve", 0, "refused")]))
    assert found is not None
    assert (found.joules, found.idle_joules) == (3500, 500)
    assert found.tenants == {"ann": 2250, "bob": 750}
    assert (found.joules_per_request, found.joules_per_token) == (1750, 3.5)
    (gpu,) = found.gpus
    assert (gpu.watts, gpu.seconds, gpu.busy) == (175, 20, pytest.approx(0.8 / 6))


def test_a_report_about_one_tenant_splits_the_energy_over_all(tmp_path: Path) -> None:
    """It would else have all of it. What its tokens cost of the CPU and the energy of all is not known."""
    records = [sample("worker-1", at, joules, steps=at) for at, joules in ((1, 0), (11, 1000))]
    lines = [*records, request("ann", 300), request("bob", 100)]
    data = b"".join(ENCODER.encode(each) + b"\n" for each in lines)
    (tmp_path / "19700101T000000.000-worker-1.jsonl").write_bytes(data)
    prices = {"m": 3.0}
    usage = report_of(tmp_path, Scope(0.0, math.inf, tenant="ann"), prices).figures.usage
    assert usage.energy is not None and usage.energy.tenants == {"ann": 750, "bob": 250}
    assert usage.shared and usage.tokens == 300
    assert (usage.tokens_per_joule, usage.tokens_per_core_s, usage.tokens_per_cost) == (None, None, None)
    whole = report_of(tmp_path, Scope(0.0, math.inf), prices).figures.usage
    assert not whole.shared and whole.tokens_per_joule == 0.4


def test_a_driver_that_began_anew_gives_nothing_back() -> None:
    samples = [sample("worker-1", at, joules) for at, joules in ((0, 900), (10, 1000), (20, 5), (30, 25))]
    found = energy_of(evidence_of(samples))
    assert found is not None and found.joules == 120


def test_without_two_readings_there_is_none() -> None:
    """No GPU, or one that was seen once: absent, never 0."""
    assert energy_of(evidence_of([request("ann", 5)])) is None
    assert energy_of(evidence_of([sample("worker-1", 0, 7.0)])) is None


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 3)), min_size=2, max_size=12),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), min_size=1, max_size=9),
)
def test_the_parts_sum_to_the_whole(intervals: list[tuple[int, int]], requests: list[tuple[str, int]]) -> None:
    """Tenants and idle time together use what the GPUs used."""
    joules = steps = 0
    samples = []
    for place, (spent, made) in enumerate(intervals):
        joules, steps = joules + spent, steps + made
        samples.append(sample("worker-1", 10 * place, joules, steps))
    found = energy_of(evidence_of([*samples, *(request(name, tokens) for name, tokens in requests)]))
    assert found is not None
    assert sum(found.tenants.values()) + found.idle_joules == pytest.approx(found.joules)
