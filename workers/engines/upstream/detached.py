"""Detached generations: finds and stops what goes on at a server while nobody of this worker reads it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from workers.engines.upstream.continuation import reattach
from workers.engines.upstream.continuation.ladder import Rung
from workers.engines.upstream.http.client import BrokenReply, ConnectError
from workers.engines.upstream.places.endpoint import ServerEndpoint, ServerPlace
from workers.engines.upstream.reply.endings import End, ReplyOutcome
from workers.engines.upstream.reply.generation import UpstreamGeneration
from workers.engines.upstream.reply.stream import StreamReader
from workers.engines.upstream.server.kinds import ServerFacts
from workers.engines.upstream.server.probe import LOOKUP

MAX_VAIN = 2
"""A generation that brought nothing new so often in a row is given up: it ended there without a finish reason."""
LOOKUP_S = 3.0
"""For a server's answer whether it keeps a generation."""


class DetachedGenerations:
    """Of all requests of an engine."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[None]] = set()
        self._stops: dict[str, tuple[ServerPlace, str, str]] = {}
        """By request id: where its generation may go on, and the call that stops it."""
        self._vain: Counter[str] = Counter()
        """By request id: how often in a row reading its generation brought nothing new."""

    def begin(
        self, generation: UpstreamGeneration, place: ServerPlace, facts: ServerFacts, reader: StreamReader
    ) -> None:
        """A reply that is kept under a name has ended for its reader, who may come back."""
        if facts.reattach == "key" and reader.is_read:  # the job is over
            return
        stop = reattach.stop_path(facts, generation.request, reader.headers)
        if stop is not None and reader.status == 200:
            self._stops[generation.id] = (place, *stop)

    def note_end(
        self,
        generation: UpstreamGeneration,
        outcome: ReplyOutcome,
        rung: Rung,
        facts: ServerFacts,
        reader: StreamReader,
        before: int,
    ) -> ReplyOutcome:
        """Stop a generation that is not to be continued where it is: it has been silent, or has brought nothing new.
        Returns what follows for the request. `before`: tokens that had come out when the reply began."""
        if outcome.end in (End.BUSY, End.KEY):  # it goes on meanwhile
            return outcome
        if rung is Rung.REATTACH and outcome.told:
            outcome = ReplyOutcome(End.RESTART, f"it has ended there: {outcome.reason}")
        if outcome.end is not End.BROKEN:
            self.stop(generation)
            return outcome
        if generation.out > before:
            self._vain.pop(generation.id, None)
        elif reader.status == 200 or reattach.JOB_HEADER in reader.headers:
            self._vain[generation.id] += 1
        vain = self._vain[generation.id] >= MAX_VAIN
        if (vain and facts.reattach == "key") or ((vain or outcome.stalled) and generation.rows):
            generation.tried.add(Rung.REATTACH)
            self.stop(generation)
        return outcome  # one at a llama-server that has shown nothing is replaced by the next one

    def stop(self, generation: UpstreamGeneration, *, goes_on: bool = False) -> None:
        """Stop what goes on, unless another worker may continue it. `goes_on`: the request goes back to the queue. A
        job of a Penstock that has shown nothing is found by nobody; a stream's name is that of the next one too."""
        found = self._stops.pop(generation.id, None)
        self._vain.pop(generation.id, None)
        if found is None:
            return
        place, method, path = found
        if (goes_on or generation.left) and (generation.rows or method == reattach.BY_NAME):
            return
        client = place.endpoint.client
        self._spawn(client.ask(method, client.address.base + path, None, place.key.secret))

    def stop_unseen(self, place: ServerPlace, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Stop the job of a request to a Penstock that was cancelled before its reply began, which would have told the
        job's id: the same request, put without waiting, does. `path`, `data`, `headers`: its."""
        self._spawn(_cancelled(place, path, data, headers))

    def abort(self, request_id: str, place: ServerPlace) -> None:
        """Have a server stop a request that nobody reads on, sooner than it would notice."""
        client = place.endpoint.client
        self._spawn(client.ask("POST", f"{client.address.root}/abort_request", {"rid": request_id}, place.key.secret))

    async def find(self, endpoints: Sequence[ServerEndpoint], generation: UpstreamGeneration) -> ServerEndpoint | None:
        """The server that keeps the newest generation of a text; None if none does, or there is no choice."""
        if not generation.rows or Rung.REATTACH in generation.tried or len(endpoints) < 2:
            return None
        if (known := self._stops.get(generation.id)) is not None and known[0].endpoint in endpoints:
            return known[0].endpoint
        asked = [each for each in endpoints if each.facts is not None and each.facts.reattach == "stream"]
        starts = await asyncio.gather(*[_begun_at(each, generation) for each in asked])
        latest = max(starts, default=0.0)
        return asked[starts.index(latest)] if latest else None

    def _spawn(self, call: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(_quietly(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


async def _begun_at(endpoint: ServerEndpoint, generation: UpstreamGeneration) -> float:
    client, request = endpoint.client, generation.request
    body = {"conversation_ids": [reattach.stream_name(request)]}
    path, key = client.address.base + LOOKUP, endpoint.keys.keys[0].secret
    try:
        return reattach.begun_at((await client.ask("POST", path, body, key, LOOKUP_S)).json(), request)
    except (ConnectError, BrokenReply, ValueError):
        return 0.0


async def _cancelled(place: ServerPlace, path: str, data: bytes, headers: Mapping[str, str]) -> None:
    """Raises ConnectError, BrokenReply."""
    client, key = place.endpoint.client, place.key.secret
    base, more = client.address.base, {**headers, "Prefer": "respond-async"}
    found = await client.ask("POST", base + path, msgspec.Raw(data), key, more=more)
    if (stop := reattach.cancel_path(found.headers)) is not None:
        await client.ask("POST", base + stop, None, key)


async def _quietly(call: Coroutine[Any, Any, object]) -> None:
    """Make a call whose failure changes nothing: the request stops as well, only later."""
    with suppress(ConnectError, BrokenReply):
        await call
