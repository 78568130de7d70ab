"""Llumnix' measure of room."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from worker_report import a_worker

from bench.scale.contenders import BLOCK_TOKENS, freeness, merged
from streaming.fleet.process import Process


@st.composite
def workers(draw: st.DrawFn) -> list[Process]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 100_000))
        found.append(
            a_worker(
                f"w{number}",
                draw(st.sampled_from(("ready", "ready", "draining"))),
                slots=64,
                running=draw(st.integers(0, 64)),
                waiting=draw(st.integers(0, 9)),
                kv_tokens=size,
                kv_used=draw(st.integers(0, size)),
            )
        )
    return found


def test_freeness_is_blocks_per_job() -> None:
    """Free blocks less those of what waits inside, over all jobs held."""
    assert freeness(a_worker("w", kv_tokens=3200)) == math.inf
    full = a_worker("w", running=4, kv_tokens=3200, kv_used=1600)
    assert freeness(full) == 1600 / BLOCK_TOKENS / 4
    crowded = a_worker("w", running=4, waiting=6, kv_tokens=3200, kv_used=1600)
    assert freeness(crowded) == (1600 - 6 * 400) / BLOCK_TOKENS / 10
    by_slots = a_worker("w", slots=8, running=6)
    assert freeness(by_slots) == 2 * 1024 / BLOCK_TOKENS / 6


@given(workers())
def test_all_together_are_never_freer_than_the_freest(workers: list[Process]) -> None:
    """Nor less free than the least free, when nothing waits inside."""
    calm = [a_worker(w.id, slots=w.slots, running=w.running, kv_tokens=w.kv_tokens, kv_used=w.kv_used) for w in workers]
    each = [freeness(worker) for worker in calm]
    assert merged(calm) >= min(each) - 1e-9
    assert merged([]) == -math.inf
