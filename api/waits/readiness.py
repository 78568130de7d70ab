"""Worker readiness: which models have a ready worker, as this process read last."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from streaming.fleet.plans import Stall
from streaming.fleet.process import Process

STALE_S = 10.0
"""What was read longer ago is ignored."""
WAITING = "waiting for its server"
"""A worker that is ready, none of whose servers are there."""
NO_WORKERS: Mapping[str, int] = Counter()
NO_STALLS: Mapping[str, Stall] = {}


class WorkerReadiness:
    """Answers from the workers' reports."""

    def __init__(self) -> None:
        self._states: Mapping[str, Counter[str]] = {}
        """How many workers of each model are in each state."""
        self._stalls: Mapping[str, Stall] = NO_STALLS
        self._read = -math.inf
        self._ready: dict[str, float] = {}
        """When a worker of each model was last seen ready, else when this process first looked; monotonic time."""

    def learn(self, workers: Iterable[Process], stalls: Mapping[str, Stall] = NO_STALLS) -> None:
        """Store the reports of all workers, and which models are stalled."""
        states: dict[str, Counter[str]] = {}
        for worker in workers:
            state = WAITING if worker.away and worker.state == "ready" else worker.state
            states.setdefault(worker.model, Counter())[state] += 1
        self._states, self._stalls, self._read = states, stalls, time.monotonic()
        self._ready |= {model: self._read for model, found in states.items() if "ready" in found}

    def missing_s(self, model: str) -> float:
        """For how many seconds no worker of this model has been ready, as far as this process knows."""
        now = time.monotonic()
        return now - self._ready.setdefault(model, now)

    def ready(self, model: str) -> int:
        """How many workers of the model are ready; 0 if that is not known."""
        return self._states.get(model, NO_WORKERS)["ready"] if time.monotonic() - self._read <= STALE_S else 0

    @property
    def stalled(self) -> dict[str, str]:
        """By model, why no worker may run its jobs; of stalled models only."""
        fresh = time.monotonic() - self._read <= STALE_S
        return {model: stall.cause for model, stall in self._stalls.items()} if fresh else {}

    def problem(self, model: str) -> str:
        """Why no worker can claim a job of this model now; "" if one can, or if it is not known."""
        states = self._states.get(model, NO_WORKERS)
        if time.monotonic() - self._read > STALE_S:
            return ""
        if stall := self._stalls.get(model):
            return f"no worker may run it: {stall.cause}"
        if "ready" in states:
            return ""
        found = ", ".join(f"one is {state}" for state in sorted(states)) or "none is running"
        return f"no worker is ready: {found}"
