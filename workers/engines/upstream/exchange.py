"""Exchange with a server: sends a request by the ladder's best rung, and reads the reply to its end."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.engine import ChatTurn, Piece, Request, Task
from telemetry import tracing as names
from telemetry.logs import EventLog
from telemetry.tracing import NO_TRACING, TRACEPARENT, Attributes, Span, operation_name
from workers.engines.upstream import task_calls
from workers.engines.upstream.continuation import bodies, ladder, reattach
from workers.engines.upstream.continuation.ladder import FROM_BEGINNING, Continuation, Rung
from workers.engines.upstream.detached import DetachedGenerations
from workers.engines.upstream.http.client import BrokenReply, ConnectError
from workers.engines.upstream.http.connection import CLOSED
from workers.engines.upstream.places.endpoint import ServerEndpoint, ServerPlace
from workers.engines.upstream.places.limits import retry_after_s
from workers.engines.upstream.reply.chunks import TokenId
from workers.engines.upstream.reply.endings import End, ReplyOutcome, by_cut, by_malformed, by_status
from workers.engines.upstream.reply.generation import UpstreamGeneration
from workers.engines.upstream.reply.stream import StreamReader
from workers.engines.upstream.server.kinds import ServerFacts
from workers.engines.upstream.settings import UpstreamSettings

log = logging.getLogger(__name__)
events = EventLog(__name__)

BROKEN = (End.FAILED, End.BROKEN, End.KEY)
"""Ends of replies that are errors in a trace; a busy server and a cancel are none."""
ASK_S = 10.0
"""For what a server answers without computing."""
LIMITED = ("vllm", "sglang")
"""Kinds whose completions end after 16 tokens unless they are told a limit."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One HTTP request, its path behind the base."""

    method: str
    path: str
    data: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Unprepared(Exception):
    """A prompt could not be prepared."""

    def __init__(self, outcome: ReplyOutcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class UpstreamExchange:
    """Sends requests. One object for all of an engine."""

    def __init__(self, settings: UpstreamSettings, emit: Callable[[Piece], None]) -> None:
        self._settings, self._emit = settings, emit
        self.readers: dict[str, StreamReader] = {}
        """By request id, the replies that are being read."""
        self.detached = DetachedGenerations()
        self.miscounted = 0
        """Complete replies whose counts could not be true."""
        self.tracing = NO_TRACING
        """Gets a span for each request that is sent."""

    def answered_at(self, server: str) -> float:
        """When the last token of the replies came that this server is giving (monotonic); -inf: none came."""
        replies = [each.generation for each in self.readers.values() if each.server == server]
        return max([each.progress_at for each in replies if each.received], default=-math.inf)

    async def run(self, generation: UpstreamGeneration, place: ServerPlace) -> ReplyOutcome:
        """Send the request and read the reply. A rung that the server refuses is followed by the next one."""
        outcome = await self._run(generation, place)
        if generation.miscounted and outcome.end is End.DONE:
            self.miscounted += 1
            log.warning("%s: a complete answer with counts that cannot be true", place.endpoint.url)
        return outcome

    async def _run(self, generation: UpstreamGeneration, place: ServerPlace) -> ReplyOutcome:
        if generation.request.task is not None:
            return await self._perform(generation, generation.request.task, place)
        endpoint, first_refusal = place.endpoint, ""
        while True:
            facts = endpoint.facts
            assert facts is not None
            way = ladder.choose(facts, generation.request, generation.rows, generation.tried)
            if way.rung is Rung.RESTART:
                return ReplyOutcome(End.RESTART, first_refusal or way.reason)
            if generation.rows:
                events.write(
                    "an answer is continued",
                    request=generation.id,
                    server=endpoint.url,
                    by=way.rung.value,
                    reason=way.reason,
                )
            outcome = (await self._send(generation, place, facts, way)).without(endpoint.keys.secrets)
            refused = outcome.end is End.FAILED and 400 <= outcome.status < 500
            differs = way.rung is Rung.REATTACH and outcome.end is End.RESTART
            if not (differs or (refused and way.rung in (Rung.REATTACH, Rung.IDS, Rung.TEXT, Rung.PREFILL))):
                return outcome
            first_refusal = first_refusal or f"{way.rung.value}: {outcome.reason}"
            level = logging.INFO if way.rung is Rung.REATTACH else logging.WARNING
            if way.rung is Rung.REATTACH:
                self.detached.stop(generation)
            log.log(level, "%s refuses a continuation by %s: %s", endpoint.url, way.rung.value, outcome.reason)
            generation.tried.add(way.rung)

    async def _perform(self, generation: UpstreamGeneration, task: Task, place: ServerPlace) -> ReplyOutcome:
        """Have the server answer a task, in a span of its own."""
        facts = place.endpoint.facts
        assert facts is not None
        span = self._span(generation, place.endpoint, facts)
        try:
            trace = span.carrier()[TRACEPARENT] if generation.request.trace else ""
            outcome = await self._performed(generation, task, place, facts, trace)
            span.end(error=outcome.end.value if outcome.end in BROKEN else None, attributes=_answered(outcome))
        finally:
            span.end(error="cancelled")  # unless it has ended
        return outcome

    async def _performed(
        self, generation: UpstreamGeneration, task: Task, place: ServerPlace, facts: ServerFacts, trace: str
    ) -> ReplyOutcome:
        request = generation.request
        try:
            match task.kind:
                case "tokenize":
                    generation.answer(await self._told_tokens(request, task, place, facts, trace), 0)
                case "detokenize":
                    found = await self._ask(
                        place, "/detokenize", task_calls.detokenize_body(facts, request), trace=trace
                    )
                    generation.answer(task_calls.read_text(found), 0)
                case _:
                    body, limit_s = task_calls.body_of(facts, request, task), self._settings.first_token_s
                    body = bodies.passed(facts, request, self._settings.withhold_fields) | body
                    found = await self._ask(
                        place, task_calls.path_of(task), body, limit_s=limit_s, based=True, trace=trace
                    )
                    generation.answer(*task_calls.read_reply(facts, request, task, found))
        except Unprepared as error:
            return error.outcome.without(place.endpoint.keys.secrets)
        except ValueError as error:  # of msgspec and of base64 too
            log.warning("%s: a task: %s", place.endpoint.url, type(error).__name__)
            return by_malformed(f"reply to {task.kind}")
        return ReplyOutcome(End.DONE, finish="stop")

    async def _told_tokens(
        self, request: Request, task: Task, place: ServerPlace, facts: ServerFacts, trace: str
    ) -> str:
        """Raises Unprepared, ValueError."""
        body = task_calls.tokenize_body(facts, request, task)
        turns = [turn for turn in request.prompt if isinstance(turn, ChatTurn)]
        if turns and not facts.chat_ids:
            outcome = ReplyOutcome(End.FAILED, "it tokenizes no conversations: send its text as prompt", status=400)
            raise Unprepared(replace(outcome, param="messages"))
        if turns and facts.template_chat:
            begins = task.generation_prompt
            prompt = await self._rendered(place, facts, turns, request, begins=begins)
            body = task_calls.rendered_body(prompt)
        return task_calls.read_tokens(facts, await self._ask(place, "/tokenize", body, trace=trace))

    async def _send(
        self, generation: UpstreamGeneration, place: ServerPlace, facts: ServerFacts, way: Continuation
    ) -> ReplyOutcome:
        settings = self._settings
        try:
            prompt = await self._prompt(generation, place, facts, way.rung)
        except Unprepared as error:
            return error.outcome
        named = reattach.kept_under(facts, generation.request, way.rung, generation.tried)
        if way.rung is Rung.REATTACH and facts.reattach == "stream":
            call = _Call("GET", reattach.stream_path(generation.request))
            return await self._sent(generation, place, facts, way.rung, call)
        path, body = bodies.build(
            facts,
            generation.request,
            way.rung,
            generation.written_rows(facts),
            prompt,
            cache_prompt=settings.cache_prompt,
            send_priority=settings.send_priority,
            limit=self._limit(generation, facts, way.rung, prompt),
            salt=_salt(generation.request.tenant, place.key.secret),
            withheld=settings.withhold_fields,
        )
        call = _Call("POST", path, msgspec.json.encode(body), named)
        return await self._sent(generation, place, facts, way.rung, call)

    async def _sent(
        self, generation: UpstreamGeneration, place: ServerPlace, facts: ServerFacts, rung: Rung, call: _Call
    ) -> ReplyOutcome:
        """Make the call; once more if the server closed the connection as it was used again."""
        for fresh in (False, True):
            if generation.cancelled:
                return ReplyOutcome(End.CANCELLED)
            outcome, again = await self._read(generation, place, facts, rung, call, fresh=fresh)
            if not again:
                return outcome
        return outcome

    async def _read(
        self,
        generation: UpstreamGeneration,
        place: ServerPlace,
        facts: ServerFacts,
        rung: Rung,
        call: _Call,
        *,
        fresh: bool,
    ) -> tuple[ReplyOutcome, bool]:
        """The outcome of one reply, and whether to send again: the connection was closed as it was used again."""
        endpoint = place.endpoint
        try:
            connection = await endpoint.client.connection(fresh=fresh)
        except ConnectError as error:
            return by_cut(str(error), sent=False), False
        if generation.cancelled:
            connection.close()
            return ReplyOutcome(End.CANCELLED), False
        reader = StreamReader(generation, connection, self._emit)
        was_used = connection.used > 0
        now, span = time.monotonic(), self._span(generation, endpoint, facts)
        before = generation.out
        generation.begin(facts, rung, now)
        reader.server, self.readers[generation.id] = endpoint.url, reader
        try:
            path = endpoint.client.address.base + call.path
            trace = span.carrier()[TRACEPARENT] if generation.request.trace else ""
            client, secret = endpoint.client, place.key.secret
            client.send(
                connection, call.method, path, call.data, secret, reader, stream=True, trace=trace, more=call.headers
            )
            outcome = await reader.done
            span.end(error=outcome.end.value if outcome.end in BROKEN else None, attributes=_answered(outcome))
        finally:
            span.end(error="cancelled")  # unless it has ended
            del self.readers[generation.id]
            if not reader.done.done():
                connection.close()
        if facts.aborts and not reader.is_read:
            self.detached.abort(generation.id, place)
        unseen = facts.reattach == "key" and reader.silent and bool(call.headers)
        if unseen and generation.cancelled and not (generation.left and generation.rows):
            self.detached.stop_unseen(place, call.path, call.data, call.headers)
        if facts.reattach and rung in FROM_BEGINNING:
            self.detached.begin(generation, place, facts, reader)
            outcome = self.detached.note_end(generation, outcome, rung, facts, reader, before)
        if reader.headers:
            place.key.note(reader.headers, time.monotonic(), time.time())
            if outcome.end is End.BUSY:
                outcome = replace(outcome, retry_s=retry_after_s(reader.headers, time.time()))
        return outcome, was_used and reader.silent and outcome.reason == CLOSED

    def _span(self, generation: UpstreamGeneration, endpoint: ServerEndpoint, facts: ServerFacts) -> Span:
        """Begin the span of one request to a server, which the server continues."""
        request, address = generation.request, endpoint.client.address
        task = request.task.kind if request.task is not None else None
        operation = operation_name(task, is_chat=isinstance(next(iter(request.prompt), None), ChatTurn))
        attributes: Attributes = {
            names.OPERATION: operation,
            names.PROVIDER: facts.kind,
            names.REQUEST_MODEL: facts.model,
            names.SERVER_ADDRESS: address.host,
            names.SERVER_PORT: address.port,
        }
        parent = {TRACEPARENT: request.trace} if request.trace else None
        return self.tracing.span(f"{operation} {facts.model}", parent, "client", attributes=attributes)

    def _limit(self, generation: UpstreamGeneration, facts: ServerFacts, rung: Rung, prompt: Any) -> int | None:
        limit = generation.remaining(rung)
        if limit is None and isinstance(prompt, list) and facts.kind in LIMITED and facts.context:
            return max(1, facts.context - len(prompt) - (generation.out if rung is Rung.IDS else 0))
        if limit is None and self._settings.default_output:
            past = 0 if rung in FROM_BEGINNING else generation.out
            return max(1, self._settings.default_output - past)
        return limit

    # --- prompts that the server renders or tokenises ------------------------------------------------------------

    async def _prompt(self, generation: UpstreamGeneration, place: ServerPlace, facts: ServerFacts, rung: Rung) -> Any:
        """The prompt for /completions, without the answer so far; None: the request's own. Raises Unprepared."""
        request = generation.request
        if not bodies.is_prompted(facts, request, rung):
            return None
        turns = [turn for turn in request.prompt if isinstance(turn, ChatTurn)]
        if facts.template_chat and turns:
            if not isinstance(generation.prompt, str):
                generation.prompt = await self._rendered(place, facts, turns, request)
            return generation.prompt
        if not turns and not isinstance(request.prompt, str):
            return None
        needs_ids = rung is Rung.IDS or (request.sampling.max_tokens is None and facts.kind in LIMITED)
        if not needs_ids or rung is Rung.TEXT or facts.mixed or not facts.tokenizes:
            return None
        if rung is Rung.IDS:
            await self._check_alignment(generation, place, facts)
        if not isinstance(generation.prompt, list):
            generation.prompt = await self._tokenized(place, facts, turns or str(request.prompt), request)
        return generation.prompt

    async def _rendered(
        self, place: ServerPlace, facts: ServerFacts, turns: list[ChatTurn], request: Request, *, begins: bool = True
    ) -> str:
        body = bodies.rendering(facts, request) | {"messages": [turn.shown for turn in turns]}
        if not begins:
            body["add_generation_prompt"] = False
        if request.reasoning not in ("", "default") and facts.reasoning_effort:
            body = bodies.with_effort(body, facts, request.reasoning)
        found = (await self._ask(place, "/apply-template", body)).get("prompt")
        if not isinstance(found, str) or not found:
            raise Unprepared(by_cut("/apply-template gave no prompt"))
        return found

    async def _tokenized(
        self, place: ServerPlace, facts: ServerFacts, prompt: list[ChatTurn] | str, request: Request
    ) -> list[int]:
        body: dict[str, Any] = {"model": facts.model}
        if isinstance(prompt, str):
            body |= {"prompt": prompt, "add_special_tokens": True}
        else:
            body |= bodies.rendering(facts, request) | {"messages": [turn.shown for turn in prompt]}
            body["add_generation_prompt"] = True
        found = (await self._ask(place, "/tokenize", body)).get("tokens")
        try:
            return msgspec.convert(found, list[TokenId])
        except msgspec.ValidationError:
            raise Unprepared(by_cut("/tokenize gave no token ids")) from None

    async def _check_alignment(self, generation: UpstreamGeneration, place: ServerPlace, facts: ServerFacts) -> None:
        """Where chunks held several tokens, the last ids may be ahead of the text. Raises Unprepared: the ids are then
        not continued."""
        rows = generation.rows
        if all(len(ids) <= 1 for _, ids, _ in rows):
            return
        body = {"model": facts.model, "tokens": [each for _, ids, _ in rows for each in ids]}
        told = await self._ask(place, "/detokenize", body)
        found = told.get("prompt", told.get("text"))  # the second: SGLang
        if not isinstance(found, str) or found.lstrip() != generation.written(facts).lstrip():
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
        endpoint: ServerEndpoint = place.endpoint
        address = endpoint.client.address
        path = (address.base if based else address.root) + path
        try:
            reply = await endpoint.client.ask("POST", path, body, place.key.secret, limit_s, trace)
        except (ConnectError, BrokenReply) as error:
            raise Unprepared(by_cut(f"{path}: {error}", sent=isinstance(error, BrokenReply))) from None
        try:
            found = reply.json()
        except ValueError:
            found = None
        place.key.note(reply.headers, time.monotonic(), time.time())
        if reply.status != 200:
            status = 400 if task_calls.TOO_LARGE in reply.body else reply.status
            outcome = by_status(status, reply.body, found)
            raise Unprepared(replace(outcome, retry_s=retry_after_s(reply.headers, time.time())))
        if not isinstance(found, Mapping):
            raise Unprepared(by_cut(f"{path} gave no object"))
        return found


def _answered(outcome: ReplyOutcome) -> Attributes:
    """Attributes of a reply: no words of the server, which may repeat the prompt."""
    found: dict[str, str | int | float | bool | Sequence[str]] = {}
    if outcome.status:
        found[names.STATUS_CODE] = outcome.status
    if outcome.finish:
        found[names.FINISH_REASONS] = [outcome.finish]
    if outcome.end in BROKEN:
        found[names.ERROR_TYPE] = str(outcome.status or outcome.end.value)
    return found


def _salt(tenant: str, secret: str) -> str:
    """The same in every worker, so that they share a tenant's cached prompts."""
    return hmac.digest(secret.encode() or b"penstock", tenant.encode(), "sha256").hex()
