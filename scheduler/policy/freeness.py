"""How much room a worker has for what it holds, after Llumnix: who should get the next job, and is the model short.

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
BUSY = 10.0
"""Below this a worker is busy."""


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


def placement(workers: Sequence[WorkerLoad], draw: float = 0.0, among: int = 1) -> WorkerLoad | None:
    """Who should get the next job: the freest that is not busy, else the freest at all; None when there is nobody.

    With `among` > 1 one of so many freest is taken by `draw` (0 <= draw < 1): several callers that look at the same
    figures would otherwise all choose the same worker.
    """
    ready = [worker for worker in workers if worker.state == "ready"]
    calm = [worker for worker in ready if freeness(worker) >= BUSY]
    ranked = sorted(calm or ready, key=lambda worker: (-freeness(worker), -worker.slots, worker.id))
    return ranked[int(draw * min(among, len(ranked)))] if ranked else None
