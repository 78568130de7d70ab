"""Exchange with a server: sends a request by the best rung, and reads the reply to its end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from penstock.engine import Piece
from telemetry import tracing as names
from telemetry.logs import EventLog
from telemetry.tracing import NO_TRACING, TRACEPARENT, Attributes, operation_name
from workers.engines.upstream import continuation, tasks
from workers.engines.upstream.continuation import FROM_BEGINNING, Rung
from workers.engines.upstream.generation import StreamReader, UpstreamGeneration, text_of_rows
from workers.engines.upstream.http import NO_HEADERS, BrokenReply, ConnectError, UpstreamConnection
from workers.engines.upstream.places import ServerEndpoint, ServerPlace, retry_after_s
from workers.engines.upstream.reply import End, ReplyOutcome, TokenId, by_cut, by_malformed, by_status
from workers.engines.upstream.server import LOOKUP
from workers.engines.upstream.settings import UpstreamSettings

log = logging.getLogger(__name__)
events = EventLog(__name__)

BROKEN = (End.FAILED, End.BROKEN, End.KEY)
"""Ends of replies that are errors in a trace; a busy server and a cancel are none."""
ASK_S = 10.0
"""For what a server answers without computing."""
LIMITED = ("vllm", "sglang")
"""Kinds whose completions end after 16 tokens unless they are told a limit."""


class Unprepared(Exception):
    """A prompt could not be prepared."""

    def __init__(self, outcome: ReplyOutcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class UpstreamExchange:
    """Sends requests to the servers of one model."""

    def __init__(self, settings: UpstreamSettings, emit: Callable[[Piece], None]) -> None:
        self._settings, self._emit = settings, emit
        self.readers: dict[str, tuple[ServerEndpoint, StreamReader]] = {}
        """By request id, the replies that are being read, each with its server."""
        self.miscounted = 0
        """Complete replies whose counts could not be true."""
        self.tracing = NO_TRACING
        """Gets a span for each request that is sent."""

    def answered_at(self, server: ServerEndpoint) -> float:
        """When the last token of the replies came that this server is giving (monotonic); -inf: none came."""
        replies = [reader for endpoint, reader in self.readers.values() if endpoint is server and reader.received]
        return max([each.generation.progress_at for each in replies], default=-math.inf)

    async def run(self, generation: UpstreamGeneration, place: ServerPlace) -> ReplyOutcome:
        """Send the request and read the reply. A rung that the server refuses is followed by the next one."""
        perform = self._answer if generation.request.task is None else self._perform
        outcome = (await perform(generation, place)).without(place.endpoint.secrets)
        if generation.miscounted and outcome.end is End.DONE:
            self.miscounted += 1
            log.warning("%s: a complete answer with counts that cannot be true", place.endpoint.url)
        return outcome

    async def _answer(self, generation: UpstreamGeneration, place: ServerPlace) -> ReplyOutcome:
        url, first_refusal = place.endpoint.url, ""
        while not generation.cancelled:
            rung, reason = continuation.choose(place.facts, generation.request, generation.rows, generation.tried)
            if rung is Rung.RESTART:
                return ReplyOutcome(End.RESTART, first_refusal or reason)
            if generation.rows:
                events.write("an answer is continued", request=generation.id, server=url, by=rung.value, reason=reason)
            outcome = await self._send(generation, place, rung)
            is_refused = outcome.end is End.FAILED and 400 <= outcome.status < 500
            differs = rung is Rung.REATTACH and outcome.end is End.RESTART
            if not (differs or (is_refused and rung in (Rung.REATTACH, Rung.IDS, Rung.TEXT, Rung.PREFILL))):
                return outcome
            said = outcome.without(place.endpoint.secrets).reason
            first_refusal = first_refusal or f"{rung.value}: {said}"
            if rung is Rung.REATTACH:
                stop_generation(generation)
            level = logging.INFO if rung is Rung.REATTACH else logging.WARNING
            log.log(level, "%s refuses a continuation by %s: %s", url, rung.value, said)
            generation.tried.add(rung)
        return ReplyOutcome(End.CANCELLED)

    async def _call(
        self, generation: UpstreamGeneration, place: ServerPlace, rung: Rung
    ) -> tuple[str, str, bytes, Mapping[str, str]]:
        """Method, path behind the base, body and further headers of a request by a rung. Raises Unprepared."""
        request, facts = generation.request, place.facts
        if rung is Rung.REATTACH and facts.reattach == "stream":
            return "GET", continuation.stream_path(request) + "&from=0", b"", NO_HEADERS
        prompt = await self._prompt(generation, place, rung)
        rows, limit = generation.written_rows(facts), self._limit(generation, place, rung, prompt)
        secret = place.key.secret.encode() or b"penstock"  # as in every worker, so that they share cached prompts
        salt = hmac.digest(secret, request.tenant.encode(), "sha256").hex()
        path, body = continuation.build(facts, request, rung, rows, prompt, self._settings, limit=limit, salt=salt)
        return "POST", path, msgspec.json.encode(body), continuation.kept_under(facts, request, rung, generation.tried)

    async def _send(self, generation: UpstreamGeneration, place: ServerPlace, rung: Rung) -> ReplyOutcome:
        """Send the request by a rung, and read the reply."""
        facts = place.facts
        try:
            method, path, body, more = await self._call(generation, place, rung)
        except Unprepared as error:
            return error.outcome
        client = place.client

        def begin(connection: UpstreamConnection) -> StreamReader:
            reader = StreamReader(generation, connection, self._emit, facts, rung)
            self.readers[generation.id] = place.endpoint, reader
            return reader

        async def read(trace: str) -> ReplyOutcome:
            path_there = client.address.base + path
            data = client.request(method, path_there, body, place.key.secret, stream=True, trace=trace, more=more)
            try:
                reader = await client.exchange(data, begin)
            except ConnectError as error:
                return by_cut(str(error), "unsent")
            finally:
                self.readers.pop(generation.id, None)
            assert reader.outcome is not None
            outcome = reader.outcome
            if outcome.end is End.BUSY:
                outcome = replace(outcome, retry_s=retry_after_s(reader.headers, time.time()))
            if facts.aborts and not reader.is_read:
                path_there = f"{client.address.root}/abort_request"  # sooner than it would notice
                place.endpoint.spawn(client.ask("POST", path_there, {"rid": generation.id}, place.key.secret))
            is_unseen = facts.reattach == "key" and more and not reader.status
            if is_unseen and generation.cancelled and not (generation.left and generation.rows):
                place.endpoint.spawn(_stop_unseen(place, generation, path, body, more))
            if facts.reattach and rung in FROM_BEGINNING:
                outcome = note_end(place, rung, reader, outcome)
            place.key.note(reader.headers, time.monotonic(), time.time())
            return outcome

        return await self._traced(generation, place, read)

    async def _traced(
        self, generation: UpstreamGeneration, place: ServerPlace, call: Callable[[str], Awaitable[ReplyOutcome]]
    ) -> ReplyOutcome:
        """Make a call in a span of its own. `call` gets the span's traceparent, "" for a request without one."""
        request, address = generation.request, place.client.address
        operation = operation_name(None if request.task is None else request.task.kind, is_chat=bool(request.turns))
        attributes: Attributes = {
            names.OPERATION: operation,
            names.PROVIDER: place.facts.kind,
            names.REQUEST_MODEL: place.facts.model,
            names.SERVER_ADDRESS: address.host,
            names.SERVER_PORT: address.port,
        }
        parent = {TRACEPARENT: request.trace} if request.trace else None
        span = self.tracing.span(f"{operation} {place.facts.model}", parent, "client", attributes=attributes)
        try:
            outcome = await call(span.carrier()[TRACEPARENT] if request.trace else "")
            failed = outcome.end in BROKEN
            said = {  # no words of the server, which may repeat the prompt
                names.STATUS_CODE: outcome.status,
                names.FINISH_REASONS: [outcome.finish] if outcome.finish else None,
                names.ERROR_TYPE: str(outcome.status or outcome.end.value) if failed else None,
            }
            known: Attributes = {name: value for name, value in said.items() if value}
            span.end(error=outcome.end.value if failed else None, attributes=known)
        finally:
            span.end(error="cancelled")  # unless it has ended
        return outcome

    # --- tasks, and prompts that the server renders or tokenises -------------------------------------------------

    async def _perform(self, generation: UpstreamGeneration, place: ServerPlace) -> ReplyOutcome:
        """Have the server answer a task."""
        request, facts, task = generation.request, place.facts, generation.request.task
        assert task is not None

        async def perform(trace: str) -> ReplyOutcome:
            body, computes = tasks.body_of(facts, request, task), task.kind in ("embed", "rerank")
            try:
                if request.turns and not facts.chat_ids:
                    words = "it tokenizes no conversations: send its text as prompt"
                    return ReplyOutcome(End.FAILED, words, status=400, param="messages")
                if request.turns and facts.template_chat:
                    rendered = await self._rendered(generation, place, begins=task.generation_prompt)
                    body = tasks.text_body(rendered, special=True)
                if computes:
                    body = continuation.passed(facts, request, self._settings.withhold_fields) | body
                path, limit_s = tasks.PATHS[task.kind], self._settings.first_token_s if computes else ASK_S
                found = await self._ask(place, path, body, limit_s=limit_s, based=computes, trace=trace)
                generation.answer(*tasks.read_reply(facts, request, task, found))
            except Unprepared as error:
                return error.outcome
            except ValueError as error:  # of msgspec and of base64 too
                log.warning("%s: a task: %s", place.endpoint.url, type(error).__name__)
                return by_malformed(f"reply to {task.kind}")
            return ReplyOutcome(End.DONE, finish="stop")

        return await self._traced(generation, place, perform)

    def _limit(self, generation: UpstreamGeneration, place: ServerPlace, rung: Rung, prompt: Any) -> int | None:
        """max_tokens of a reply; None: as many as fit."""
        facts, past = place.facts, 0 if rung in FROM_BEGINNING else generation.out
        if (limit := generation.request.sampling.max_tokens) is not None:
            return max(0, limit - past)
        if isinstance(prompt, list) and facts.kind in LIMITED and facts.context:
            return max(1, facts.context - len(prompt) - (generation.out if rung is Rung.IDS else 0))
        return max(1, self._settings.default_output - past) if self._settings.default_output else None

    async def _prompt(self, generation: UpstreamGeneration, place: ServerPlace, rung: Rung) -> Any:
        """The prompt for /completions, without the answer so far; None: the request's own. Raises Unprepared."""
        request, facts = generation.request, place.facts
        if not continuation.is_prompted(facts, request, rung):
            return None
        if facts.template_chat and request.turns:
            if not isinstance(generation.prompt, str):
                generation.prompt = await self._rendered(generation, place)
            return generation.prompt
        if request.ids:
            return None
        needs_ids = rung is Rung.IDS or (request.sampling.max_tokens is None and facts.kind in LIMITED)
        if not needs_ids or rung is Rung.TEXT or facts.mixed or not facts.tokenize:
            return None
        if rung is Rung.IDS:
            await self._check_alignment(generation, place)
        if not isinstance(generation.prompt, list):
            generation.prompt = await self._tokenized(generation, place)
        return generation.prompt

    async def _rendered(self, generation: UpstreamGeneration, place: ServerPlace, *, begins: bool = True) -> str:
        request, facts = generation.request, place.facts
        body = continuation.rendering(facts, request)
        if not begins:
            body["add_generation_prompt"] = False
        body = continuation.with_effort(body, facts, request)
        found = (await self._ask(place, "/apply-template", body)).get("prompt")
        if not isinstance(found, str) or not found:
            raise Unprepared(by_cut("/apply-template gave no prompt"))
        return found

    async def _tokenized(self, generation: UpstreamGeneration, place: ServerPlace) -> list[int]:
        """The ids of a conversation, or of a text."""
        request = generation.request
        if request.turns:
            body = continuation.rendering(place.facts, request) | {"add_generation_prompt": True}
        else:
            body = {"prompt": request.prompt, "add_special_tokens": True}
        found = (await self._ask(place, "/tokenize", {"model": place.facts.model} | body)).get("tokens")
        try:
            return msgspec.convert(found, list[TokenId])
        except msgspec.ValidationError:
            raise Unprepared(by_cut("/tokenize gave no token ids")) from None

    async def _check_alignment(self, generation: UpstreamGeneration, place: ServerPlace) -> None:
        """Where chunks held several tokens, the last ids may be ahead of the text. Raises Unprepared: the ids are then
        not continued."""
        rows = generation.rows
        if all(len(ids) <= 1 for _, ids, _ in rows):
            return
        body = {"model": place.facts.model, "tokens": [each for _, ids, _ in rows for each in ids]}
        found = await self._ask(place, "/detokenize", body)
        with suppress(ValueError):
            if tasks.read_text(found).lstrip() == text_of_rows(generation.written_rows(place.facts)).lstrip():
                return
        raise Unprepared(ReplyOutcome(End.FAILED, "its token ids do not give the text that was shown", status=400))

    async def _ask(
        self,
        place: ServerPlace,
        path: str,
        body: Mapping[str, Any],
        *,
        limit_s: float = ASK_S,
        based: bool = False,
        trace: str = "",
    ) -> Mapping[str, Any]:
        """An answer of the server's own. `based`: its path is behind the base, such as /v1. Raises Unprepared."""
        address, key = place.client.address, place.key
        path = (address.base if based else address.root) + path
        try:
            reply = await place.client.ask("POST", path, body, key.secret, limit_s, trace)
        except (ConnectError, BrokenReply) as error:
            raise Unprepared(by_cut(f"{path}: {error}", "unsent" if isinstance(error, ConnectError) else "")) from None
        key.note(reply.headers, time.monotonic(), time.time())
        if reply.status != 200:
            outcome = by_status(400 if tasks.TOO_LARGE in reply.body else reply.status, reply.body)
            raise Unprepared(replace(outcome, retry_s=retry_after_s(reply.headers, time.time())))
        found = reply.json()
        if not isinstance(found, Mapping):
            raise Unprepared(by_cut(f"{path} gave no object"))
        return found


