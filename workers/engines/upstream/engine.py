"""Engine `upstream`: an OpenAI-compatible server elsewhere generates the texts, and this worker keeps them safe.

The worker queues, logs and delivers as for any engine. This engine keeps requests at the servers within a budget,
continues what a server leaves unfinished, falls back to servers of another model where the settings allow it, and gives
requests back to the queue while no server is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    Refused,
    Request,
    Stats,
    Step,
    task_health,
)
from penstock.loops import spawn
from telemetry.logs import EventLog
from telemetry.tracing import Tracing
from workers.engines.text import TokenGate
from workers.engines.upstream import continuation
from workers.engines.upstream.continuation import BrokenTexts, Rung
from workers.engines.upstream.endpoints import OtherModels, UpstreamModel, checked_models
from workers.engines.upstream.generation import UpstreamGeneration
from workers.engines.upstream.pool import ServerPool, suits
from workers.engines.upstream.reply import End, ReplyOutcome
from workers.engines.upstream.server import DEFAULT_CONTEXT
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


class UpstreamEngine:
    """See penstock.engine.Engine."""

    def __init__(self, model: UpstreamModel, *fallbacks: UpstreamModel) -> None:
        """`fallbacks`: models that may answer instead, best first."""
        self._patience_s = model.settings.fallback_after_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._own, *self._fallbacks = self._pools = [
            ServerPool(each, self._emit, self._tasks) for each in (model, *fallbacks)
        ]
        self._live: dict[str, UpstreamGeneration] = {}
        self._held: set[str] = set()
        """Ids of requests that wait for servers of a model that are away, while those of another one are there."""
        self._ticker: asyncio.Task[None] | None = None
        self._on_step: Step = lambda _: None
        self._pending: list[Piece] = []
        self._steps = 0
        self._card: ModelCard | None = None
        self._away_since: float | None = None
        """When the last of all servers went away (monotonic); None while one is there."""
        self._broken = BrokenTexts()

    # --- the engine protocol -------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Wait until one of the servers answers. Raises EngineDead for what only other settings change."""
        self._on_step, began, told = on_step, time.monotonic(), ""
        on_phase(f"asking {', '.join(self._own.settings.urls)}")
        while (failures := await self._own.probe()) and not self._own.ready:
            waiting = "waiting for " + "; ".join(f"{url}: {error}" for url, error in failures.items())
            if all(each.lasting for each in failures.values()):
                raise EngineDead(waiting)
            if waiting != told:
                log.warning("%s", waiting)
            told = waiting
            on_phase(waiting)
            if time.monotonic() - began >= self._patience_s and await self._has_fallback():
                break
            await asyncio.sleep(1.0)
        card = next(pool.card for pool in self._pools if pool.card is not None)
        own = {"name": self._own.model, "adapters": tuple(self._own.adapters)}
        self._card = msgspec.structs.replace(card, **own)  # of a fallback: what it can do
        self._ticker = asyncio.create_task(self._tick())
        for pool in self._fallbacks:
            if not pool.ready:
                spawn(pool.probe(), self._tasks)
        return self._card

    async def check(self, request: Request) -> None:
        """Raises Refused."""
        self._refuse(request)

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        if self._ticker is None:
            raise EngineDead("the engine is not running")
        self._refuse(request)
        counts = self._broken.take(request.text_id, begins=not request.past)
        generation = self._live[request.id] = UpstreamGeneration(request, time.monotonic(), counts)
        generation.task = asyncio.create_task(self._run(generation))

    def leave(self, request_id: str) -> None:
        """As `cancel`, but what goes on at its server is left to the next worker."""
        self.cancel(request_id, left=True)

    def cancel(self, request_id: str, *, left: bool = False) -> None:
        """The connection is closed at once, by which every server stops, or is told to stop."""
        generation = self._live.get(request_id)
        if generation is None or generation.cancelled:
            return
        generation.cancelled, generation.left = True, left
        if generation.reply is not None and not generation.reply.done.done():
            generation.reply.settle(ReplyOutcome(End.CANCELLED))
        elif generation.has_begun:  # it may be about to get another connection
            generation.task.cancel()

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
            miscounted=sum([pool.miscounted for pool in self._pools]),
        )

    def health(self) -> EngineHealth:
        """Well while its own task runs: a server that is away is no reason to end the worker."""
        return EngineHealth(False, "not started") if self._ticker is None else task_health(self._ticker)

    def trace_calls(self, tracing: Tracing) -> None:
        """As CallTracer says."""
        for pool in self._pools:
            pool.tracing = tracing

    def share(self, workers: int) -> None:
        """Budgets and rate limits are divided by the number of workers. Those of a fallback's servers are halved too:
        its own workers have the other half."""
        self._own.share(workers)
        for pool in self._fallbacks:
            pool.share(2 * workers)

    def restart_reason(self, request: Request) -> str:
        """Why no server can continue this request after its past; "" if one can."""
        pool = self._pool_of(request.served_by)
        if pool is None:
            return f"{request.served_by} began the answer, and is no fallback any more"
        known, tried = [each.facts for each in pool.ready if each.facts], self._broken.refused(request.text_id)
        ways = [continuation.choose(facts, request, request.past, tried) for facts in known]
        return ways[0][1] if ways and all(rung is Rung.RESTART for rung, _ in ways) else ""

    async def stop(self) -> None:
        for request_id in list(self._live):
            self.cancel(request_id)
        if tasks := [generation.task for generation in self._live.values()]:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        self._flush()
        for task in (*self._tasks, *([self._ticker] if self._ticker else [])):
            task.cancel()
        for pool in self._pools:
            pool.close()

    # --- fallbacks -----------------------------------------------------------------------------------------------

    def _used(self) -> list[ServerPool]:
        """The pools that get new requests: fallbacks only while the own servers cannot be used."""
        serves = self._own.ready and self._own.wait_s(1, time.monotonic()) <= self._patience_s
        return [self._own] if serves else self._pools

    async def _has_fallback(self) -> bool:
        for pool in self._fallbacks:
            await pool.probe()
        return any(pool.ready for pool in self._fallbacks)

    def _pool_of(self, model: str) -> ServerPool | None:
        """The servers of the model that began an answer; None if it is no longer among them."""
        return next((pool for pool in self._pools if pool.model == model), None) if model else self._own

    def _choose(self, generation: UpstreamGeneration) -> tuple[ServerPool | None, str]:
        """The servers that get a request now, and why not those of its own model; None: it waits for a server.

        An answer stays with the model that gave its first token: two models never write one text. Before that, a
        request goes to a fallback while no server of its own model can be used, or after they have broken it twice. An
        error by the request's own fault, and a content filter, lead to no fallback.
        """
        if generation.rows:
            pool = self._pool_of(generation.model)
            return (pool if pool is not None and pool.ready else None), ""
        reason = self._own.obstacle(generation, self._patience_s)
        if not reason:
            return self._own, ""
        for pool in self._fallbacks:
            fits = pool.card is not None and suits(pool.card, generation.request)
            if fits and not pool.obstacle(generation, self._patience_s):
                return pool, reason
        return (self._own if self._own.ready else None), ""

    async def _pool_for(self, generation: UpstreamGeneration) -> ServerPool | None:
        """The servers that get a request; None if it goes back to the queue."""
        before, (pool, reason) = generation.pool, self._choose(generation)
        while pool is None:
            if not any(each.ready for each in self._pools) or len(self._held) >= MAX_HELD:
                return None
            self._held.add(generation.id)
            try:
                await asyncio.sleep(TICK_S)
            finally:
                self._held.discard(generation.id)
            pool, reason = self._choose(generation)
        generation.pool = pool
        if before is not None and pool is not before:
            before.end(generation)
        if not generation.rows and pool is not before:
            generation.move_to("" if pool is self._own else pool.model)
            if reason:
                own = self._own.model
                events.write("an answer falls back", request=generation.id, model=own, to=pool.model, reason=reason)
        return pool

    # --- one request ---------------------------------------------------------------------------------------------

    def _refuse(self, request: Request) -> None:
        """Raises Refused for what no server can ever do."""
        if request.task is not None:
            return
        context = self._card.context if self._card is not None else DEFAULT_CONTEXT
        biases, size, wanted = request.sampling.logit_bias, len(request.ids), request.sampling.max_tokens or 1
        known = [each.facts.vocabulary for each in self._own.endpoints if each.facts and each.facts.vocabulary]
        code, param = "invalid_request_error", "prompt"
        if biases and known and max(biases) >= min(known):  # llama-server would ignore it
            param, message = "logit_bias", f"logit_bias: token {max(biases)} is not one of this model's {min(known)}"
        elif not request.prompt:
            message = "the prompt is empty"
        elif size and size + wanted > context:
            code = "context_length_exceeded"
            message = f"the prompt has {size} tokens and {wanted} more are asked for, but the context is {context}"
        else:
            return
        raise Refused(Failure(code, message, 400, param))

    async def _run(self, generation: UpstreamGeneration) -> None:
        """From submission to the last piece."""
        generation.has_begun = True
        try:
            last = await self._last(generation)
        except asyncio.CancelledError:
            if not generation.cancelled:
                raise
            last = generation.last("cancelled")
        except Exception:  # the boundary of a request: it must end, whatever is wrong
            log.exception("a request failed in the engine", extra={"request": generation.id})
            last = generation.last(failure=Failure("engine_error", "The engine raised an error for this request.", 500))
        if self._live.pop(generation.id, None) is not None:
            (generation.pool or self._own).end(generation, goes_on=generation.left or last.finish == RETURNED)
        self._emit(last)

    async def _last(self, generation: UpstreamGeneration) -> Piece:
        if TokenGate(generation.request.sampling.stop, generation.request.past_text).hit:
            return generation.last("stop")  # the worker was lost after the stop string and before its end
        counts, refused_s = generation.counts, self._own.settings.refused_s
        while not generation.cancelled:
            waits = [self._patience_s] if self._fallbacks else []
            if counts.refused_at is not None:  # limits of servers hold it since its last token
                waits.append(counts.refused_at + refused_s - time.monotonic())
                if waits[-1] <= 0:
                    said = f"the upstream server refused the request for {refused_s:g} s: {counts.refusal}"
                    return generation.last(failure=Failure("upstream_busy", said, 503))
            pool = await self._pool_for(generation)
            if pool is None:
                return self._returned(generation)
            outcome = await pool.run(generation, min(waits, default=None))
            if outcome is None:
                continue
            if (last := self._ending(generation, outcome)) is not None:
                return last
            if outcome.end is End.BROKEN and counts.breaks > 1:  # a busy server's own delay is kept by its slot
                await asyncio.sleep(min(MIN_RETRY_S * 2.0**counts.breaks, MAX_RETRY_S))
        return generation.last("cancelled")

    def _ending(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> Piece | None:
        """The last piece, if the request ends with this outcome; None: it is sent again."""
        if generation.cancelled or outcome.end is End.CANCELLED:
            return generation.last("cancelled")
        # Without a finish reason an answer is complete if its server has nothing to add to it, or gives no finish
        # reasons and cannot continue it.
        cannot_add = outcome.end is End.RESTART and generation.bare_ends >= MAX_BARE_ENDS
        if outcome.end is End.DONE or cannot_add or (outcome.how == "bare" and generation.is_bare_end):
            return generation.last(outcome.finish or ("length" if generation.is_spent else "stop"))
        if outcome.end is End.RESTART:
            log.warning("no server can continue an answer: %s", outcome.reason, extra={"request": generation.id})
            generation.counts.refused = frozenset(generation.tried)
            return self._returned(generation)
        breaks, restarts = generation.counts.breaks, generation.counts.restarts if outcome.how != "unsent" else 0
        if outcome.end is End.FAILED or breaks >= MAX_BREAKS or restarts >= MAX_RESTARTS:
            return generation.last(failure=outcome.failure)
        return None

    def _returned(self, generation: UpstreamGeneration) -> Piece:
        """The last piece of a request that goes back to the queue."""
        generation.counts.shown = bool(generation.rows)
        self._broken.keep(generation.request.text_id, generation.counts)
        return generation.last(RETURNED)

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
            if any(pool.ready for pool in self._pools):
                self._away_since = None
            elif self._away_since is None:
                self._away_since = now


def build(
    model: str,
    settings: UpstreamSettings,
    data_dir: Path,
    adapters: Mapping[str, str],
    others: OtherModels = lambda _: None,
) -> UpstreamEngine:
    """Raises ConfigError."""
    own, *fallbacks = checked_models(model, settings, others)
    return UpstreamEngine(replace(own, adapters=adapters), *fallbacks)
