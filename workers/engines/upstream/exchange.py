"""Exchange with a server: sends a request by the best rung, or a task, and reads the reply to its end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx2
import msgspec

from penstock.engine import MEDIA_KINDS, Logprob, Piece, Task
from streaming.jobs.job import TASKS
from telemetry import tracing as names
from telemetry.logs import EventLog
from telemetry.otlp import Attributes
from telemetry.tracing import TRACEPARENT, operation_name
from workers.engines.task_answers import check_task_answer, joined_vectors, reported_scores, reported_tokens
from workers.engines.upstream import continuation
from workers.engines.upstream.continuation import FROM_BEGINNING, Rung
from workers.engines.upstream.endpoints import ServerEndpoint, ServerSlot, retry_after_s
from workers.engines.upstream.generation import StreamReader, UpstreamGeneration, text_of_rows
from workers.engines.upstream.http import ASK_S, EXCESS, BrokenReply, ConnectError, Reply, UpstreamConnection
from workers.engines.upstream.reply import (
    Count,
    End,
    ReplyOutcome,
    TokenId,
    by_cut,
    by_malformed,
    by_status,
    logprobs_of,
)
from workers.engines.upstream.server import DEFAULT_CONTEXT, LOOKUP

if TYPE_CHECKING:
    from workers.engines.upstream.pool import ServerPool

log = logging.getLogger(__name__)
events = EventLog(__name__)

ERRORS = (End.FAILED, End.BROKEN, End.KEY)
"""Ends of replies that are errors in a trace; a busy server and a cancel are none."""
LIMITED = ("vllm", "sglang")
"""Kinds whose completions end after 16 tokens unless they are told a limit."""
REFUSABLE = (Rung.REATTACH, Rung.IDS, Rung.TEXT, Rung.PREFILL)
"""Rungs that are followed by the next one if the server refuses them."""
MAX_VAIN = 2
"""A generation that brought nothing new so often in a row is given up: it ended there without a finish reason."""
LOOKUP_S = 3.0
"""For a server's answer whether it keeps a generation."""
BASE64 = ("openai", "vllm", "sglang", "llama-server")
"""Kinds that give vectors as base64."""
TOO_LARGE = b"is too large to process"
"""llama-server says so with 500, although the text is at fault."""

Call: TypeAlias = tuple[str, str, bytes, Mapping[str, str]]
"""Method, path behind the base, body and further headers of a request."""