MAX_VAIN = 2
"""A generation that brought nothing new so often in a row is given up: it ended there without a finish reason."""
LOOKUP_S = 3.0
"""For a server's answer whether it keeps a generation."""


def note_end(place: ServerPlace, rung: Rung, reader: StreamReader, outcome: ReplyOutcome) -> ReplyOutcome:
    """A reply that is kept under a name has ended for its reader, who may come back. Stop its generation if it is not
    to be continued where it is: it has been silent, or has brought nothing new. Returns what follows for the request.
    """
    generation, facts = reader.generation, place.facts
    is_over = facts.reattach == "key" and reader.is_read
    stop = continuation.stop_call(facts, generation.request, reader.headers)
    if stop is not None and reader.status == 200 and not is_over:
        generation.kept_at = (place, *stop)
    if outcome.end in (End.BUSY, End.KEY):  # it goes on meanwhile
        return outcome
    if rung is Rung.REATTACH and outcome.how == "told":
        outcome = ReplyOutcome(End.RESTART, f"it has ended there: {outcome.reason}")
    if outcome.end is not End.BROKEN:
        stop_generation(generation)
        return outcome
    if generation.out > reader.out_before:
        generation.counts.vain = 0
    elif reader.status == 200 or continuation.JOB_HEADER in reader.headers:
        generation.counts.vain += 1
    vain = generation.counts.vain >= MAX_VAIN
    if (vain and facts.reattach == "key") or ((vain or outcome.how == "stalled") and generation.rows):
        generation.tried.add(Rung.REATTACH)
        stop_generation(generation)
    return outcome  # one at a llama-server that has shown nothing is replaced by the next one


