"""Exchange with a server: chooses its pool, sends a request by the best rung, and reads the reply to its end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.engine import CHARACTERS_PER_TOKEN, ModelCard, Piece, Request, Task
from streaming.jobs.job import HINTS
from telemetry import tracing as names
from telemetry.logs import EventLog
from telemetry.tracing import NO_TRACING, TRACEPARENT, Attributes, Span, operation_name
from workers.engines.upstream import continuation, tasks
from workers.engines.upstream.continuation import FROM_BEGINNING, Rung
from workers.engines.upstream.generation import StreamReader, UpstreamGeneration
from workers.engines.upstream.http import CLOSED, BrokenReply, ConnectError, UpstreamClient
from workers.engines.upstream.places import ServerEndpoint, ServerPlace, retry_after_s
from workers.engines.upstream.reply import End, ReplyOutcome, TokenId, by_cut, by_malformed, by_status
from workers.engines.upstream.server import LOOKUP, ServerFacts
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
        endpoint, first_refusal = place.endpoint, ""
        while True:
            assert endpoint.facts is not None
            turn = Turn(generation, place, endpoint.facts)
            if generation.request.task is not None:
                return await self._perform(turn, generation.request.task)
            way = continuation.choose(turn.facts, generation.request, generation.rows, generation.tried)
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
            outcome = (await self._send(turn, way.rung)).without(endpoint.secrets)
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

    async def _perform(self, turn: Turn, task: Task) -> ReplyOutcome:
        """Have the server answer a task, in a span of its own."""
        span = self._span(turn)
        try:
            trace = span.carrier()[TRACEPARENT] if turn.request.trace else ""
            outcome = await self._performed(turn, task, trace)
            span.end(error=outcome.end.value if outcome.end in BROKEN else None, attributes=_answered(outcome))
        finally:
            span.end(error="cancelled")  # unless it has ended
        return outcome

    async def _performed(self, turn: Turn, task: Task, trace: str) -> ReplyOutcome:
        request, facts, generation = turn.request, turn.facts, turn.generation
        try:
            match task.kind:
                case "tokenize":
                    generation.answer(await self._told_tokens(turn, task, trace), 0)
                case "detokenize":
                    found = await self._ask(turn, "/detokenize", tasks.detokenize_body(facts, request), trace=trace)
                    generation.answer(tasks.read_text(found), 0)
                case _:
                    body, limit_s = tasks.body_of(facts, request, task), self._settings.first_token_s
                    body = continuation.passed(facts, request, self._settings.withhold_fields) | body
                    found = await self._ask(turn, tasks.path_of(task), body, limit_s=limit_s, based=True, trace=trace)
                    generation.answer(*tasks.read_reply(facts, request, task, found))
        except Unprepared as error:
            return error.outcome.without(turn.place.endpoint.secrets)
        except ValueError as error:  # of msgspec and of base64 too
            log.warning("%s: a task: %s", turn.place.endpoint.url, type(error).__name__)
            return by_malformed(f"reply to {task.kind}")
        return ReplyOutcome(End.DONE, finish="stop")

    async def _told_tokens(self, turn: Turn, task: Task, trace: str) -> str:
        """Raises Unprepared, ValueError."""
        facts, body = turn.facts, tasks.tokenize_body(turn.facts, turn.request, task)
        if turn.request.turns and not facts.chat_ids:
            outcome = ReplyOutcome(End.FAILED, "it tokenizes no conversations: send its text as prompt", status=400)
            raise Unprepared(replace(outcome, param="messages"))
        if turn.request.turns and facts.template_chat:
            body = tasks.rendered_body(await self._rendered(turn, begins=task.generation_prompt))
        return tasks.read_tokens(facts, await self._ask(turn, "/tokenize", body, trace=trace))

    async def _send(self, turn: Turn, rung: Rung) -> ReplyOutcome:
        """Send the request by a rung; once more if the server closed the connection as it was used again."""
        try:
            prompt = await self._prompt(turn, rung)
        except Unprepared as error:
            return error.outcome
        call = self._call(turn, rung, prompt)
        for fresh in (False, True):
            if turn.generation.cancelled:
                return ReplyOutcome(End.CANCELLED)
            outcome, again = await self._read(turn, rung, call, fresh=fresh)
            if not again:
                return outcome
        return outcome

    def _call(self, turn: Turn, rung: Rung, prompt: Any) -> _Call:
        facts, generation = turn.facts, turn.generation
        if rung is Rung.REATTACH and facts.reattach == "stream":
            return _Call("GET", continuation.stream_path(turn.request))
        path, body = continuation.build(
            facts,
            turn.request,
            rung,
            generation.written_rows(facts),
            prompt,
            self._settings,
            limit=self._limit(turn, rung, prompt),
            salt=_salt(turn.request.tenant, turn.place.key.secret),
        )
        named = continuation.kept_under(facts, turn.request, rung, generation.tried)
        return _Call("POST", path, msgspec.json.encode(body), named)

    async def _read(self, turn: Turn, rung: Rung, call: _Call, *, fresh: bool) -> tuple[ReplyOutcome, bool]:
        """The outcome of one reply, and whether to send again: the connection was closed as it was used again."""
        generation, place, facts, client = turn.generation, turn.place, turn.facts, turn.client
        try:
            connection = await client.connection(fresh=fresh)
        except ConnectError as error:
            return by_cut(str(error), sent=False), False
        if generation.cancelled:
            connection.close()
            return ReplyOutcome(End.CANCELLED), False
        reader = StreamReader(generation, connection, self._emit)
        was_used, before = connection.used > 0, generation.out
        now, span = time.monotonic(), self._span(turn)
        generation.begin(facts, rung, now)
        reader.server, self.readers[generation.id] = place.endpoint.url, reader
        try:
            path, secret = client.address.base + call.path, place.key.secret
            trace = span.carrier()[TRACEPARENT] if turn.request.trace else ""
            data = client.request(call.method, path, call.data, secret, stream=True, trace=trace, more=call.headers)
            client.send(connection, data, reader)
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
            self.detached.begin(turn, reader)
            outcome = self.detached.note_end(turn, rung, reader, outcome, before)
        if reader.headers:
            place.key.note(reader.headers, time.monotonic(), time.time())
            if outcome.end is End.BUSY:
                outcome = replace(outcome, retry_s=retry_after_s(reader.headers, time.time()))
        return outcome, was_used and reader.silent and outcome.reason == CLOSED

    def _span(self, turn: Turn) -> Span:
        """Begin the span of one request to a server, which the server continues."""
        request, address = turn.request, turn.client.address
        task = request.task.kind if request.task is not None else None
        operation = operation_name(task, is_chat=bool(request.turns))
        attributes: Attributes = {
            names.OPERATION: operation,
            names.PROVIDER: turn.facts.kind,
            names.REQUEST_MODEL: turn.facts.model,
            names.SERVER_ADDRESS: address.host,
            names.SERVER_PORT: address.port,
        }
        parent = {TRACEPARENT: request.trace} if request.trace else None
        return self.tracing.span(f"{operation} {turn.facts.model}", parent, "client", attributes=attributes)

    def _limit(self, turn: Turn, rung: Rung, prompt: Any) -> int | None:
        generation, facts = turn.generation, turn.facts
        limit = generation.remaining(rung)
        if limit is None and isinstance(prompt, list) and facts.kind in LIMITED and facts.context:
            return max(1, facts.context - len(prompt) - (generation.out if rung is Rung.IDS else 0))
        if limit is None and self._settings.default_output:
            past = 0 if rung in FROM_BEGINNING else generation.out
            return max(1, self._settings.default_output - past)
        return limit

    # --- prompts that the server renders or tokenises ------------------------------------------------------------

    async def _prompt(self, turn: Turn, rung: Rung) -> Any:
        """The prompt for /completions, without the answer so far; None: the request's own. Raises Unprepared."""
        request, facts, generation = turn.request, turn.facts, turn.generation
        if not continuation.is_prompted(facts, request, rung):
            return None
        if facts.template_chat and request.turns:
            if not isinstance(generation.prompt, str):
                generation.prompt = await self._rendered(turn)
            return generation.prompt
        if request.ids:
            return None
        needs_ids = rung is Rung.IDS or (request.sampling.max_tokens is None and facts.kind in LIMITED)
        if not needs_ids or rung is Rung.TEXT or facts.mixed or not facts.tokenizes:
            return None
        if rung is Rung.IDS:
            await self._check_alignment(turn)
        if not isinstance(generation.prompt, list):
            generation.prompt = await self._tokenized(turn)
        return generation.prompt

    async def _rendered(self, turn: Turn, *, begins: bool = True) -> str:
        request, facts = turn.request, turn.facts
        body = continuation.rendering(facts, request) | {"messages": [each.shown for each in request.turns]}
        if not begins:
            body["add_generation_prompt"] = False
        if request.reasoning not in ("", "default") and facts.reasoning_effort:
            body = continuation.with_effort(body, facts, request.reasoning)
        found = (await self._ask(turn, "/apply-template", body)).get("prompt")
        if not isinstance(found, str) or not found:
            raise Unprepared(by_cut("/apply-template gave no prompt"))
        return found

    async def _tokenized(self, turn: Turn) -> list[int]:
        """The ids of a conversation, or of a text."""
        body: dict[str, Any] = {"model": turn.facts.model}
        if turns := turn.request.turns:
            body |= continuation.rendering(turn.facts, turn.request) | {"messages": [each.shown for each in turns]}
            body["add_generation_prompt"] = True
        else:
            body |= {"prompt": turn.request.prompt, "add_special_tokens": True}
        found = (await self._ask(turn, "/tokenize", body)).get("tokens")
        try:
            return msgspec.convert(found, list[TokenId])
        except msgspec.ValidationError:
            raise Unprepared(by_cut("/tokenize gave no token ids")) from None

    async def _check_alignment(self, turn: Turn) -> None:
        """Where chunks held several tokens, the last ids may be ahead of the text. Raises Unprepared: the ids are then
        not continued."""
        rows = turn.generation.rows
        if all(len(ids) <= 1 for _, ids, _ in rows):
            return
        body = {"model": turn.facts.model, "tokens": [each for _, ids, _ in rows for each in ids]}
        told = await self._ask(turn, "/detokenize", body)
        found = told.get("prompt", told.get("text"))  # the second: SGLang
        if not isinstance(found, str) or found.lstrip() != turn.generation.written(turn.facts).lstrip():
            raise Unprepared(ReplyOutcome(End.FAILED, "its token ids do not give the text that was shown", status=400))

    async def _ask(
        self,
        turn: Turn,
        path: str,
        body: Mapping[str, Any],
        *,
        limit_s: float = ASK_S,
        based: bool = False,
        trace: str = "",
    ) -> Mapping[str, Any]:
        """An answer of the server's own. `based`: its path is behind the base, such as /v1. Raises Unprepared."""
        address, key = turn.client.address, turn.place.key
        path = (address.base if based else address.root) + path
        try:
            reply = await turn.client.ask("POST", path, body, key.secret, limit_s, trace)
        except (ConnectError, BrokenReply) as error:
            raise Unprepared(by_cut(f"{path}: {error}", sent=isinstance(error, BrokenReply))) from None
        found = reply.json()
        key.note(reply.headers, time.monotonic(), time.time())
        if reply.status != 200:
            status = 400 if tasks.TOO_LARGE in reply.body else reply.status
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