class Unprepared(Exception):
    """A prompt could not be prepared."""

    def __init__(self, outcome: ReplyOutcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Exchange:
    """One request at one server."""

    def __init__(self, generation: UpstreamGeneration, slot: ServerSlot, pool: ServerPool) -> None:
        self._generation, self._slot = generation, slot
        self._settings, self._emit, self._tracing = pool.settings, pool.emit, pool.tracing
        self._request, self._facts = generation.request, slot.facts
        if adapter := self._request.adapter:
            self._facts = msgspec.structs.replace(slot.facts, model=pool.adapters[adapter])
        self._endpoint, self._client, self._secret = slot.endpoint, slot.endpoint.client, slot.key.secret

    async def run(self) -> ReplyOutcome:
        """Send the request and read the reply."""
        outcome = await (self._answer() if self._request.task is None else self._traced(self._perform))
        return outcome.without(self._endpoint.secrets)

    async def _answer(self) -> ReplyOutcome:
        """A rung that the server refuses is followed by the next one."""
        generation, url, first_refusal = self._generation, self._endpoint.url, ""
        if not generation.scored:
            try:
                await self._traced(self._score)
            except Unprepared as error:
                return error.outcome
            if self._request.sampling.max_tokens == 0:
                return ReplyOutcome(End.DONE, finish="length")
        while not generation.cancelled:
            rung, reason = continuation.choose(self._facts, self._request, generation.rows, generation.tried)
            if rung is Rung.RESTART:
                return ReplyOutcome(End.RESTART, first_refusal or reason)
            if generation.rows:
                events.write("an answer is continued", request=generation.id, server=url, by=rung.value, reason=reason)
            try:
                outcome = await self._traced(partial(self._send, rung, await self._call(rung)))
            except Unprepared as error:
                outcome = error.outcome
            is_refused = outcome.end is End.FAILED and 400 <= outcome.status < 500 and rung in REFUSABLE
            if not is_refused and not (rung is Rung.REATTACH and outcome.end is End.RESTART):
                return outcome
            said, level = outcome.without(self._endpoint.secrets).reason, logging.WARNING
            first_refusal = first_refusal or f"{rung.value}: {said}"
            if rung is Rung.REATTACH:
                stop_generation(generation)
                level = logging.INFO
            log.log(level, "%s refuses a continuation by %s: %s", url, rung.value, said)
            generation.tried.add(rung)
        return ReplyOutcome(End.CANCELLED)

    async def _score(self, trace: str) -> ReplyOutcome:
        """Have the server tell the log-probabilities of the prompt alone. Raises Unprepared."""
        request, generation = self._request, self._generation
        wanted = request.sampling.logprobs or 0
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.ids)
        body = {"model": self._facts.model, "prompt": prompt, "echo": True, "logprobs": wanted, "max_tokens": 0}
        found = await self._ask(continuation.TEXT, body, self._settings.first_token_s, trace, based=True)
        try:
            told = msgspec.json.encode(found["choices"][0]["logprobs"])
            first, *rows = logprobs_of(msgspec.Raw(told), wanted)
            generation.prompt_tokens = int(found["usage"]["prompt_tokens"])
        except (LookupError, TypeError, ValueError):
            raise Unprepared(by_malformed("reply with a prompt")) from None
        generation.scored = generation.told_prompt = True
        shown = () if request.sampling.logprobs is None else (Logprob(first.token, math.nan), *rows)
        self._emit(Piece(generation.id, logprobs=shown, prompt_tokens=generation.prompt_tokens))
        return ReplyOutcome(End.DONE)

    async def _call(self, rung: Rung) -> Call:
        """The request by a rung. Raises Unprepared."""
        generation, request, facts = self._generation, self._request, self._facts
        if rung is Rung.REATTACH and facts.reattach == "stream":
            return "GET", continuation.stream_path(request) + "&from=0", b"", {}
        prompt = await self._prompt(rung)
        rows, limit = generation.written_rows(facts), self._limit(rung, prompt)
        secret = self._secret.encode() or b"penstock"  # as in every worker, so that they share cached prompts
        salt = hmac.digest(secret, request.tenant.encode(), "sha256").hex()
        path, body = continuation.build(facts, request, rung, rows, prompt, self._settings, limit=limit, salt=salt)
        return "POST", path, msgspec.json.encode(body), continuation.kept_under(facts, request, rung, generation.tried)

    async def _send(self, rung: Rung, call: Call, trace: str) -> ReplyOutcome:
        """Send the request by a rung, and read the reply. `trace`: the traceparent of its span."""
        generation, facts, client, secret = self._generation, self._facts, self._client, self._secret
        replies, spawn = self._endpoint.replies, self._endpoint.spawn
        method, path, body, more = call

        def begin(connection: UpstreamConnection) -> StreamReader:
            reader = replies[generation.id] = StreamReader(generation, connection, self._emit, facts, rung)
            return reader

        whole = client.address.base + path
        try:
            data = client.request(method, whole, body, secret, stream=True, more={**more, TRACEPARENT: trace})
            reader = await client.exchange(data, begin)
        except ConnectError as error:
            return by_cut(str(error), "unsent")
        finally:
            replies.pop(generation.id, None)
        assert reader.outcome is not None
        outcome = reader.outcome
        if outcome.end is End.BUSY:
            outcome = replace(outcome, retry_s=retry_after_s(reader.headers, time.time()))
        if facts.aborts and not reader.is_read:  # sooner than it would notice
            spawn(client.ask("POST", "/abort_request", {"rid": generation.id}, secret, based=False))
        is_unseen = facts.reattach == "key" and more and not reader.status
        if is_unseen and generation.cancelled and not (generation.left and generation.rows):
            spawn(self._stop_unseen(path, body, more))
        if facts.reattach and rung in FROM_BEGINNING:
            outcome = self._note_end(rung, reader, outcome)
        self._slot.key.note(reader.headers, time.monotonic(), time.time())
        return outcome

    async def _traced(self, call: Callable[[str], Awaitable[ReplyOutcome]]) -> ReplyOutcome:
        """Make a call in a span of its own. `call` gets the span's traceparent, "" for a request without one."""
        request, facts, address = self._request, self._facts, self._client.address
        operation = operation_name(None if request.task is None else request.task.kind, is_chat=bool(request.turns))
        attributes: Attributes = {
            names.OPERATION: operation,
            names.PROVIDER: facts.kind,
            names.REQUEST_MODEL: facts.model,
            names.SERVER_ADDRESS: address.host,
            names.SERVER_PORT: address.port,
        }
        parent = {TRACEPARENT: request.trace} if request.trace else None
        span = self._tracing.span(f"{operation} {facts.model}", parent, "client", attributes=attributes)
        try:
            outcome = await call(span.carrier()[TRACEPARENT] if request.trace else "")
            failed = outcome.end in ERRORS
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

    # --- prompts that the server renders or tokenises --------------------------------------------------------------

    def _limit(self, rung: Rung, prompt: Any) -> int | None:
        """max_tokens of a reply; None: as many as fit."""
        facts, out = self._facts, self._generation.out
        past = 0 if rung in FROM_BEGINNING else out
        if (limit := self._request.sampling.max_tokens) is not None:
            return max(0, limit - past)
        if isinstance(prompt, list) and facts.kind in LIMITED and facts.context:
            return max(1, facts.context - len(prompt) - (out if rung is Rung.IDS else 0))
        return max(1, self._settings.default_output - past) if self._settings.default_output else None

    async def _prompt(self, rung: Rung) -> Any:
        """The prompt for /completions, without the answer so far; None: the request's own. Raises Unprepared."""
        generation, request, facts = self._generation, self._request, self._facts
        if not continuation.is_prompted(facts, request, rung):
            return None
        if facts.template_chat and request.turns:
            if not isinstance(generation.prompt, str):
                generation.prompt = await self._rendered()
            return generation.prompt
        needs_ids = rung is Rung.IDS or (request.sampling.max_tokens is None and facts.kind in LIMITED)
        if request.ids or not needs_ids or rung is Rung.TEXT or facts.mixed or not facts.tokenize:
            return None
        if rung is Rung.IDS:
            await self._check_alignment()
        if not isinstance(generation.prompt, list):
            generation.prompt = await self._tokenized()
        return generation.prompt

    async def _rendered(self, *, begins: bool = True) -> str:
        body = continuation.rendering(self._facts, self._request) | ({} if begins else {"add_generation_prompt": False})
        found = await self._ask("/apply-template", continuation.with_effort(body, self._facts, self._request))
        prompt = found.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise Unprepared(by_cut("/apply-template gave no prompt"))
        return prompt

    async def _tokenized(self) -> list[int]:
        """The ids of a conversation, or of a text."""
        if self._request.turns:
            body = continuation.rendering(self._facts, self._request) | {"add_generation_prompt": True}
        else:
            body = {"prompt": self._request.prompt, "add_special_tokens": True}
        found = (await self._ask("/tokenize", {"model": self._facts.model} | body)).get("tokens")
        try:
            return msgspec.convert(found, list[TokenId])
        except msgspec.ValidationError:
            raise Unprepared(by_cut("/tokenize gave no token ids")) from None

    async def _check_alignment(self) -> None:
        """Where chunks held several tokens, the last ids may be ahead of the text. Raises Unprepared: the ids are then
        not continued."""
        rows = self._generation.rows
        if all(len(ids) <= 1 for _, ids, _ in rows):
            return
        body = {"model": self._facts.model, "tokens": [each for _, ids, _ in rows for each in ids]}
        found = await self._ask("/detokenize", body)
        with suppress(ValueError):
            if read_text(found).lstrip() == text_of_rows(self._generation.written_rows(self._facts)).lstrip():
                return
        raise Unprepared(ReplyOutcome(End.FAILED, "its token ids do not give the text that was shown", status=400))

    async def _ask(self, path: str, body: Any, limit_s: float = ASK_S, trace: str = "", *, based: bool = False) -> Any:
        """An answer of the server's own, as an object. `based`: as of UpstreamClient.ask. Raises Unprepared."""
        found = (await self._reply(path, body, "", limit_s, trace, based=based)).json()
        if not isinstance(found, Mapping):
            raise Unprepared(by_cut(f"{path} gave no object"))
        return found

    async def _reply(self, path: str, body: Any, kind: str, limit_s: float, trace: str, *, based: bool) -> Reply:
        """The server's whole reply. `kind`: the media type of the body; "": JSON. Raises Unprepared."""
        more = {TRACEPARENT: trace} | ({"Content-Type": kind} if kind else {})
        try:
            reply = await self._client.ask("POST", path, body, self._secret, limit_s, more, based=based)
        except BrokenReply as error:
            if str(error) == EXCESS:  # each further one would be as long
                raise Unprepared(ReplyOutcome(End.FAILED, f"{EXCESS}: ask for less", status=400)) from None
            raise Unprepared(by_cut(f"{path}: {error}")) from None
        except ConnectError as error:
            raise Unprepared(by_cut(f"{path}: {error}", "unsent")) from None
        self._slot.key.note(reply.headers, time.monotonic(), time.time())
        if reply.status != 200:
            outcome = by_status(400 if TOO_LARGE in reply.body else reply.status, reply.body)
            raise Unprepared(replace(outcome, retry_s=retry_after_s(reply.headers, time.time())))
        return reply

    # --- tasks -----------------------------------------------------------------------------------------------------

    async def _perform(self, trace: str) -> ReplyOutcome:
        """Have the server answer a task."""
        request, facts, task = self._request, self._facts, self._request.task
        assert task is not None
        if request.turns and not facts.chat_ids and task.kind not in MEDIA_KINDS:
            words = "it tokenizes no conversations: send its text as prompt"
            return ReplyOutcome(End.FAILED, words, status=400, param="messages")
        path = TASKS[task.kind].endpoint.path.removeprefix("/v1")
        limit_s = self._settings.first_token_s if task.computes else ASK_S
        try:
            if task.kind in MEDIA_KINDS:
                reply = await self._reply(path, *self._form(task), limit_s, trace, based=True)
                self._generation.answer(*forwarded(reply, task))
                return ReplyOutcome(End.DONE, finish="stop")
            found = await self._ask(path, await self._task_body(), limit_s, trace, based=task.computes)
            self._generation.answer(*self._task_answer(found))
        except Unprepared as error:
            return error.outcome
        except ValueError as error:  # of msgspec and of base64 too
            log.warning("%s: a task: %s", self._endpoint.url, type(error).__name__)
            return by_malformed(f"reply to {task.kind}")
        return ReplyOutcome(End.DONE, finish="stop")

    def _form(self, task: Task) -> tuple[Any, str]:
        """Body and media type of a request with files, or for images."""
        turn, withheld = self._request.turns[0], self._settings.withhold_fields
        given = continuation.passed(self._facts, self._request, withheld) | task.options | {"model": self._facts.model}
        given |= {"prompt": turn.content} if turn.content else {}
        if not turn.parts:
            return given, ""
        return form_data(given, [part["file"] for part in turn.parts if part["type"] == "file"])

    async def _task_body(self) -> dict[str, Any]:
        """Raises Unprepared."""
        request, facts, task = self._request, self._facts, self._request.task
        assert task is not None
        is_llama, model = facts.kind == "llama-server", {"model": facts.model}
        if task.computes:
            body = continuation.passed(facts, request, self._settings.withhold_fields) | model
            if task.kind == "rerank":
                query, *documents = request.inputs
                return body | {"query": query, "documents": documents, "top_n": len(documents)}
            base64 = {"encoding_format": "base64"} if facts.kind in BASE64 else {}
            sizes = {} if task.dimensions is None else {"dimensions": task.dimensions}
            return body | {"input": list(request.inputs)} | base64 | sizes
        if task.kind == "detokenize":
            return ({} if is_llama else model) | {"tokens": list(request.ids)}
        if request.turns and not facts.template_chat:
            turns = [turn.shown for turn in request.turns]
            return model | {"messages": turns, "add_generation_prompt": task.generation_prompt}
        text = await self._rendered(begins=task.generation_prompt) if request.turns else request.prompt
        special = bool(request.turns) or task.special_tokens
        if is_llama:
            return {"content": text, "add_special": special, "parse_special": True}
        return model | {"prompt": text, "add_special_tokens": special}

    def _task_answer(self, found: Mapping[str, Any]) -> tuple[str, int | None]:
        """The text of the answer, and the tokens of its inputs: 0 if the server counts none, None if its count cannot
        be true. Raises ValueError for a reply that does not answer, also for vectors of another length than those of
        the server's probe."""
        request, facts, task = self._request, self._facts, self._request.task
        assert task is not None
        if task.kind == "detokenize":
            return read_text(found), 0
        if task.kind == "tokenize":
            ids = msgspec.convert(found.get("tokens"), list[TokenId])
            return reported_tokens(ids, facts.context or DEFAULT_CONTEXT), 0
        if task.kind == "embed":
            data = msgspec.convert(found.get("data"), list[Vector])
            if any(each.index for each in data):  # else the server leaves them out
                data.sort(key=lambda each: each.index)
                if [each.index for each in data] != list(range(len(data))):
                    raise ValueError("vectors of other inputs")
            vectors = [each.embedding for each in data]
            text = ",".join([each if isinstance(each, str) else joined_vectors([each]) for each in vectors])
        else:
            ranked = msgspec.convert(found.get("results"), list[Score])
            scores = {each.index: each.relevance_score for each in ranked}
            if sorted(scores) != list(range(len(request.inputs) - 1)):
                raise ValueError("scores of other documents")
            text = reported_scores([scores[index] for index in range(len(scores))])
        check_task_answer(task, request.inputs, text, facts.embedding_size)
        try:
            usage = msgspec.convert(found.get("usage") or {}, TaskUsage)
        except msgspec.ValidationError:
            return text, None
        return text, usage.prompt_tokens or usage.total_tokens or 0

    # --- generations that go on without a reader -------------------------------------------------------------------

    def _note_end(self, rung: Rung, reader: StreamReader, outcome: ReplyOutcome) -> ReplyOutcome:
        """A reply that is kept under a name has ended for its reader, who may come back. Stop its generation if it is
        not to be continued where it is: it has been silent, or has brought nothing new. Returns what follows for the
        request."""
        generation, by_key = self._generation, self._facts.reattach == "key"
        stop = continuation.stop_call(self._facts, self._request, reader.headers)
        if stop is not None and reader.status == 200 and not (by_key and reader.is_read):
            generation.kept_at = (self._slot, *stop)
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
        if (vain and by_key) or ((vain or outcome.how == "stalled") and generation.rows):
            generation.tried.add(Rung.REATTACH)
            stop_generation(generation)
        return outcome  # one at a llama-server that has shown nothing is replaced by the next one

    async def _stop_unseen(self, path: str, body: bytes, more: Mapping[str, str]) -> None:
        """Stop the job of a request to a Penstock that was cancelled before its reply began, which would have told the
        job's id: the same request, put without waiting, does. Raises ConnectError, BrokenReply."""
        wanted = {**more, "Prefer": "respond-async"}
        found = await self._client.ask("POST", path, msgspec.Raw(body), self._secret, more=wanted)
        if stop := continuation.stop_call(self._facts, self._request, found.headers):
            await self._client.ask(*stop, None, self._secret)