def stop_generation(generation: UpstreamGeneration, *, goes_on: bool = False) -> None:
    """Stop what goes on at a server, unless another worker may continue it. `goes_on`: the request goes back to the
    queue. A job of a Penstock that has shown nothing is found by nobody; a stream's name is that of the next one too.
    """
    kept_at, generation.kept_at, generation.counts.vain = generation.kept_at, None, 0
    if kept_at is not None:
        place, method, path = kept_at
        if not (goes_on or generation.left) or not (generation.rows or method == continuation.BY_NAME):
            place.endpoint.spawn(place.client.ask(method, place.client.address.base + path, None, place.key.secret))


def stop_by_name(endpoint: ServerEndpoint, generation: UpstreamGeneration) -> None:
    """Stop what a llama-server may generate of a text that nobody reads."""
    stop = continuation.stop_call(endpoint.facts, generation.request, NO_HEADERS) if endpoint.facts else None
    if stop is not None:
        client, key = endpoint.client, endpoint.keys[0].secret
        endpoint.spawn(client.ask(stop[0], client.address.base + stop[1], None, key))


async def _stop_unseen(
    place: ServerPlace, generation: UpstreamGeneration, path: str, body: bytes, more: Mapping[str, str]
) -> None:
    """Stop the job of a request to a Penstock that was cancelled before its reply began, which would have told the
    job's id: the same request, put without waiting, does. Raises ConnectError, BrokenReply."""
    client, key = place.client, place.key.secret
    wanted = {**more, "Prefer": "respond-async"}
    found = await client.ask("POST", client.address.base + path, msgspec.Raw(body), key, more=wanted)
    if stop := continuation.stop_call(place.facts, generation.request, found.headers):
        await client.ask(stop[0], client.address.base + stop[1], None, key)


