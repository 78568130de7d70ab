"""Freeness of workers, by which Llumnix scales: one of the rules that `penstock bench scale` compares.

Freeness = (free cache blocks - blocks of what waits inside) / jobs held: blocks each job may still grow by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.policy.snapshot import WorkerLoad

BLOCK_TOKENS = 32
"""Tokens of one cache block (TensorRT-LLM's default)."""
SLOT_TOKENS = 1024
"""Taken for a slot where the cache has no size of its own."""


def freeness(worker: WorkerLoad) -> float:
    """Blocks per job held; infinite for a worker that holds none, negative when more waits inside than fits.

    A job that waits inside is taken to need as much as the mean of those that run.
    """
    held = worker.running + worker.waiting
    if not held:
        return math.inf
    if worker.kv_tokens:
        size, used = worker.kv_tokens, worker.kv_used
    else:
        size, used = worker.slots * SLOT_TOKENS, worker.running * SLOT_TOKENS
    each = used / worker.running if worker.running else SLOT_TOKENS
    return (size - used - worker.waiting * each) / BLOCK_TOKENS / held


def merged(workers: Sequence[WorkerLoad]) -> float:
    """Freeness of all of them as if they were one; minus infinity when there is none."""
    if not workers:
        return -math.inf
    sums = [sum(getattr(worker, name) for worker in workers) for name in ("slots", "running", "waiting")]
    whole = all(worker.kv_tokens for worker in workers)
    size, used = (sum(w.kv_tokens for w in workers), sum(w.kv_used for w in workers)) if whole else (0, 0)
    return freeness(WorkerLoad("all", slots=sums[0], running=sums[1], waiting=sums[2], kv_tokens=size, kv_used=used))
