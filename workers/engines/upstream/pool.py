"""Server pool: the servers of one model, asked as if they were one server, and the queue in front of them.

It learns from each reply."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from penstock.engine import CHARACTERS_PER_TOKEN, ModelCard, Piece, Request
from penstock.loops import spawn
from streaming.jobs.job import HINTS, SENSES, Chat, Job, Text, unsupported
from streaming.order import Priority
from telemetry.tracing import NO_TRACING
from workers.engines.upstream.endpoints import ANSWERS_S, REFUSED_S, Fault, ServerEndpoint, ServerSlot, UpstreamModel
from workers.engines.upstream.exchange import Exchange, home_of, stop_by_name, stop_generation
from workers.engines.upstream.generation import UpstreamGeneration
from workers.engines.upstream.reply import End, ReplyOutcome
from workers.engines.upstream.server import ProbeFailed, card_of

log = logging.getLogger(__name__)

MAX_REFUSALS = 5
"""A server that says so often in a row that it has no room counts as away."""
MAX_RETRY_S = 5.0
HOLD_S = 0.5
"""A server that has no room and does not say for how long gets no request for so long; doubled each time."""
MAX_NAMED, MAX_REASON = 3, 200
"""Servers that are named as away, and characters of each reason."""


MAX_SLEEP_S = 5.0
MAX_BREAKS_BEFORE = 2
"""A request that a model's servers break so often before its first token goes to the next model."""