MAX_BREAKS_BEFORE = 2
"""A request that a model's servers break so often before its first token goes to the next model."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """What counts of one model's servers, for one request."""

    model: str
    ready: bool
    """Whether one of them is there."""
    wait_s: float = 0.0
    """For how long their rate limits hold the request."""
    breaks: int = 0
    """How often they have broken the request, before its first token."""
    card: ModelCard | None = None
    """What they can do; None: not known yet."""


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The chosen pool and why it is not the first; None: the request waits for a server."""

    number: int | None
    reason: str = ""


def choose(request: Request, pools: Sequence[PoolState], patience_s: float, began: str | None) -> PoolChoice:
    """Choose the servers that get a request.

    An answer stays with the model that gave its first token: two models never write one text. Before that, a request
    goes to a fallback while no server of its own model can be used, or after they have broken it twice. An error by the
    request's own fault, and a content filter, lead to no fallback.

    Args:
        pools: of the model that was asked for, then of its fallbacks in their order.
        patience_s: rate limits that hold a request longer lead to a fallback.
        began: the model that gave the first token; None before that.
    """
    if began is not None:
        number = number_of(began, [pool.model for pool in pools])
        return PoolChoice(number if number is not None and pools[number].ready else None)
    reason = _obstacle(pools[0], patience_s)
    if not reason:
        return PoolChoice(0)
    for number, pool in enumerate(pools[1:], 1):
        if pool.card is not None and not _obstacle(pool, patience_s) and not unsuited(pool.card, request):
            return PoolChoice(number, reason)
    return PoolChoice(0 if pools[0].ready else None)


def number_of(model: str, models: Sequence[str]) -> int | None:
    """The number of the model that began an answer ("": the first); None if it is no longer among them."""
    if not model:
        return 0
    return models.index(model) if model in models else None


def unsuited(card: ModelCard, request: Request) -> str:
    """Why a model cannot stand in for another one with this request; "" if it can."""
    sampling, can, turns = request.sampling, card.capabilities, request.turns
    tools, called = request.tools, any(turn.calls or turn.call_id for turn in turns)
    size = size_of(request)
    obstacles = {
        "vectors and token ids are those of another model": request.task is not None,
        "token ids are those of another model": bool(request.ids),
        "token ids of a bias are those of another model": bool(sampling.logit_bias),
        "it takes no raw prompts": isinstance(request.prompt, str) and not can.text_prompts,
        "it takes no conversations": bool(turns) and not can.chat,
        "it gives too few log-probabilities": sampling.logprobs is not None and sampling.logprobs > can.logprobs,
        "it cannot be held to JSON": sampling.json_schema is not None and not can.json_schema,
        "it knows no penalties": bool(sampling.presence_penalty or sampling.frequency_penalty) and not can.penalties,
        "it knows no top_k": bool(sampling.top_k) and not can.top_k,
        "it knows no min_p": bool(sampling.min_p) and not can.min_p,
        "it knows no repetition_penalty": sampling.repetition_penalty not in (None, 1) and not can.repetition_penalty,
        "it knows no tools": (called or (tools is not None and not tools.forced)) and not can.tools,
        "it cannot force a call": tools is not None and tools.forced and not can.forced_tools,
        "it gets no further fields": bool(request.passed.keys() - HINTS) and not can.passes_fields,
        "its context may be too short": size + (sampling.max_tokens or 1) > card.context,
        "its longest answer is shorter": (sampling.max_tokens or 0) > card.max_output,
    }
    return next((reason for reason, stands in obstacles.items() if stands), "")


def size_of(request: Request) -> int:
    """Tokens of a prompt, roughly."""
    if request.inputs:
        sizes = [len(each) // (CHARACTERS_PER_TOKEN if isinstance(each, str) else 1) for each in request.inputs]
        return sum(sizes)
    if request.ids:
        return len(request.ids)
    texts = [turn.content for turn in request.turns] or [str(request.prompt)]
    return sum([len(text) // CHARACTERS_PER_TOKEN for text in texts])


def _obstacle(pool: PoolState, patience_s: float) -> str:
    """Why a model's servers do not get a request that has no token yet; "" if they may."""
    if not pool.ready:
        return "no server of it is there"
    if pool.breaks >= MAX_BREAKS_BEFORE:
        return f"its servers broke the request {pool.breaks} times"
    if pool.wait_s > patience_s:
        return f"its rate limit holds for {pool.wait_s:.0f} s"
    return ""