class Vector(msgspec.Struct):
    embedding: str | list[float]
    index: int = 0


class Score(msgspec.Struct):
    index: int
    relevance_score: float


class TaskUsage(msgspec.Struct):
    prompt_tokens: Count | None = None
    total_tokens: Count | None = None


class KeptReply(msgspec.Struct):
    """A reply that a llama-server keeps."""

    conversation_id: str
    started_at: float
    """Unix time of the server."""


def form_data(given: Mapping[str, Any], files: Sequence[Mapping[str, str]]) -> tuple[msgspec.Raw, str]:
    """A form of these fields and files, and its media type. A list is a field `x[]` for each of its values."""
    fields = dict[str, list[str]]()
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        texts = [each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in values]
        fields[f"{name}[]" if isinstance(value, list) else name] = texts
    parts = list[tuple[str, tuple[str, bytes, str]]]()
    for file in files:
        start, _, data = file["file_data"].partition(",")
        parts.append((file["field"], (file["filename"], b64decode(data), start[5:].partition(";")[0])))
    form = httpx2.Request("POST", "http://localhost", data=fields, files=parts)
    return msgspec.Raw(form.read()), form.headers["content-type"]


def forwarded(reply: Reply, task: Task) -> tuple[str, int | None]:
    """The reply to a task of MEDIA_KINDS, and the tokens of its prompt, if it counts them. Raises ValueError."""
    text, found = reply.body.decode(), reply.json()
    if not isinstance(found, Mapping):
        if task.options.get("response_format") not in ("text", "srt", "vtt"):
            raise ValueError("no object")
        return text, 0
    usage = found.get("usage")
    count = usage.get("input_tokens", usage.get("prompt_tokens")) if isinstance(usage, Mapping) else 0
    return text, msgspec.convert(count or 0, Count)