def size_of(request: Request) -> int:
    """Tokens of a prompt, roughly."""
    if request.inputs:
        return sum([len(each) // (CHARACTERS_PER_TOKEN if isinstance(each, str) else 1) for each in request.inputs])
    texts = [turn.content for turn in request.turns] or [str(request.prompt)]
    return len(request.ids) or sum([len(text) // CHARACTERS_PER_TOKEN for text in texts])


def suits(card: ModelCard, request: Request) -> bool:
    """Whether a model can stand in for another one with this request. Token ids, vectors and adapters are of one model
    alone."""
    can, turns, sampling = card.capabilities, request.turns, request.sampling
    limit, kinds = sampling.max_tokens or 0, {part["type"] for turn in turns for part in turn.parts}
    if (
        (request.task is not None or request.ids or sampling.logit_bias or request.adapter)
        or any(not getattr(can, SENSES[kind][0]) for kind in kinds - {"text"})
        or (request.passed.keys() - HINTS and not can.passes_fields)
        or (size_of(request) + (limit or 1) > card.context or limit > card.max_output)
    ):
        return False
    prompt = Chat(tuple(turns)) if turns else Text((str(request.prompt),))
    job = Job(id="", model="", tenant="", priority=Priority.STANDARD, prompt=prompt, sampling=sampling)
    return unsupported(replace(job, tools=request.tools), card) is None


class ServerPool:
    """Servers of one model."""

    def __init__(self, model: UpstreamModel, emit: Callable[[Piece], None], tasks: set[asyncio.Task[Any]]) -> None:
        """`tasks`: of the engine, which ends them."""
        self.model, self.settings, self.emit, self._tasks = model.name, model.settings, emit, tasks
        self.adapters = model.adapters
        self.endpoints = [ServerEndpoint(url, model) for url in model.settings.urls]
        self._waiting: list[tuple[float, int, int, asyncio.Future[ServerSlot | None]]] = []
        """A heap: priority, number, cost, and the slot to come. It holds little: a worker claims no more than fits."""
        self._number = 0
        self.card: ModelCard | None = None
        """What all of its servers can do; None before one has answered."""
        self.miscounted = 0
        """Complete replies whose counts could not be true."""
        self.tracing = NO_TRACING
        """Gets a span for each request that is sent."""

    @property
    def ready(self) -> list[ServerEndpoint]:
        """The servers that may get requests."""
        return [each for each in self.endpoints if each.ready]

    @property
    def running(self) -> int:
        """Requests that its servers have."""
        return sum(each.in_flight for each in self.endpoints)

    def away(self) -> tuple[str, ...]:
        """The servers that get no requests, at most MAX_NAMED, each with the reason."""
        reasons = [(each.url, each.breaker.reason) for each in self.endpoints if not each.ready]
        return tuple([f"{url} ({reason[:MAX_REASON]})" for url, reason in reasons[:MAX_NAMED]])

    def wait_s(self, cost: int, now: float) -> float:
        """Seconds until a server that is there may be sent a request of so many tokens."""
        return min([each.wait_s(cost, now) for each in self.ready], default=0.0)

    def obstacle(self, generation: UpstreamGeneration, patience_s: float) -> str:
        """Why its servers do not get a request that has no token yet; "" if they may."""
        now, breaks = time.monotonic(), generation.counts.by_model.get(self.model, 0)
        if not self.ready:
            return "no server of it is there"
        if breaks >= MAX_BREAKS_BEFORE:
            return f"its servers broke the request {breaks} times"
        if (wait_s := max(self.wait_s(self._cost(generation), now), self._held_s(generation, now))) > patience_s:
            return f"its rate limit holds for {wait_s:.0f} s"
        return ""

    def slots(self, now: float) -> int:
        """What the servers that are there may run."""
        return sum([each.slots(now) for each in self.ready])

    def share(self, workers: int) -> None:
        """So many workers use its servers."""
        for endpoint in self.endpoints:
            endpoint.share(workers)
        self._fill()

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.client.close()

    # --- servers -------------------------------------------------------------------------------------------------

    async def probe(self, *endpoints: ServerEndpoint) -> dict[str, ProbeFailed]:
        """Ask servers what they are; none named: all. Returns those that cannot be used, by address."""
        failures = dict[str, ProbeFailed]()
        for endpoint in endpoints or self.endpoints:
            before = endpoint.breaker.reason
            try:
                await endpoint.probe(self.card)
            except ProbeFailed as error:
                failures[endpoint.url] = error
                if str(error) != before:
                    log.log(logging.ERROR if error.lasting else logging.INFO, "%s is away: %s", endpoint.url, error)
            else:
                log.info("%s: %s", endpoint.url, endpoint.facts)
        known = [each.facts for each in self.endpoints if each.facts is not None]
        if self.card is None and known:
            self.card = card_of(self.model, self.settings, known)
        self._fill()
        return failures

    def tick(self, now: float) -> None:
        """Look at the timers of replies, at servers that are away, and at the gauges of those that are there."""
        for endpoint in self.endpoints:
            for reader in list(endpoint.replies.values()):
                reader.check_time(now, self.settings.first_token_s, self.settings.between_tokens_s)
            if endpoint.breaker.may_probe(now):
                spawn(self.probe(endpoint), self._tasks)
            elif endpoint.ready:
                spawn(endpoint.read_gauges(now), self._tasks)
        self._fill()

    # --- one request ---------------------------------------------------------------------------------------------

    async def run(self, generation: UpstreamGeneration, patience_s: float | None) -> ReplyOutcome | None:
        """Send a request to a server with room, and read its reply to the end. None: no server is there, or none had
        room for `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                slot = await self._slot(generation)
        except TimeoutError:
            return None
        if slot is None:
            return None
        outcome, sent_at = ReplyOutcome(End.CANCELLED), time.monotonic()
        try:
            outcome = await Exchange(generation, slot, self).run()
            if generation.miscounted and outcome.end is End.DONE:
                self.miscounted += 1
                log.warning("%s: a complete answer with counts that cannot be true", slot.endpoint.url)
        finally:
            self._learn(generation, slot, outcome, sent_at)
            self._leave(slot, generation.spent())
        return outcome

    async def _slot(self, generation: UpstreamGeneration) -> ServerSlot | None:
        """A slot at the server that may generate the answer still, where it needs no room; else at the next one."""
        cost = self._cost(generation)
        await asyncio.sleep(self._held_s(generation, time.monotonic()))
        while (home := await home_of(generation, self.ready)) is not None:
            now = time.monotonic()
            if (wait_s := home.wait_s(cost, now)) <= 0:
                return home.enter(cost, now)
            await asyncio.sleep(min(wait_s, MAX_SLEEP_S))
        return await self._wait(generation.request.priority, cost)

    async def _wait(self, priority: float, cost: int) -> ServerSlot | None:
        """A slot for one request, once there is one; None if no server is there.

        Args:
            priority: higher first.
            cost: tokens of its prompt and its longest answer.
        """
        self._number += 1
        slot: asyncio.Future[ServerSlot | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, self._number, cost, slot))
        self._fill()
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and (taken := slot.result()) is not None:
                self._leave(taken, 0)
            raise

    def _leave(self, slot: ServerSlot, spent: int) -> None:
        """Give a slot back."""
        slot.endpoint.leave(slot, spent)
        self._fill()

    def _fill(self) -> None:
        """Give out the slots that are free now: as one becomes free, and at each tick, for rate limits."""
        now = time.monotonic()
        while self._waiting:
            _, _, cost, slot = self._waiting[0]
            if not slot.done():
                endpoint = self._choose(cost, now)
                if endpoint is None and self.ready:
                    return
                slot.set_result(None if endpoint is None else endpoint.enter(cost, now))
            heapq.heappop(self._waiting)

    def _choose(self, cost: int, now: float) -> ServerEndpoint | None:
        """Of the servers with room, the one that runs the smallest part of what it may run."""
        free = [each for each in self.ready if each.budget.has_room(each.in_flight) and each.wait_s(cost, now) <= 0]
        return min(free, key=lambda each: each.in_flight / each.budget.limit, default=None)

    def end(self, generation: UpstreamGeneration, *, goes_on: bool = False) -> None:
        """Its servers get this request no more. `goes_on`: another attempt continues what one of them may generate."""
        stop_generation(generation, goes_on=goes_on)
        if generation.cancelled and not goes_on:
            for endpoint in self.endpoints:  # one of them may generate for the attempt before, or has not replied yet
                stop_by_name(endpoint, generation)

    def _held_s(self, generation: UpstreamGeneration, now: float) -> float:
        """Seconds for which a request that its servers have refused is held back."""
        model, until = generation.counts.held
        return max(0.0, until - now) if model == self.model else 0.0

    def _cost(self, generation: UpstreamGeneration) -> int:
        """Tokens that a request reserves of a rate limit: its prompt and its longest answer."""
        limit = generation.request.sampling.max_tokens or self.settings.default_output or 0
        return size_of(generation.request) + max(0, limit)

    def _learn(self, generation: UpstreamGeneration, slot: ServerSlot, outcome: ReplyOutcome, sent_at: float) -> None:
        """Tell breaker, budget and key how a reply ended, or the call that prepares it."""
        endpoint, now = slot.endpoint, time.monotonic()
        breaker, was_closed = endpoint.breaker, endpoint.breaker.closed
        name = generation.request.text_id or generation.id
        has_token = bool(generation.received) and generation.progress_at >= sent_at
        if outcome.how == "bare":
            endpoint.bare_ends += 1
            generation.bare_ends = endpoint.bare_ends
        elif outcome.end is End.DONE and not (generation.reply and generation.reply.is_over):
            endpoint.bare_ends = 0
        if outcome.end is End.DONE:
            breaker.succeed()
            endpoint.budget.note_success()
        elif outcome.end is End.BROKEN:
            if outcome.how != "unsent":
                generation.note_break(self.model)
            log.warning("%s broke an answer: %s", endpoint.url, outcome.reason, extra={"request": generation.id})
            if outcome.how != "malformed":
                cut = not (outcome.status or outcome.how in ("stalled", "bare") or has_token)
                how: Fault = "down" if outcome.how == "unsent" else "cut" if cut else ""
                breaker.fail(outcome.reason, now, how, name, endpoint.answered_at)
        elif outcome.end is End.FAILED:  # by the request's own fault, so the server is well
            breaker.succeed()
        elif outcome.end in (End.BUSY, End.KEY):
            generation.note_busy(outcome, now)
            if len(slot.key.refused) < 2:  # more say no more
                slot.key.refused.add(name)
            self._hold(generation, slot, outcome, now)
            answers = endpoint.answered_at > now - ANSWERS_S
            full = outcome.end is End.BUSY and outcome.status != 429
            if full and generation.refusals >= MAX_REFUSALS and not answers:
                breaker.fail(outcome.reason, now, "down")  # a gateway without a server, perhaps
        if outcome.end in (End.DONE, End.FAILED) or has_token:
            slot.key.refused.clear()
        if was_closed and not breaker.closed and not breaker.in_doubt:
            log.warning("%s gets no requests until it is back: %s", endpoint.url, breaker.reason)

    def _hold(self, generation: UpstreamGeneration, slot: ServerSlot, outcome: ReplyOutcome, now: float) -> None:
        """Hold the request back; its key or server too once they have refused another one and taken none since: the
        refusal of one may be its own fault, and must not keep the others away."""
        endpoint, key = slot.endpoint, slot.key
        wait = outcome.retry_s
        if wait is None:
            wait = min(HOLD_S * 2.0 ** (generation.refusals - 1), MAX_RETRY_S)
        others = [each for each in endpoint.keys if each is not key and each.blocked_until <= now]
        if len(key.refused) < 2 and not (outcome.end is End.KEY and others):
            generation.counts.held = (self.model, now + wait)
        elif outcome.end is End.KEY:
            log.error("%s does not take the key in %s: %s", endpoint.url, key.name or "(none)", outcome.reason)
            key.block(REFUSED_S, now)
            if not others:
                endpoint.breaker.fail("it takes none of the keys", now, "down")
        elif outcome.status == 429:
            key.block(wait, now)
            endpoint.budget.note_busy(now)
        else:
            endpoint.held_until = now + wait
            endpoint.budget.note_busy(now)