async def home_of(generation: UpstreamGeneration, endpoints: Sequence[ServerEndpoint]) -> ServerEndpoint | None:
    """The server that keeps the newest generation of a text; None if none does, or there is no choice."""
    if not generation.rows or Rung.REATTACH in generation.tried or len(endpoints) < 2:
        return None
    if generation.kept_at is not None and generation.kept_at[0].endpoint in endpoints:
        return generation.kept_at[0].endpoint
    asked = [each for each in endpoints if each.facts is not None and each.facts.reattach == "stream"]
    starts = await asyncio.gather(*[_begun_at(each, generation) for each in asked])
    latest = max(starts, default=0.0)
    return asked[starts.index(latest)] if latest else None


class KeptReply(msgspec.Struct):
    """A reply that a llama-server keeps."""

    conversation_id: str
    started_at: float
    """Unix time of the server."""


async def _begun_at(endpoint: ServerEndpoint, generation: UpstreamGeneration) -> float:
    """When the reply of a text began that a llama-server keeps; 0.0: it keeps none."""
    client, name = endpoint.client, continuation.stream_name(generation.request)
    path, body = client.address.base + LOOKUP, {"conversation_ids": [name]}
    try:
        reply = await client.ask("POST", path, body, endpoint.keys[0].secret, LOOKUP_S)
        kept = msgspec.convert(reply.json(), list[KeptReply])
    except (ConnectError, BrokenReply, msgspec.ValidationError):
        return 0.0
    return max([each.started_at for each in kept if each.conversation_id == name], default=0.0)