def read_text(found: Mapping[str, Any]) -> str:
    """The text of token ids. Raises ValueError."""
    text = found.get("content", found.get("prompt", found.get("text")))  # of llama-server, vLLM, SGLang
    if not isinstance(text, str):
        raise ValueError("no text")
    return text


def stop_generation(generation: UpstreamGeneration, *, goes_on: bool = False) -> None:
    """Stop what goes on at a server, unless another worker may continue it. `goes_on`: the request goes back to the
    queue. A job of a Penstock that has shown nothing is found by nobody; a stream's name is that of the next one too.
    """
    kept_at, generation.kept_at, generation.counts.vain = generation.kept_at, None, 0
    if kept_at is not None:
        slot, method, path = kept_at
        if not (goes_on or generation.left) or not (generation.rows or method == continuation.BY_NAME):
            slot.endpoint.spawn(slot.endpoint.client.ask(method, path, None, slot.key.secret))


def stop_by_name(endpoint: ServerEndpoint, generation: UpstreamGeneration) -> None:
    """Stop what a llama-server may generate of a text that nobody reads."""
    stop = continuation.stop_call(endpoint.facts, generation.request, {}) if endpoint.facts else None
    if stop is not None:
        endpoint.spawn(endpoint.client.ask(*stop, None, endpoint.keys[0].secret))


