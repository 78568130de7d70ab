"""Scheduler main loop: reaps lost jobs, observes load, decides pool sizes, and publishes and executes the plans.

It runs once a tick, and at once when a job arrives for a model without workers. Several schedulers may run: the elected
leader decides, the others only reap and stand by. A leader publishes each decision under its epoch before it acts on
it; if Redis refuses the publication, the leader drops the decision.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from penstock.loops import ExpectedErrors, coalesced, run_periodically, wait, wait_any
from scheduler.policy.decide import PolicyState, Switch, SwitchDecision, decide
from scheduler.policy.snapshot import ScalingLimits, ShapeChoice, Snapshot
from scheduler.pools.base import Pool
from streaming.errors import Unavailable
from streaming.fleet.plans import (
    PLANS,
    Action,
    ActionKind,
    Lead,
    Override,
    Plan,
    Plans,
    claim_lead,
    overrides_of,
    pool_name,
)
from streaming.fleet.process import Process, Prospect
from streaming.fleet.processes import Fleet, processes_of
from streaming.jobs.reaper import Reaper
from streaming.jobs.waiting import backlog_of
from streaming.order import LaneDepth, WaitingDeadline
from streaming.redis.client import NOW, Query, RedisClient
from telemetry.gpu import Facts
from telemetry.metrics import Metrics
from telemetry.records.schema import RecordedDepth


def look(
    model: str, lanes: Iterable[LaneDepth], workers: Iterable[Process], due: Iterable[WaitingDeadline] = ()
) -> Snapshot:
    """The snapshot of one model, from lanes, workers and deadlines of all models."""
    return Snapshot(
        model,
        tuple(lane for lane in lanes if lane.model == model),
        tuple(worker for worker in workers if worker.model == model),
        due=tuple(each for each in due if each.model == model),
    )


log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0
"""How often it reports itself to the fleet."""
CLAIM_SHARE, RENEWAL_SHARE = 0.1, 0.2
"""Shares of `lead_s`: how often a standby claims, and the age at which a leader renews if no tick has."""
MIN_TICK_GAP_S = 0.1
"""Between two ticks, however many jobs ask for one."""
LISTEN_RETRY_DELAY_S = 1.0
HOLD_TICKS, HOLD_S = 3, 2.0
"""A worker told to leave new jobs to another shape takes them again after this many ticks plus this time."""
LOGGED = ("model", "want", "was", "worker", "shape", "reason")
"""Fields of an action in the log line about it, beside its kind."""


def holder_of(scheduler: Process) -> str:
    """Its name in the leader election. Includes its life, because two containers may share id, host name and pid."""
    return f"{scheduler.id}@{scheduler.host}/{scheduler.life[:6]}:{scheduler.pid}"


class Loop:
    """The main loop. One per process; `run` returns once its stop event is set."""

    def __init__(
        self,
        client: RedisClient,
        reaper: Reaper,
        limits: Mapping[str, ScalingLimits],
        pool: Pool,
        me: Process,
        metrics: Metrics,
        tick_s: float = 1.0,
        lead_s: float = 5.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_state: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client, self._reaper, self._fleet = client, reaper, Fleet(client)
        self._plans = Plans(client)
        self._limits, self._pool, self._me, self._metrics = limits, pool, me, metrics
        self._holder = holder_of(me)
        self._claim = claim_lead(self._holder, int(1000 * lead_s))
        self._tick_s, self._lead_s, self._clock, self._on_state = tick_s, lead_s, clock, on_state
        self._state = "starting"
        on_end = partial(log.info, "Redis is back: scheduling goes on")
        message = "nothing is scheduled until Redis is back: %s"
        self._outage = ExpectedErrors(Unavailable, log.warning, message, once=True, on_end=on_end)
        """While it lasts, the workers stay as they are."""
        self._lead: Lead | None = None
        self._claimed_at = -math.inf
        """When the leadership was last claimed or renewed."""
        backlog = backlog_of(limits, client.partitions)
        self._observation = (PLANS, overrides_of(limits), NOW, processes_of("worker"), backlog)
        """In the order in which `_schedule` unpacks the answers."""
        self._states: dict[str, Switch] = {}
        self._cold: dict[str, float] = {}
        """Cold starts in seconds by pool, as last written."""
        self._woken = asyncio.Event()
        self._seen: Sequence[Snapshot] = ()

    async def run(self, stop: asyncio.Event) -> None:
        """Tick and report until `stop` is set, then leave the fleet."""
        async with asyncio.TaskGroup() as tasks:
            deaf = ExpectedErrors(Unavailable, log.debug, "no wake-ups until Redis answers: %s")
            loops = (
                run_periodically(self._listen, LISTEN_RETRY_DELAY_S, deaf),
                run_periodically(self.lead, self._lead_interval_s, self._outage),
                run_periodically(self.report, REPORT_INTERVAL_S, self._outage),
            )
            running = [tasks.create_task(each) for each in loops]
            await self._tick_until(stop)
            for each in running:
                each.cancel()
        self._enter("draining")
        with self._outage:
            await self.leave()

    async def tick(self) -> None:
        """Reap, claim or renew the leadership and, as leader, schedule. Raises Unavailable."""
        sweep: Query[Any] = Query(self._reaper.calls(), list)
        observation = self._observation if self._lead is not None else ()
        answers, found, *observed = await self._client.ask_all(sweep, self._claim, *observation)
        self._note_lead(found)
        await self._reaper.take(answers)
        if self._lead is not None:  # a new leader has observed nothing yet
            await self._schedule(self._lead, observed or await self._client.ask_all(*self._observation))
        if self._state == "starting":
            self._enter("ready")
            await self.report()

    def facts(self) -> Facts:
        """What a sample says of the lanes: as the leader saw them last; nothing of another scheduler."""
        models = self._seen if self._lead is not None else ()
        lanes = {f"{seen.model}/{lane.priority}": lane for seen in models for lane in seen.lanes}
        rows = {name: RecordedDepth(x.waiting, x.running, round(x.oldest_s, 3)) for name, x in lanes.items()}
        return {"lanes": rows}

    async def lead(self) -> None:
        """Claim the leadership, or renew it if no tick has done so for RENEWAL_SHARE of `lead_s`. Raises
        Unavailable."""
        if self._lead is None or self._clock() - self._claimed_at >= RENEWAL_SHARE * self._lead_s:
            self._note_lead(await self._client.ask(self._claim))

    def _lead_interval_s(self) -> float:
        return self._lead_s * (CLAIM_SHARE if self._lead is None else RENEWAL_SHARE)

    def _note_lead(self, found: Lead) -> None:
        lead, self._claimed_at = found if found.holder == self._holder else None, self._clock()
        if lead == self._lead:
            return
        log.info("%s scheduler leads now (epoch %d)", "this" if lead else "another", found.epoch)
        self._lead = lead
        self._states.clear()  # continue from the published plans, not from this scheduler's old state

    async def report(self) -> None:
        """Report this scheduler to the fleet. Raises Unavailable."""
        await self._fleet.report(structs.replace(self._me, state=self._state))

    async def leave(self) -> None:
        """Leave the fleet and give up the leadership, so that another can lead at once. Raises Unavailable."""
        await self._client.ask(claim_lead(self._holder, 0))
        await self._fleet.leave(self._me)

    def _enter(self, state: str) -> None:
        self._state = state
        self._on_state(state)

    # --- deciding and acting -----------------------------------------------------------------------------------------

    async def _schedule(self, lead: Lead, observed: Sequence[Any]) -> None:
        before, overrides, at_ms, workers, waiting = observed
        new = not self._states
        if new:
            self._cold = await self._plans.cold_starts()
        self._seen = [look(model, waiting.lanes, workers, waiting.due) for model in self._limits]
        decisions = [self._decide(seen, before.get(seen.model), overrides.get(seen.model)) for seen in self._seen]
        plans = [
            self._plan(each, before.get(each.model), lead, at_ms, wakes=each.model not in overrides)
            for each in decisions
        ]
        moves = await self._pool.moves(plans, workers, lead.epoch)
        pairs = zip(decisions, plans, strict=True)
        actions = [action for pair in pairs for action in self._actions(*pair, before.get(pair[1].model))]
        if new:
            actions.insert(0, Action(model="", kind="lead", reason=_succession(before, lead), by=self._holder))
        cold = self._measured(decisions)
        published = {move.plan.model: move.plan for move in moves}.values()
        own = [action for move in moves for action in move.actions]
        if not await self._plans.publish(lead, published, [*actions, *own], cold, self._holds(plans, workers)):
            log.warning("another scheduler leads: what this one decided is dropped (epoch %d)", lead.epoch)
            return
        for action in (*actions, *own):
            self._log_action(action)
        self._cold |= cold
        if self._lead == lead:
            self._states = {decision.model: decision.state for decision in decisions}
        await self._pool.carry_out(moves, lead.epoch)

    def _decide(self, snapshot: Snapshot, before: Plan | None, override: Override | None) -> SwitchDecision:
        model, now = snapshot.model, self._clock()
        limits = self._limits[model]
        pools = limits.pools.items()
        shaped = {shape: self._with_override(each, pool_name(model, shape), override) for shape, each in pools}
        limits = replace(self._with_override(limits, model, override), pools=shaped)
        state = self._states.get(model) or (None if before is None else _inherited(before, now))
        decision = decide(snapshot, limits, state, now)
        self._metrics.workers_wanted.labels(model).set(decision.want)
        return decision

    def _with_override(self, limits: ScalingLimits, pool: str, override: Override | None) -> ScalingLimits:
        """The limits with a manual override and the measured cold start applied."""
        return replace(
            limits,
            pinned=None if override is None else override.want,
            paused=override is not None and override.paused,
            cold_start_s=self._cold.get(pool, limits.cold_start_s),
        )

    def _holds(self, plans: Sequence[Plan], workers: Sequence[Process]) -> dict[str, int]:
        """By worker lease: milliseconds for which it leaves new jobs to another shape; 0: it takes them."""
        if self._pool.kind == "dry-run":
            return {}
        shaped = {plan.model: plan for plan in plans if plan.shapes}
        hold_ms = int(1000 * (HOLD_TICKS * self._tick_s + HOLD_S))
        return {
            worker.lease: 0 if worker.shape in plan.takes else hold_ms
            for worker in workers
            if worker.lease and (plan := shaped.get(worker.model)) and worker.shape in plan.shapes
        }

    def _plan(self, decision: SwitchDecision, before: Plan | None, lead: Lead, at_ms: int, *, wakes: bool) -> Plan:
        """`wakes`: a job that arrives at zero workers may start one."""
        wakes, lanes = wakes and self._limits[decision.model].ceiling > 0, decision.main.lanes
        return Plan(
            model=decision.model,
            want=decision.want,
            reason=decision.reason,
            epoch=lead.epoch,
            at_ms=at_ms,
            pool=self._pool.kind,
            cordon=decision.cordon,
            leaving=() if before is None else before.leaving,
            lanes=dict(lanes if decision.want or wakes else dict.fromkeys(lanes, Prospect(None))),
            wake_s=decision.main.wake_s,
            cold_start_s=decision.main.cold_start_s,
            shapes={shape: pool.want for shape, pool in decision.pools.items() if shape},
            shape=decision.shape,
            takes=decision.takes if decision.shape else (),
        )

    def _actions(self, decision: SwitchDecision, plan: Plan, before: Plan | None) -> Iterator[Action]:
        model, by = plan.model, self._holder
        known = set() if before is None else {each.worker for each in before.cordon}
        for each in plan.cordon:
            if each.worker not in known:
                yield Action(model=model, kind="cordon", worker=each.worker, reason=each.reason, by=by)
        if plan.takes != (() if before is None else before.takes):
            yield Action(model=model, kind="switch", shape=", ".join(plan.takes), reason=decision.why, by=by)
        for shape, pool in decision.pools.items():
            was = None if before is None else before.pools.get(shape)
            if pool.want != was:
                kind: ActionKind = "up" if pool.want > (was or 0) else "down"
                yield Action(model=model, kind=kind, shape=shape, want=pool.want, was=was, reason=pool.reason, by=by)

    def _measured(self, decisions: Sequence[SwitchDecision]) -> dict[str, float]:
        """Cold starts in seconds, by pool, that were measured since they were last written."""
        return {
            name: cold_s
            for decision in decisions
            for shape, pool in decision.pools.items()
            if (cold_s := pool.state.demand.starts.cold_s) is not None
            and cold_s != self._cold.get(name := pool_name(decision.model, shape))
        }

    def _log_action(self, action: Action) -> None:
        what = f"{action.kind} {action.worker or action.shape}".strip()
        if action.kind in ("up", "down"):
            what = f"{action.want} {f'{action.shape} workers'.lstrip()} wanted"
            if action.was is not None:
                self._metrics.decisions.labels(action.model, action.kind).inc()
        model, about = f"{action.model}: " if action.model else "", {name: getattr(action, name) for name in LOGGED}
        log.info("%s%s: %s", model, what, action.reason, extra={"action": action.kind, **about})

    # --- the periodic tasks ------------------------------------------------------------------------------------------

    async def _tick_until(self, stop: asyncio.Event) -> None:
        """Tick every `tick_s`, or when a job asks for one; at least MIN_TICK_GAP_S apart."""
        loop = asyncio.get_running_loop()
        while not stop.is_set():
            self._woken.clear()
            with self._outage:
                await self.tick()
            next_s = loop.time() + min(MIN_TICK_GAP_S, self._tick_s)
            await wait_any(stop, self._woken, timeout_s=coalesced(self._tick_s))
            if not stop.is_set():
                await wait(stop, next_s - loop.time())

    async def _listen(self) -> None:
        """Start a tick when a job arrives for a model without workers; a missed message waits for the next tick."""
        async for _ in self._plans.woken():
            self._woken.set()


def _inherited(before: Plan, now: float) -> Switch:
    """State inherited from the former leader's plan: its pool sizes count as needed, so nothing shrinks at once."""
    pools = {shape: PolicyState(want, needs=((now, float(want)),)) for shape, want in before.pools.items()}
    if not before.shape:
        return Switch(pools)
    return Switch(pools, ShapeChoice(before.shape, 0.0, -math.inf, -math.inf), before.takes)


def _succession(before: Mapping[str, Plan], lead: Lead) -> str:
    former = max((plan.epoch for plan in before.values()), default=0)
    return f"after epoch {former}" if former not in (0, lead.epoch) else "no scheduler led before"
