"""Engine `upstream`: an OpenAI-compatible server elsewhere generates the texts, and this worker keeps them safe.

The worker queues, logs and delivers as for any engine. This engine keeps requests at the servers within a budget,
continues what a server leaves unfinished, and gives requests back to the queue while no server is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine import (
    RETURNED,
    ChatTurn,
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
from runtime.config import ConfigError
from workers.engines.upstream.continuation import ladder
from workers.engines.upstream.continuation.ladder import Rung
from workers.engines.upstream.continuation.refusals import RefusedRungs
from workers.engines.upstream.exchange import UpstreamExchange
from workers.engines.upstream.places.endpoint import ServerEndpoint, ServerPlace
from workers.engines.upstream.places.limits import REFUSED_S, UpstreamKey
from workers.engines.upstream.places.places import ServerPlaces
from workers.engines.upstream.reply.endings import End, ReplyOutcome
from workers.engines.upstream.reply.generation import UpstreamGeneration
from workers.engines.upstream.server.card import card_of, lacking
from workers.engines.upstream.server.kinds import DEFAULT_CONTEXT
from workers.engines.upstream.server.probe import ProbeFailed
from workers.engines.upstream.settings import UpstreamSettings

log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often timers, probes and gauges are looked at."""
MAX_BREAKS = 5
"""A request that servers fail so often in a row, without a token between, fails: it may be its own fault."""
MAX_REFUSALS = 5
"""A server that says so often in a row that it has no room counts as away."""
MIN_RETRY_S, MAX_RETRY_S = 0.05, 5.0
HOLD_S = 0.5
"""A server that has no room and does not say for how long gets no request for so long; doubled each time."""
CHARACTERS_PER_TOKEN = 4
STOP_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Running:
    """A request that the engine holds."""

    generation: UpstreamGeneration
    task: asyncio.Task[None]