async def home_of(generation: UpstreamGeneration, endpoints: Sequence[ServerEndpoint]) -> ServerEndpoint | None:
    """The server that keeps the newest generation of a text; None if none does, or there is no choice."""
    if not generation.rows or Rung.REATTACH in generation.tried or len(endpoints) < 2:
        return None
    if generation.kept_at is not None and generation.kept_at[0].endpoint in endpoints:
        return generation.kept_at[0].endpoint
    asked = [each for each in endpoints if each.facts is not None and each.facts.reattach == "stream"]
    starts = await asyncio.gather(*[_begun_at(each, continuation.stream_name(generation.request)) for each in asked])
    latest = max(starts, default=0.0)
    return asked[starts.index(latest)] if latest else None


async def _begun_at(endpoint: ServerEndpoint, name: str) -> float:
    """When the reply began that a llama-server keeps under this name; 0.0: it keeps none."""
    body, key = {"conversation_ids": [name]}, endpoint.keys[0].secret
    try:
        kept = msgspec.convert((await endpoint.client.ask("POST", LOOKUP, body, key, LOOKUP_S)).json(), list[KeptReply])
    except (ConnectError, BrokenReply, msgspec.ValidationError):
        return 0.0
    return max([each.started_at for each in kept if each.conversation_id == name], default=0.0)
