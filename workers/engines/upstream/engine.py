"""Engine `upstream`: an OpenAI-compatible server elsewhere generates the texts, and this worker keeps them safe.

The worker queues, logs and delivers as for any engine. This engine keeps requests at the servers within a budget,
continues what a server leaves unfinished, falls back to servers of another model where the settings allow it, and gives
requests back to the queue while no server is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine import (
    RETURNED,
    EngineDead,
    EngineHealth,
    Failure,
    ModelCard,
    Piece,
    Request,
    Stats,
    Step,
    task_health,
)
from telemetry.logs import EventLog
from telemetry.tracing import Tracing
from workers.engines.upstream import continuation, exchange, tasks
from workers.engines.upstream.continuation import BrokenTexts, RefusedRungs, Rung
from workers.engines.upstream.generation import UpstreamGeneration
from workers.engines.upstream.places import OtherModels, UpstreamModel, checked_models
from workers.engines.upstream.pool import ServerPool
from workers.engines.upstream.reply import End, ReplyOutcome
from workers.engines.upstream.server import DEFAULT_CONTEXT, ProbeFailed
from workers.engines.upstream.settings import UpstreamSettings

log = logging.getLogger(__name__)
events = EventLog(__name__)

TICK_S = 0.25
"""How often timers, probes and gauges are looked at."""
MAX_BREAKS = 5
"""A request that servers fail so often in a row, without a token between, fails: it may be its own fault. Returns to
the queue between them change nothing, and a server that takes no connection does not count."""
MAX_RESTARTS = 10
"""An answer that no server could continue so often, and that began again each time, fails when servers fail it once
more."""
MAX_BARE_ENDS = 2
"""A server that has ended so many replies in a row without a finish reason gives none."""
MAX_HELD = 256
"""Requests that wait in the engine for the servers of one model while those of another are there."""
MIN_RETRY_S, MAX_RETRY_S = 0.05, 5.0
STOP_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Running:
    """A request that the engine holds."""

    generation: UpstreamGeneration
    task: asyncio.Task[None]
    pool: ServerPool | None = None
    """The servers that have it, or had it last."""
    has_begun: bool = False
    """Whether its task runs: cancelled before, a task would end without a last piece."""


class UpstreamEngine:
    """See penstock.engine.Engine."""

    def __init__(self, model: UpstreamModel, *fallbacks: UpstreamModel) -> None:
        """`fallbacks`: models that may answer instead, best first."""
        self._patience_s = model.settings.fallback_after_s
        self._own, *self._fallbacks = self._pools = [
            ServerPool(each, self._emit, self._spawn) for each in (model, *fallbacks)
        ]
        self._live: dict[str, Running] = {}
        self._held: set[str] = set()
        """Ids of requests that wait for servers of a model that are away, while those of another one are there."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._on_step: Step = lambda _: None
        self._pending: list[Piece] = []
        self._steps = 0
        self._card: ModelCard | None = None
        self._away_since: float | None = None
        """When the last of all servers went away (monotonic); None while one is there."""
        self._refused, self._broken = RefusedRungs(), BrokenTexts()

    # --- the engine protocol -------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Wait until one of the servers answers. Raises EngineDead for what only other settings change."""
        self._on_step = on_step
        began = time.monotonic()
        failures = await self._own.probe(on_phase)
        if not self._own.ready:
            log.warning("%s", _waiting(failures))
        while not self._own.ready:
            if len(failures) == len(self._own.endpoints) and all(each.lasting for each in failures.values()):
                raise EngineDead(_waiting(failures))
            on_phase(_waiting(failures))
            if time.monotonic() - began >= self._patience_s and await self._has_fallback():
                break
            await asyncio.sleep(1.0)
            failures = await self._own.probe(lambda _: None)
        self._card = self._own.card or self._card_of_fallback()
        self._ticker = asyncio.create_task(self._tick())
        for pool in self._fallbacks:
            if not pool.ready:
                self._spawn(pool.probe())
        return self._card

    async def check(self, request: Request) -> None:
        """Raises Refused."""
        self._refuse(request)

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        if self._ticker is None:
            raise EngineDead("the engine is not running")
        self._refuse(request)
        generation = UpstreamGeneration(
            request, time.monotonic(), self._broken.take(request.text_id, begins=not request.past)
        )
        if request.past:
            generation.tried |= self._refused.of(request, generation.text)
        self._live[request.id] = Running(generation, asyncio.create_task(self._run(generation)))

    def cancel(self, request_id: str) -> None:
        """The connection is closed at once, by which every server stops, or is told to stop."""
        self._stop_reading(request_id, left=False)

    def leave(self, request_id: str) -> None:
        """As `cancel`, but what goes on at its server is left to the next worker."""
        self._stop_reading(request_id, left=True)

    def _stop_reading(self, request_id: str, *, left: bool) -> None:
        running = self._live.get(request_id)
        if running is None or running.generation.cancelled:
            return
        running.generation.cancelled, running.generation.left = True, left
        if running.has_begun and (running.pool is None or not running.pool.cancel(request_id)):
            running.task.cancel()

    def stats(self) -> Stats:
        """`slots`: what the servers that get new requests may run, and what the others run still."""
        used, now = self._used(), time.monotonic()
        slots = sum([pool.slots(now) for pool in used])
        running = sum([pool.running for pool in self._pools])
        others = running - sum([pool.running for pool in used]) + len(self._held)
        away = () if self._away_since is None else self._own.away()
        return Stats(
            slots=max(1, slots + others),
            running=running,
            waiting=max(0, len(self._live) - running),
            steps=self._steps,
            accepts=slots > 0,
            away=away,
            away_s=now - self._away_since if away and self._away_since is not None else 0.0,
            miscounted=sum([pool.exchange.miscounted for pool in self._pools]),
        )

    def health(self) -> EngineHealth:
        """Well while its own task runs: a server that is away is no reason to end the worker."""
        return EngineHealth(False, "not started") if self._ticker is None else task_health(self._ticker)

    def trace_calls(self, tracing: Tracing) -> None:
        """As CallTracer says."""
        for pool in self._pools:
            pool.exchange.tracing = tracing

    def share(self, workers: int) -> None:
        """Budgets and rate limits are divided by the number of workers. Those of a fallback's servers are halved too:
        its own workers have the other half."""
        self._own.share(workers)
        for pool in self._fallbacks:
            pool.share(2 * workers)

    def restart_reason(self, request: Request) -> str:
        """Why no server can continue this request after its past; "" if one can."""
        number = exchange.number_of(request.served_by, [pool.model for pool in self._pools])
        if number is None:
            return f"{request.served_by} began the answer, and is no fallback any more"
        reasons = []
        tried = self._refused.of(request, request.past_text)
        for endpoint in self._pools[number].ready:
            if endpoint.facts is not None:
                way = continuation.choose(endpoint.facts, request, request.past, tried)
                if way.rung is not Rung.RESTART:
                    return ""
                reasons.append(way.reason)
        return reasons[0] if reasons else ""

    async def stop(self) -> None:
        for request_id in list(self._live):
            self.cancel(request_id)
        tasks = [running.task for running in self._live.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        self._flush()
        for task in (*self._tasks, *([self._ticker] if self._ticker else [])):
            task.cancel()
        for pool in self._pools:
            pool.close()

    # --- fallbacks -----------------------------------------------------------------------------------------------

    def _used(self) -> list[ServerPool]:
        """The pools that get new requests: fallbacks only while the own servers cannot be used."""
        if not self._fallbacks:
            return self._pools
        limited = self._own.ready and self._own.wait_s(1, time.monotonic()) > self._patience_s
        return [self._own] if self._own.ready and not limited else self._pools

    async def _has_fallback(self) -> bool:
        for pool in self._fallbacks:
            await pool.probe()
        return any(pool.ready for pool in self._fallbacks)

    def _card_of_fallback(self) -> ModelCard:
        """The card of a model none of whose servers has answered yet: what its fallback can do."""
        card = next(pool.card for pool in self._fallbacks if pool.card is not None)
        return msgspec.structs.replace(card, name=self._own.model)

    async def _pool_for(self, generation: UpstreamGeneration) -> ServerPool | None:
        """The servers that get a request; None if it goes back to the queue."""
        while not generation.cancelled:
            states = [pool.state(generation) for pool in self._pools]
            chosen = exchange.choose(generation.request, states, self._patience_s, generation.began)
            if chosen.number is not None:
                pool = self._pools[chosen.number]
                self._route(generation, pool, chosen.reason)
                return pool
            if not any(state.ready for state in states) or len(self._held) >= MAX_HELD:
                return None
            self._held.add(generation.id)
            try:
                await asyncio.sleep(TICK_S)
            finally:
                self._held.discard(generation.id)
        return None

    def _route(self, generation: UpstreamGeneration, pool: ServerPool, reason: str) -> None:
        running = self._live[generation.id]
        before, running.pool = running.pool, pool
        if before is not None and pool is not before:
            before.end(generation)
        if generation.rows or pool is before:
            return
        generation.move_to("" if pool is self._own else pool.model)
        if reason:
            events.write(
                "an answer falls back", request=generation.id, model=self._own.model, to=pool.model, reason=reason
            )

    # --- one request ---------------------------------------------------------------------------------------------

    def _refuse(self, request: Request) -> None:
        """Raises Refused for what no server can ever do."""
        context = self._card.context if self._card is not None else DEFAULT_CONTEXT
        tasks.refuse(request, context, self._own.endpoints)

    async def _run(self, generation: UpstreamGeneration) -> None:
        """From submission to the last piece."""
        self._live[generation.id].has_begun = True
        try:
            last = await self._last(generation)
        except asyncio.CancelledError:
            if not generation.cancelled:
                raise
            last = generation.last("cancelled")
        except Exception:  # the boundary of a request: it must end, whatever is wrong
            log.exception("a request failed in the engine", extra={"request": generation.id})
            last = generation.last(failure=Failure("engine_error", "The engine raised an error for this request.", 500))
        running = self._live.pop(generation.id, None)
        if running is not None:
            (running.pool or self._own).end(generation, goes_on=generation.left or last.finish == RETURNED)
        self._emit(last)

    async def _last(self, generation: UpstreamGeneration) -> Piece:
        if generation.is_stopped:  # the worker was lost after the stop string and before its end
            return generation.last("stop")
        while not generation.cancelled:
            if (left_s := self._left_s(generation)) is not None and left_s <= 0:
                return generation.last(failure=self._refused_failure(generation))
            pool = await self._pool_for(generation)
            if pool is None:
                return generation.last("cancelled") if generation.cancelled else self._returned(generation)
            waits = [left_s, self._patience_s if self._fallbacks else None]
            outcome = await pool.run(generation, min((each for each in waits if each is not None), default=None))
            if outcome is None:
                continue
            if (last := self._ending(generation, outcome)) is not None:
                return last
            await asyncio.sleep(self._delay(generation, outcome))
        return generation.last("cancelled")

    def _ending(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> Piece | None:
        """The last piece, if the request ends with this outcome; None: it is sent again."""
        if generation.cancelled or outcome.end is End.CANCELLED:
            return generation.last("cancelled")
        if outcome.end is End.DONE or self._is_bare_end(generation, outcome):
            return generation.last(outcome.finish or ("length" if generation.is_spent else "stop"))
        if outcome.end is End.FAILED:
            return generation.last(failure=outcome.failure)
        if outcome.end is End.RESTART:
            log.warning("no server can continue an answer: %s", outcome.reason, extra={"request": generation.id})
            self._refused.note(generation.request, generation.text, generation.tried)
            return self._returned(generation)
        counts = generation.counts
        if counts.breaks >= MAX_BREAKS or (counts.restarts >= MAX_RESTARTS and outcome.sent):
            return generation.last(failure=outcome.failure)
        return None

    def _is_bare_end(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> bool:
        """Whether an answer without a finish reason counts as complete: its server has nothing to add to it, or gives
        no finish reasons and cannot continue it."""
        if outcome.end is End.RESTART:
            return generation.bare_ends >= MAX_BARE_ENDS
        return outcome.bare and generation.is_bare_end

    def _left_s(self, generation: UpstreamGeneration) -> float | None:
        """Seconds until a request that limits of servers hold fails; None: none has refused it since its last token."""
        refused_at = generation.counts.refused_at
        return None if refused_at is None else refused_at + self._own.settings.refused_s - time.monotonic()

    def _refused_failure(self, generation: UpstreamGeneration) -> Failure:
        waited_s, said = self._own.settings.refused_s, generation.counts.refusal
        return Failure("upstream_busy", f"the upstream server refused the request for {waited_s:g} s: {said}", 503)

    def _returned(self, generation: UpstreamGeneration) -> Piece:
        """The last piece of a request that goes back to the queue."""
        generation.counts.shown = bool(generation.rows)
        self._broken.keep(generation.request.text_id, generation.counts)
        return generation.last(RETURNED)

    def _delay(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> float:
        """Seconds before a request is sent again; a busy server's own delay is kept by its place."""
        if outcome.end is not End.BROKEN or generation.counts.breaks <= 1:
            return 0.0
        return min(MIN_RETRY_S * 2.0**generation.counts.breaks, MAX_RETRY_S)

    # --- steps and time ------------------------------------------------------------------------------------------

    def _emit(self, piece: Piece) -> None:
        """Queue a piece. What is read in one iteration of the event loop is one step."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(piece)

    def _flush(self) -> None:
        pieces, self._pending = self._pending, []
        if pieces:
            self._steps += 1
            self._on_step(pieces)

    async def _tick(self) -> None:
        """Timers of replies, probes of servers that are away, gauges of those that are there; for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for pool in self._pools:
                pool.tick(now)
            self._note_away(now)

    def _note_away(self, now: float) -> None:
        if any(pool.ready for pool in self._pools):
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _waiting(failures: dict[str, ProbeFailed]) -> str:
    return "waiting for " + "; ".join(f"{url}: {error}" for url, error in failures.items())


def build(
    model: str, settings: UpstreamSettings, data_dir: Path, others: OtherModels = lambda _: None
) -> UpstreamEngine:
    """Raises ConfigError."""
    return UpstreamEngine(*checked_models(model, settings, others))