class UpstreamEngine:
    """See penstock.engine.Engine."""

    def __init__(self, model: str, settings: UpstreamSettings, keys: Sequence[UpstreamKey]) -> None:
        self._model, self._settings = model, settings
        self._endpoints = [ServerEndpoint(url, model, settings, keys) for url in settings.urls]
        self._places = ServerPlaces(self._endpoints)
        self._exchange = UpstreamExchange(settings, self._emit)
        self._live: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._on_step: Step = lambda _: None
        self._pending: list[Piece] = []
        self._steps = 0
        self._card: ModelCard | None = None
        self._refused = RefusedRungs()

    # --- the engine protocol -------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Wait until one of the servers answers. Raises EngineDead for what only other settings change."""
        self._on_step = on_step
        failures: dict[str, ProbeFailed] = {}
        while not self._places.ready:
            for endpoint in self._endpoints:
                on_phase(f"asking {endpoint.url}" if not failures else _waiting(failures))
                try:
                    await endpoint.probe()
                except ProbeFailed as error:
                    failures[endpoint.url] = error
            if len(failures) == len(self._endpoints) and all(each.lasting for each in failures.values()):
                raise EngineDead(_waiting(failures))
            if not self._places.ready:
                on_phase(_waiting(failures))
                await asyncio.sleep(1.0)
        known = {each.url: each.facts for each in self._endpoints if each.facts is not None}
        for url, facts in known.items():
            log.info("%s: %s", url, facts)
        self._card = card_of(self._model, self._settings, list(known.values()))
        self._ticker = asyncio.create_task(self._tick())
        return self._card

    async def check(self, request: Request) -> None:
        """Raises Refused."""
        self._refuse(request)

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        if self._ticker is None:
            raise EngineDead("the engine is not running")
        self._refuse(request)
        generation = UpstreamGeneration(request, time.monotonic())
        if request.past:
            generation.tried |= self._refused.of(request, generation.text)
        self._live[request.id] = Running(generation, asyncio.create_task(self._run(generation)))

    def cancel(self, request_id: str) -> None:
        """The connection is closed at once, by which every server stops."""
        running = self._live.get(request_id)
        if running is None or running.generation.cancelled:
            return
        running.generation.cancelled = True
        if (reader := self._exchange.readers.get(request_id)) is not None:
            reader.settle(ReplyOutcome(End.CANCELLED))
        else:
            running.task.cancel()

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        return not self._places.waiting and self._places.has_room(prompt_tokens + max_tokens)

    def stats(self) -> Stats:
        """`slots`: the budgets of the servers that are there; while a rate limit holds, no more than what runs."""
        ready, now = self._places.ready, time.monotonic()
        open_ = [each for each in ready if each.wait_s(1, now) <= 0 and not each.budget.saturated]
        running = sum(each.in_flight for each in self._endpoints)
        slots = sum(each.budget.limit if each in open_ else each.in_flight for each in ready)
        return Stats(
            slots=max(1, slots),
            running=running,
            waiting=max(0, len(self._live) - running),
            steps=self._steps,
            accepts=bool(ready) and slots > 0,
        )

    def health(self) -> EngineHealth:
        """Well while its own task runs: a server that is away is no reason to end the worker."""
        return EngineHealth(False, "not started") if self._ticker is None else task_health(self._ticker)

    def share(self, workers: int) -> None:
        """Budgets and rate limits are divided by the number of workers."""
        for endpoint in self._endpoints:
            endpoint.share(workers)
        self._places.fill()

    def restart_reason(self, request: Request) -> str:
        """Why no server can continue this request after its past; "" if one can."""
        reasons = []
        tried = self._refused.of(request, request.past_text)
        for endpoint in self._places.ready:
            if endpoint.facts is not None:
                way = ladder.choose(endpoint.facts, request, request.past, tried)
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
        self._places.close()
        for endpoint in self._endpoints:
            endpoint.client.close()

    # --- one request ---------------------------------------------------------------------------------------------

    def _refuse(self, request: Request) -> None:
        """Raises Refused for what no server can ever do."""
        self._refuse_biases(request.sampling.logit_bias)
        context = self._card.context if self._card is not None else DEFAULT_CONTEXT
        prompt, wanted = request.prompt, request.sampling.max_tokens or 1
        if isinstance(prompt, str) or ladder.is_chat(request):
            if not len(prompt):
                raise Refused(Failure("invalid_request_error", "the prompt is empty", 400, "prompt"))
            return
        if len(prompt) + wanted > context:
            message = (
                f"the prompt has {len(prompt)} tokens and {wanted} more are asked for, but the context is {context}"
            )
            raise Refused(Failure("context_length_exceeded", message, 400, "prompt"))

    def _refuse_biases(self, biases: Mapping[int, float]) -> None:
        """Raises Refused for a token that a server is known to lack: llama-server would ignore it."""
        known = [each.facts.vocabulary for each in self._endpoints if each.facts is not None and each.facts.vocabulary]
        if biases and known and max(biases) >= min(known):
            message = f"logit_bias: token {max(biases)} is not one of this model's {min(known)}"
            raise Refused(Failure("invalid_request_error", message, 400, "logit_bias"))

    async def _run(self, generation: UpstreamGeneration) -> None:
        """From submission to the last piece."""
        try:
            last = await self._last(generation)
        except asyncio.CancelledError:
            if not generation.cancelled:
                raise
            last = generation.last("cancelled")
        except Exception:  # the boundary of a request: it must end, whatever is wrong
            log.exception("a request failed in the engine", extra={"request": generation.id})
            last = generation.last(failure=Failure("engine_error", "The engine raised an error for this request.", 500))
        self._live.pop(generation.id, None)
        self._emit(last)

    async def _last(self, generation: UpstreamGeneration) -> Piece:
        if generation.is_stopped:  # the worker was lost after the stop string and before its end
            return generation.last("stop")
        while not generation.cancelled:
            place = await self._places.wait(generation.request.priority, self._cost(generation))
            if place is None:
                return generation.last(RETURNED)
            outcome = ReplyOutcome(End.CANCELLED)
            try:
                outcome = await self._exchange.run(generation, place)
            finally:
                self._learn(generation, place, outcome)
                self._places.leave(place, generation.spent())
            if (last := self._ending(generation, outcome)) is not None:
                return last
            await asyncio.sleep(self._delay(generation, outcome))
        return generation.last("cancelled")

    def _ending(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> Piece | None:
        """The last piece, if the request ends with this outcome; None: it is sent again."""
        if generation.cancelled or outcome.end is End.CANCELLED:
            return generation.last("cancelled")
        if outcome.end is End.DONE:
            return generation.last(outcome.finish)
        if outcome.end is End.FAILED:
            return generation.last(failure=outcome.failure)
        if outcome.end is End.RESTART:
            log.warning("no server can continue an answer: %s", outcome.reason, extra={"request": generation.id})
            self._refused.note(generation.request, generation.text, generation.tried)
            return generation.last(RETURNED)
        if generation.breaks >= MAX_BREAKS:
            return generation.last(failure=outcome.failure)
        return None

    def _learn(self, generation: UpstreamGeneration, place: ServerPlace, outcome: ReplyOutcome) -> None:
        """Tell breaker, budget and key how a reply ended."""
        endpoint, now = place.endpoint, time.monotonic()
        if outcome.end is End.DONE:
            endpoint.breaker.succeed()
            endpoint.budget.note_success()
        elif outcome.end is End.BROKEN:
            generation.breaks += 1
            log.warning("%s broke an answer: %s", endpoint.url, outcome.reason, extra={"request": generation.id})
            endpoint.fail(outcome.reason, down=not outcome.sent)
        elif outcome.end is End.BUSY:
            generation.refusals += 1
            self._hold(generation, place, outcome, now)
            if outcome.status != 429 and generation.refusals >= MAX_REFUSALS:  # a gateway without a server, perhaps
                endpoint.fail(outcome.reason, down=True)
        elif outcome.end is End.KEY:
            log.error("%s does not take the key in %s: %s", endpoint.url, place.key.name or "(none)", outcome.reason)
            place.key.block(REFUSED_S, now)
            if all(key.blocked_until > now for key in endpoint.keys.keys):
                endpoint.fail("it takes none of the keys", down=True)

    def _hold(self, generation: UpstreamGeneration, place: ServerPlace, outcome: ReplyOutcome, now: float) -> None:
        wait = outcome.retry_s
        if outcome.status == 429:
            place.key.block(HOLD_S if wait is None else wait, now)
        else:
            place.endpoint.held_until = now + (
                min(HOLD_S * 2**generation.refusals, MAX_RETRY_S) if wait is None else wait
            )
        place.endpoint.budget.note_busy(now)

    def _delay(self, generation: UpstreamGeneration, outcome: ReplyOutcome) -> float:
        """Seconds before a request is sent again; a busy server's own delay is kept by its place."""
        if outcome.end is not End.BROKEN or generation.breaks <= 1:
            return 0.0
        return min(MIN_RETRY_S * 2.0**generation.breaks, MAX_RETRY_S)

    def _cost(self, generation: UpstreamGeneration) -> int:
        request = generation.request
        parts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        texts = [part.content if isinstance(part, ChatTurn) else part for part in parts]
        prompt = sum([len(part) // CHARACTERS_PER_TOKEN if isinstance(part, str) else 1 for part in texts])
        limit = request.sampling.max_tokens or self._settings.default_output or 0
        return prompt + max(0, limit)

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
        first_s, between_s = self._settings.first_token_s, self._settings.between_tokens_s
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for reader in list(self._exchange.readers.values()):
                reader.check_time(now, first_s, between_s)
            for endpoint in self._endpoints:
                if endpoint.breaker.may_probe(now):
                    self._spawn(self._probe(endpoint))
                elif endpoint.ready:
                    self._spawn(endpoint.read_gauges(now))
            self._places.fill()

    async def _probe(self, endpoint: ServerEndpoint) -> None:
        try:
            await endpoint.probe()
        except ProbeFailed as error:
            log.log(logging.ERROR if error.lasting else logging.INFO, "%s is still away: %s", endpoint.url, error)
            return
        endpoint.unfit = lacking(self._card, endpoint.facts) if self._card and endpoint.facts else ""
        if endpoint.unfit:
            log.error("%s gets no requests: %s", endpoint.url, endpoint.unfit)
        else:
            log.info("%s is there", endpoint.url)
        self._places.fill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _waiting(failures: dict[str, ProbeFailed]) -> str:
    return "waiting for " + "; ".join(f"{url}: {error}" for url, error in failures.items())


def keys_of(settings: UpstreamSettings, where: str) -> list[UpstreamKey]:
    """The keys in the environment. Raises ConfigError if a variable is not set."""
    keys = []
    for name in settings.key_env:
        secret = os.environ.get(name, "").strip()
        if not secret:
            raise ConfigError(f"{where}.key_env", f"the variable {name} is not set", "export it where workers start")
        if not secret.isascii() or not secret.isprintable():
            raise ConfigError(f"{where}.key_env", f"the variable {name} holds no API key", "keys are printable ASCII")
        keys.append(UpstreamKey(name, secret))
    return keys


def check_settings(model: str, settings: UpstreamSettings) -> list[UpstreamKey]:
    """The keys of a model whose settings can be used. Raises ConfigError."""
    where = f"models.{model}.options"
    if not settings.urls:
        raise ConfigError(f"{where}.urls", "no server is named", 'e.g. options.urls = ["http://gpu-1:8000/v1"]')
    return keys_of(settings, where)


def build(model: str, settings: UpstreamSettings, data_dir: Path) -> UpstreamEngine:
    """Raises ConfigError."""
    return UpstreamEngine(model, settings, check_settings(model, settings))
