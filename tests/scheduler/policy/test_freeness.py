"""Who has room for one more job."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.freeness import BLOCK_TOKENS, BUSY, freeness, merged, placement
from scheduler.policy.snapshot import WorkerLoad


@st.composite
def workers(draw: st.DrawFn) -> list[WorkerLoad]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 100_000))
        found.append(
            WorkerLoad(
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
    assert freeness(WorkerLoad("w", kv_tokens=3200)) == math.inf
    full = WorkerLoad("w", running=4, kv_tokens=3200, kv_used=1600)
    assert freeness(full) == 1600 / BLOCK_TOKENS / 4
    crowded = WorkerLoad("w", running=4, waiting=6, kv_tokens=3200, kv_used=1600)
    assert freeness(crowded) == (1600 - 6 * 400) / BLOCK_TOKENS / 10
    by_slots = WorkerLoad("w", slots=8, running=6)
    assert freeness(by_slots) == 2 * 1024 / BLOCK_TOKENS / 6


@given(workers(), st.floats(0, 0.999), st.integers(1, 3))
def test_the_next_job_goes_to_one_of_the_freest(workers: list[WorkerLoad], draw: float, among: int) -> None:
    """Only to a worker that takes jobs; to one that is not busy while there is any; to one of the freest of those."""
    chosen = placement(workers, draw, among)
    ready = [worker for worker in workers if worker.state == "ready"]
    assert (chosen is None) == (not ready)
    if chosen is None:
        return
    calm = [worker for worker in ready if freeness(worker) >= BUSY] or ready
    assert chosen in ready and chosen in calm
    assert sum(freeness(worker) > freeness(chosen) for worker in calm) < among


@given(workers())
def test_all_together_are_never_freer_than_the_freest(workers: list[WorkerLoad]) -> None:
    """Nor less free than the least free, when nothing waits inside."""
    calm = [
        WorkerLoad(w.id, slots=w.slots, running=w.running, kv_tokens=w.kv_tokens, kv_used=w.kv_used) for w in workers
    ]
    each = [freeness(worker) for worker in calm]
    assert merged(calm) >= min(each) - 1e-9
    assert merged([]) == -math.inf
