"""One big replica or four small ones on the same GPUs: sweep both, read the threshold, and ramp the load up and down.

Both shapes stay loaded and share the GPUs: while both have jobs, as they do for a moment after each switch, each runs
at half its speed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.simulator.engine import EngineShape, ModelText, StepCosts
from planner.simulator.pool import PoolEngine, PoolSimulation
from planner.simulator.trace import Lengths, TraceRow
from scheduler.policy import shapes
from scheduler.policy.limits import ScalingLimits
from scheduler.policy.switch import Switch, decide

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Clients of the sweep."""
RAMP = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128, 192, 256)
"""Clients of the ramp, up and then down again: finer than the sweep where it matters."""
SWEEP_S = 60.0
"""At each level of the sweep."""
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaForm:
    """A shape: so many replicas of an engine."""

    replicas: int
    engine: PoolEngine


def engine_of(slots: int, costs: StepCosts) -> PoolEngine:
    """An engine that only its slots limit."""
    return PoolEngine(EngineShape(kv_tokens=1 << 30, slots=slots, costs=costs))


FORMS: Mapping[str, ReplicaForm] = {
    "big": ReplicaForm(1, engine_of(256, StepCosts(0.020, text_s=0.00040, held_s=0.0, prefill_s=1 / 32_000))),
    "small": ReplicaForm(4, engine_of(64, StepCosts(0.030, text_s=0.00096, held_s=0.0, prefill_s=1 / 8_000))),
}
"""Spread over all GPUs a step takes less time, but each job in it costs more: GPUs have to talk."""


class ClosedLoop:
    """A closed loop: each asks again as soon as it is answered, while there are to be so many."""

    def __init__(self, simulator: PoolSimulation, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._plant = simulator
        self._prompts, self._answers = Lengths(16, 64).draws(chance), Lengths(4, 64).draws(chance)
        self._wanted = self._asking = 0

    def want(self, count: int) -> None:
        """From now on so many; those that are too many leave once they are answered."""
        self._wanted = count
        while self._asking < count:
            self._asking += 1
            self._ask()

    def answered(self) -> None:
        """One of them was."""
        if self._asking > self._wanted:
            self._asking -= 1
        else:
            self._ask()

    def _ask(self) -> None:
        self._plant.put(TraceRow(self._plant.now_s, next(self._prompts), next(self._answers)))


class Site:
    """Both shapes under a closed loop. `forms`: those that are there."""

    def __init__(self, forms: Sequence[str], seed: int) -> None:
        self.simulator = PoolSimulation(FORMS[forms[0]].engine, seed, wake="freest", on_ended=self._ended)
        self.clients = ClosedLoop(self.simulator, seed)
        for name in forms:
            self.simulator.order(FORMS[name].replicas, engine=FORMS[name].engine, shape=name, at_once=True)
        self.simulator.run(0.0)

    def level(self, clients: int, seconds: float) -> float:
        """Tokens a second over so many seconds with so many clients."""
        before = self._tokens()
        self.clients.want(clients)
        self.simulator.run(self.simulator.now_s + seconds)
        return (self._tokens() - before) / seconds

    def share_the_gpus(self) -> None:
        """Half the speed for each while both shapes have jobs."""
        busy = {worker.shape for worker in self.simulator.workers.values() if worker.running}
        for worker in self.simulator.workers.values():
            factor = 2.0 if len(busy) > 1 else 1.0
            if worker.slow != factor:
                self.simulator.slow_down(worker, factor)

    def _ended(self, text: ModelText, held_s: float) -> None:
        # The place it leaves is given away first.
        self.simulator.at(self.simulator.now_s, lambda _: self.clients.answered())

    def _tokens(self) -> float:
        return sum(worker.tokens_by(self.simulator.now_s) for worker in self.simulator.workers.values())


def swept(form: str, seed: int) -> list[tuple[float, float]]:
    """Its curve: (clients, tokens a second), each level from an empty site."""
    return [(clients, Site([form], seed).level(clients, SWEEP_S)) for clients in LEVELS]


def ramp() -> tuple[int, ...]:
    """Up and down again."""
    return RAMP + RAMP[-2::-1]


def ramped_static(form: str, seed: int, hold_s: float) -> list[float]:
    """Tokens a second at each level of the ramp, with this shape alone."""
    site = Site([form], seed)
    return [site.level(clients, hold_s) for clients in ramp()]


def ramped_dynamic(
    found: Sequence[shapes.Shape], seed: int, hold_s: float
) -> tuple[list[float], list[tuple[float, str]]]:
    """The same with both, the scheduler saying each second which takes the new jobs; and when it changed its mind."""
    site = Site(list(FORMS), seed)
    pools = {name: ScalingLimits(form.replicas, form.replicas) for name, form in FORMS.items()}
    limits = ScalingLimits(shapes=tuple(found), pools=pools)
    state: Switch | None = None
    switches: list[tuple[float, str]] = []

    def steer(now: float) -> None:
        nonlocal state
        plan = decide(site.simulator.snapshot(), limits, state, now)
        state = plan.state
        (shape,) = plan.takes  # all workers of both are there
        if site.simulator.dispatch and shape != site.simulator.dispatch:
            switches.append((now, shape))
        site.simulator.send_to(shape)

    site.simulator.every(TICK_S, steer)
    site.simulator.every(TICK_S / 10, lambda _: site.share_the_gpus())
    return [site.level(clients, hold_s) for clients in ramp()], switches


def compared(seed: int, hold_s: float) -> dict[str, Any]:
    """The threshold, the figures of each level of the ramp (held for `hold_s` each), and the switches."""
    found = shapes.calibrated([(name, swept(name, seed)) for name in FORMS])
    static = {name: ramped_static(name, seed, hold_s) for name in FORMS}
    dynamic, switches = ramped_dynamic(found, seed, hold_s)
    top_s = hold_s * len(RAMP)
    levels = [
        {"clients": clients, **{name: static[name][n] for name in FORMS}, "dynamic": dynamic[n]}
        for n, clients in enumerate(ramp())
    ]
    for level in levels:
        level["share"] = level["dynamic"] / max(level[name] for name in FORMS)
    worst = min(levels, key=lambda level: level["share"])
    return {
        "seed": seed,
        "threshold": found[0].upto,
        "least_share": worst["share"],
        "at_clients": worst["clients"],
        "most_switches": max(sum(at < top_s for at, _ in switches), sum(at >= top_s for at, _ in switches)),
        "switches": len(switches),
        "levels": levels,
    }
