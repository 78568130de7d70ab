"""Finding of a report: a piece of advice with its reason, and the thresholds from which on one is made."""

from __future__ import annotations

import msgspec


class Thresholds(msgspec.Struct, frozen=True):
    """From when on something is worth a word. docs/records.md explains each."""

    min_requests: int = 5
    """Fewer say nothing of a worker or a lane."""
    slow_factor: float = 1.5
    """A worker is slow if its median time per token is so many times that of the others."""
    starved_wait_ms: float = 500.0
    starved_factor: float = 5.0
    """A lane starves if its 90th percentile of waiting is at least that, and so many times a higher lane's."""
    waiting_share: float = 0.3
    """Of the time of all requests, in the queue and inside the engine."""
    busy_share: float = 0.8
    """Slots in use, from which on a pool is full."""
    gateway_share: float = 0.2
    gateway_ms: float = 20.0
    """Time of a request on the path around the engine: that share of it, and more than that."""
    stall_ms: float = 250.0
    """An event loop that is late by this has stopped every stream of its process."""
    prefill_share: float = 0.4
    """Of the engine's time, before the first token."""
    long_factor: float = 4.0
    """Prompts are uneven if their 90th percentile is so many times the median."""
    unhealthy_share: float = 0.01
    """Requests that were refused, failed or expired, or that lost a worker."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    kind: str
    """slow_worker, starved_lane, gateway_stall, full_pool, idle_pool, long_prompts, lost_workers, refused, failed,
    expired, lost_records; of a large part that none of these explains: waiting, retries, short_requests, prompts."""
    title: str
    reason: str
    """The figures that it follows from."""
    change: str
    """What to change first."""
    model: str = ""
    """The model that it is about; "" where it is about all."""
    saves_s: float = 0.0
    """Request-seconds that it concerns."""