# --- generations that go on at a server -------------------------------------------------------------------------------


MAX_VAIN = 2
"""A generation that brought nothing new so often in a row is given up: it ended there without a finish reason."""
LOOKUP_S = 3.0
"""For a server's answer whether it keeps a generation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request at one server, with what the server's last probe found."""

    generation: UpstreamGeneration
    place: ServerPlace
    facts: ServerFacts

    @property
    def request(self) -> Request:
        return self.generation.request

    @property
    def client(self) -> UpstreamClient:
        return self.place.endpoint.client


class DetachedGenerations:
    """Generations that may go on at servers without a connection, of all requests of an engine."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[None]] = set()
        self._stops: dict[str, tuple[ServerPlace, str, str]] = {}
        """By request id: where its generation may go on, and the call that stops it."""
        self._vain: Counter[str] = Counter()
        """By request id: how often in a row reading its generation brought nothing new."""

    def begin(self, turn: Turn, reader: StreamReader) -> None:
        """A reply that is kept under a name has ended for its reader, who may come back."""
        if turn.facts.reattach == "key" and reader.is_read:  # the job is over
            return
        stop = continuation.stop_path(turn.facts, turn.request, reader.headers)
        if stop is not None and reader.status == 200:
            self._stops[turn.generation.id], turn.generation.located = (turn.place, *stop), True

    def note_end(
        self, turn: Turn, rung: Rung, reader: StreamReader, outcome: ReplyOutcome, before: int
    ) -> ReplyOutcome:
        """Stop a generation that is not to be continued where it is: it has been silent, or has brought nothing new.
        Returns what follows for the request. `before`: tokens that had come out when the reply began."""
        generation = turn.generation
        if outcome.end in (End.BUSY, End.KEY):  # it goes on meanwhile
            return outcome
        if rung is Rung.REATTACH and outcome.told:
            outcome = ReplyOutcome(End.RESTART, f"it has ended there: {outcome.reason}")
        if outcome.end is not End.BROKEN:
            self.stop(generation)
            return outcome
        if generation.out > before:
            self._vain.pop(generation.id, None)
        elif reader.status == 200 or continuation.JOB_HEADER in reader.headers:
            self._vain[generation.id] += 1
        vain = self._vain[generation.id] >= MAX_VAIN
        if (vain and turn.facts.reattach == "key") or ((vain or outcome.stalled) and generation.rows):
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
        if (goes_on or generation.left) and (generation.rows or method == continuation.BY_NAME):
            return
        client = place.endpoint.client
        self._spawn(client.ask(method, client.address.base + path, None, place.key.secret))

    def stop_by_name(self, endpoint: ServerEndpoint, generation: UpstreamGeneration) -> None:
        """Stop what a llama-server may generate of a text that nobody reads."""
        facts, client = endpoint.facts, endpoint.client
        if facts is not None and facts.reattach == "stream":
            stop = continuation.stop_path(facts, generation.request, {})
            if stop is not None:
                self._spawn(client.ask(stop[0], client.address.base + stop[1], None, endpoint.keys[0].secret))

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
    body = {"conversation_ids": [continuation.stream_name(request)]}
    path, key = client.address.base + LOOKUP, endpoint.keys[0].secret
    try:
        return continuation.begun_at((await client.ask("POST", path, body, key, LOOKUP_S)).json(), request)
    except (ConnectError, BrokenReply):
        return 0.0


async def _cancelled(place: ServerPlace, path: str, data: bytes, headers: Mapping[str, str]) -> None:
    """Raises ConnectError, BrokenReply."""
    client, key = place.endpoint.client, place.key.secret
    base, more = client.address.base, {**headers, "Prefer": "respond-async"}
    found = await client.ask("POST", base + path, msgspec.Raw(data), key, more=more)
    if (stop := continuation.cancel_path(found.headers)) is not None:
        await client.ask("POST", base + stop, None, key)


async def _quietly(call: Coroutine[Any, Any, object]) -> None:
    """Make a call whose failure changes nothing: the request stops as well, only later."""
    with suppress(ConnectError, BrokenReply):
        await call
