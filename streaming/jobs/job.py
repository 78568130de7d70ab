"""Job: one accepted request, as the queue stores it, and the check that an engine supports it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum, unique
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.engine import MEDIA_KINDS, Capabilities, ChatTurn, Failure, Input, ModelCard, Sampling, Task, TaskKind
from penstock.tools import Tools
from streaming.ids import full_name
from streaming.order import Priority
from telemetry.tracing import operation_name


class ResponseForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the Responses API shows of a request: a part of a job's body, so the rules for changing messages hold.

    Every process renders the same response object and the same events from it, from the log and from the terminal
    record.
    """

    background: bool = False
    """The client does not wait: the job outlives every connection."""
    store: bool = True
    """Whether it can be retrieved after its answer."""
    previous: str = ""
    """Id of the job whose conversation it continues, or ""."""
    instructed: bool = False
    """The first turn of the prompt holds `instructions`, which a response that continues this one does not inherit."""
    own_turns: int = 0
    """How many turns at the prompt's end are this request's own input; those before it are of earlier responses."""
    format: dict[str, Any] = {}
    """`text.format` as it was sent; {}: plain text."""
    top_logprobs: int = 0
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    metadata: dict[str, str] | None = None
    """The labels that it shows; None: those of the job. A line of a batch has others as a job."""
    tools: tuple[dict[str, Any], ...] = ()
    """As they were sent."""
    tool_choice: Any = "auto"
    conversation: str = ""
    """The conversation that its input and its answer belong to, or ""."""
    developer: tuple[int, ...] = ()
    """Places of those of its own turns that were sent with the role `developer`; engines take them as system."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class MessageForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the Messages API shows of a request, likewise."""

    thinking: bool = False
    """Whether the answer shows what the model thought."""


class TaskForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a request for embeddings or for a ranking that no engine needs."""

    base64: bool = False
    """Embeddings as base64 of little-endian float32, not as lists of numbers."""
    top_n: int | None = None
    """Only so many documents, the best first; None: all."""
    documents: bool = False
    """The ranking repeats the texts of its documents."""


NO_FORM = TaskForm()
"""Of requests that generate texts. Use this object: a struct leaves out a default by identity, so an equal one would be
written into the job's body."""


class JobState(StrEnum):
    """State of a job. The last four are final: a job reaches exactly one of them."""

    QUEUED = "queued"
    RUNNING = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class CancelledBy(StrEnum):
    """Who cancelled a job. The process that authenticated the caller, or that ends the job, decides it."""

    READER = "reader"
    """Its last reader closed the connection."""
    SLOW_READER = "slow_reader"
    """Its last reader took nothing for so long that its API process closed the connection."""
    OWNER = "owner"
    """A key of its tenant."""
    ADMIN = "admin"
    """An administrator."""
    BATCH = "batch"
    """Its batch was cancelled, paused, or out of time."""
    NOT_ACCEPTED = "not_accepted"
    """Its API process told the client that the request was not accepted, because the store did not answer in time."""
    ENGINE = "engine"
    """Its engine, or the server behind it."""


@unique
class Endpoint(StrEnum):
    """Endpoint of a request: the letter that its job's record has, and the path."""

    path: str

    def __new__(cls, letter: str, path: str) -> Endpoint:
        found = str.__new__(cls, letter)
        found._value_, found.path = letter, path
        return found

    CHAT = "c", "/v1/chat/completions"
    COMPLETIONS = "t", "/v1/completions"
    RESPONSES = "r", "/v1/responses"
    MESSAGES = "m", "/v1/messages"
    EMBEDDINGS = "e", "/v1/embeddings"
    RERANK = "k", "/v1/rerank"
    TOKENIZE = "o", "/tokenize"
    DETOKENIZE = "d", "/detokenize"
    TRANSCRIPTIONS = "a", "/v1/audio/transcriptions"
    TRANSLATIONS = "l", "/v1/audio/translations"
    IMAGES = "i", "/v1/images/generations"
    EDITS = "s", "/v1/images/edits"


class TaskFacts(NamedTuple):
    """What there is to know of a kind of task."""

    endpoint: Endpoint
    field: str
    """The field of its request with what it is about."""
    capability: str
    """Of an engine that does it."""
    lack: str
    """What an engine without it does, and what to do."""


_USE = "use a model that GET /v1/models shows with"
_NO_IDS = "does not tell token ids: the usage of an answer counts them"
_NO_RECORDINGS, _NO_IMAGES = f"hears no recordings: {_USE} transcribe", f"draws no images: {_USE} draw"
TASKS: Mapping[TaskKind, TaskFacts] = {
    "embed": TaskFacts(Endpoint.EMBEDDINGS, "input", "embed", f"makes no embeddings: {_USE} embed"),
    "rerank": TaskFacts(Endpoint.RERANK, "documents", "rerank", f"ranks no documents: {_USE} rerank"),
    "tokenize": TaskFacts(Endpoint.TOKENIZE, "prompt", "tokenize", _NO_IDS),
    "detokenize": TaskFacts(Endpoint.DETOKENIZE, "tokens", "tokenize", "has no text for token ids"),
    "transcribe": TaskFacts(Endpoint.TRANSCRIPTIONS, "file", "transcribe", _NO_RECORDINGS),
    "translate": TaskFacts(Endpoint.TRANSLATIONS, "file", "transcribe", _NO_RECORDINGS),
    "draw": TaskFacts(Endpoint.IMAGES, "prompt", "draw", _NO_IMAGES),
    "edit": TaskFacts(Endpoint.EDITS, "prompt", "draw", _NO_IMAGES),
}


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation the engine renders with its own chat template."""

    turns: tuple[ChatTurn, ...]


class Text(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """Raw prompts, one choice (times `n`) each."""

    texts: tuple[str, ...]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Raw prompts as token ids, one choice (times `n`) each."""

    ids: tuple[tuple[int, ...], ...]


class Inputs(msgspec.Struct, frozen=True, array_like=True, tag="inputs"):
    """Texts or token ids of a task, in groups of which the engine computes each at once, like a choice. A worker that
    takes over computes only the groups that have no answer."""

    groups: tuple[tuple[Input, ...], ...]


Prompt: TypeAlias = Chat | Text | Tokens | Inputs


def prompt_count(prompt: Prompt) -> int:
    """How many prompts these are: a conversation is one, and so is a group of inputs."""
    match prompt:
        case Text(items) | Tokens(items) | Inputs(items):
            return len(items)
    return 1


MAX_PREVIEW_CHARS = 80
_JOINERS = "\u200c\u200d"
"""Invisible characters that Persian, Indic scripts and emoji need."""


def preview_of(prompt: Prompt) -> str:
    """The first words of a prompt, in one line without control characters, for lists: of a chat, its last user turn."""
    mark = ""
    match prompt:
        case Chat(turns):
            last = turns[-1] if turns else None
            asked = next((turn for turn in reversed(turns) if turn.role == "user" and turn.content), last)
            text = asked.content if asked is not None else ""
            mark = f"[{last.role}] " if last is not None and last.role != "user" else ""
        case Text(texts):
            text, mark = "".join(texts[:1]), f"[{len(texts)} prompts] " if len(texts) > 1 else ""
        case Tokens(ids):
            text = f"[{len(ids)} prompts of token ids]" if len(ids) != 1 else f"[{len(ids[0])} token ids]"
        case Inputs(groups):
            count, first = sum(map(len, groups)), next((each for group in groups for each in group), "")
            mark = f"[{count} inputs] " if count > 1 else ""
            text = first if isinstance(first, str) else f"[{len(first)} token ids]"
    if text[: 4 * MAX_PREVIEW_CHARS].isspace():
        text = text.lstrip()
    start = mark + text[: 4 * MAX_PREVIEW_CHARS]
    if not start.isprintable():
        start = "".join([char if char.isprintable() or char in _JOINERS else " " for char in start])
    words = " ".join(start.split())
    if len(words) <= MAX_PREVIEW_CHARS and len(text) <= 4 * MAX_PREVIEW_CHARS:
        return words
    end = min(len(words), MAX_PREVIEW_CHARS - 1)
    while 0 < end < len(words) and (unicodedata.combining(words[end]) or _JOINERS.find(words[end]) >= 0):
        end -= 1
    return words[:end].rstrip(_JOINERS + " ") + "…"


JOB_VERSION = 7
"""The greatest version of a job's body that this version of Penstock reads. A worker puts a job of a greater one back
for a newer worker."""


class Media(msgspec.Struct, frozen=True, array_like=True):
    """An image, a recording or a document of a job's conversation, whose bytes are kept beside the job's record."""

    type: str
    """Its media type."""
    size: int
    """Its bytes."""


def version_of(job: Job) -> int:
    """The lowest version whose readers lose nothing of a job."""
    newer = job.adapter or job.message is not None or job.sampling.prompt_logprobs or has_media(job.prompt)
    return 7 if newer or (job.task is not None and job.task.kind in MEDIA_KINDS) else 1


class PastAttempt(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one attempt at a job. Times are Redis milliseconds, 0 for "not yet"."""

    worker: str
    """As `penstock ps` names it; its lease if it has no name."""
    started_ms: int
    ended_ms: int = 0
    tokens: int | None = None
    """Tokens that it generated; None while that is not known: only the job's end says it of each attempt, and not of
    attempts before the job began anew."""
    outcome: str = ""
    """"lost" with its worker, "handed_back" by one that drained, "returned" because its server was away, "preempted"
    for a job of a higher lane, or the state in which it ended the job; "" while it runs."""
    seen_ms: int = 0
    """The last write of a worker that was lost, which is before it was found lost."""

    def holds(self, at_ms: int) -> bool:
        """Whether the attempt was under way then."""
        return self.started_ms <= at_ms <= self.ended_ms


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accepted request, as the queue stores it. Time limits are relative milliseconds, counted by Redis's clock."""

    id: str
    model: str
    tenant: str
    priority: Priority
    prompt: Prompt
    sampling: Sampling = Sampling()
    stream: bool = False
    """Whether a client streams the tokens."""
    reply_to: str = ""
    """The return address: the channel of the API process that holds the socket, or ""."""
    deadline_ms: int | None = None
    """Time limit from acceptance, or `not_before_ms`, to the last token."""
    max_queue_ms: int | None = None
    """Time limit from acceptance, or `not_before_ms`, to the claim."""
    not_before_ms: int | None = None
    """The earliest claim, in Unix milliseconds."""
    delay_ms: int | None = None
    """The same from acceptance on."""
    trace: dict[str, str] = {}
    """W3C trace context (traceparent, tracestate)."""
    metadata: dict[str, str] = {}
    user: str | None = None
    on_disconnect: str = "cancel"
    received_us: int = 0
    """When its API process got the request's first byte, in microseconds of Redis time, within `clock_us`; 0:
    unknown."""
    clock_us: int = 0
    events: str = ""
    """Recipients of its events, as letters: "b" the broker, "w" webhooks, "wr" webhooks that are told the end of a
    response and not of a job; "wh" also its own webhook, "wo" only that one; "": none."""
    webhook: str = ""
    """The webhook that the request names: the name of an endpoint, after a URL and a line break if it names a URL."""
    past: tuple[PastAttempt, ...] = ()
    """Attempts at the job of which this one is a replay, oldest first."""
    response: ResponseForm | None = None
    """What the Responses API shows of the request; None for a job of another endpoint."""
    message: MessageForm | None = None
    """Likewise of the Messages API."""
    tools: Tools | None = None
    """Functions that the answer may call."""
    reasoning: str = ""
    """Not empty: its engine marks the reasoning in its texts. As `Request.reasoning` says."""
    task: Task | None = None
    """What it asks for instead of generated texts."""
    task_form: TaskForm = NO_FORM
    echo: bool = False
    """Whether each text begins with its prompt: a text, or token ids with `prompt_logprobs`."""
    passed: dict[str, Any] = {}
    """As in penstock.engine.Request."""
    adapter: str = ""
    """Of its model, whose lanes, workers, limits and prices are the job's; "": the model alone. From version 7."""
    media: tuple[Media, ...] = ()
    """What is kept beside its record (streaming/jobs/media.py). From version 7."""
    v: int = 1
    """The lowest version whose readers lose nothing of it."""

    @property
    def full_model(self) -> str:
        """The model as answers show it, with its adapter."""
        return full_name(self.model, self.adapter) if self.adapter else self.model

    @property
    def scheduled(self) -> bool:
        """Whether the job waits for a time."""
        return self.not_before_ms is not None or self.delay_ms is not None

    @property
    def parted(self) -> bool:
        """Whether its texts are read in parts (penstock/tools.py), because they may hold calls or reasoning."""
        return self.tools is not None or bool(self.reasoning)

    @property
    def constrained(self) -> bool:
        """Whether its texts must be JSON, or may hold calls: not every engine can continue them."""
        return self.sampling.json_schema is not None or self.tools is not None

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint whose request it is; `POST /v1/jobs` takes requests of some of them."""
        if self.task is not None:
            return TASKS[self.task.kind].endpoint
        if self.response is not None:
            return Endpoint.RESPONSES
        if self.message is not None:
            return Endpoint.MESSAGES
        return Endpoint.CHAT if isinstance(self.prompt, Chat) else Endpoint.COMPLETIONS

    @property
    def choices(self) -> int:
        """How many texts the request asks for."""
        return prompt_count(self.prompt) * self.sampling.n


HINTS = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "store",
                   "prompt_cache_retention", "max_completion_tokens"})  # fmt: skip
"""Passed fields that change no answer: servers that refuse unknown fields need not get them."""


def has_media(prompt: Prompt) -> bool:
    """Whether a turn has images, recordings or documents."""
    return isinstance(prompt, Chat) and any(turn.parts for turn in prompt.turns)


def has_extras(prompt: Prompt, tools: Tools | None) -> bool:
    """Whether a turn, a call or a tool has further fields."""
    if tools is not None and any(tool.extras for tool in tools.offered):
        return True
    turns = prompt.turns if isinstance(prompt, Chat) else ()
    return any(
        turn.extras
        or (turn.calls and any(call.extras for call in turn.calls))
        or (turn.parts and any(len(part) > 2 for part in turn.parts))
        for turn in turns
    )


def bare_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a turn without further fields: its type, and the field of that name."""
    return {name: part[name] for name in ("type", part["type"])}


def without_extras(prompt: Prompt, tools: Tools | None, *, refusals: bool = False) -> tuple[Prompt, Tools | None]:
    """The same without further fields of turns, calls and tools. `refusals`: turns keep what marks them as one."""
    replace = msgspec.structs.replace
    if not has_extras(prompt, tools):
        return prompt, tools
    if tools is not None:
        tools = replace(tools, offered=tuple([replace(tool, extras={}) for tool in tools.offered]))
    if isinstance(prompt, Chat):
        prompt = Chat(tuple([_bare(turn, refusal=refusals and "refusal" in turn.extras) for turn in prompt.turns]))
    return prompt, tools


def _bare(turn: ChatTurn, *, refusal: bool) -> ChatTurn:
    """A turn without further fields of it and of its calls, but for those that mark a refusal."""
    replace = msgspec.structs.replace
    calls = tuple([replace(call, extras={}) for call in turn.calls])
    parts = tuple([bare_part(part) for part in turn.parts])
    extras = {name: turn.extras.get(name) for name in (("content", "refusal") if refusal else ())}
    return replace(turn, calls=calls, extras=extras, parts=parts)


def without_passed(job: Job) -> Job:
    """The same job without what it has for a model's server."""
    if not job.passed and not has_extras(job.prompt, job.tools):
        return job
    prompt, tools = without_extras(job.prompt, job.tools)
    return msgspec.structs.replace(job, prompt=prompt, tools=tools, passed={})


def operation_of(job: Job) -> str:
    """One of telemetry.tracing.OPERATIONS."""
    return operation_name(job.task.kind if job.task is not None else None, is_chat=isinstance(job.prompt, Chat))


NEUTRAL = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "logit_bias": {}, "ignore_eos": False}
"""Further fields of sampling, each with the value that asks an engine without it for nothing."""

MAX_NUMBERS, MAX_FLOATS = 1 << 22, 1 << 21
"""Numbers of the vectors of one answer at most, as base64 and as decimals. Those are 22 MB, and these take an API
process some 2 s of computing, in slices; either is put into its final form at once, in up to 30 ms."""

IN_RESPONSES = {"messages": "input", "response_format": "text.format", "logprobs": "include"}
"""Names that fields of a job have in the Responses API, where they differ."""
IN_MESSAGES = {"response_format": "output_config.format"}
"""Likewise in the Messages API."""


def own_name(job: Job, field: str) -> str:
    """The name of a chat's field at the endpoint of a job."""
    names = IN_MESSAGES if job.message is not None else {} if job.response is None else IN_RESPONSES
    return names.get(field, field)


def own_failure(job: Job, failure: Failure) -> Failure:
    """A failure that names its field as the job's endpoint does."""
    field = failure.param or ""
    return failure if (name := own_name(job, field)) == field else failure.about(name)


def unsupported(job: Job, card: ModelCard) -> Failure | None:
    """Return a failure for the first option of the job that the engine with this card does not support, or None.

    The API checks a job before it accepts it, and the worker again before it runs it: the model's engine may have
    changed.
    """
    task, can = job.task, card.capabilities
    refusals = _of_text(job, can) if task is None else _of_task(job, task, can, card.embedding_size)
    param, what = next(chain(_of_adapter(job, card.adapters), refusals) if job.adapter else refusals, ("", ""))
    if not param:
        return None
    param = own_name(job, param)
    return Failure("invalid_request_error", f"{param}: the engine of {job.model!r} {what}.", 400, param)


def is_continuable(job: Job, capabilities: Capabilities) -> bool:
    """Whether the engine can continue the job's texts after what another attempt generated."""
    if job.tools is not None:
        return capabilities.tool_resume
    return job.sampling.json_schema is None or capabilities.json_resume


Refusal: TypeAlias = tuple[str, str]
"""A field of a request, and what an engine without support for it does, with the remedy."""


def _of_adapter(job: Job, adapters: Sequence[str]) -> Iterator[Refusal]:
    if job.adapter not in adapters:
        yield "model", f"does not serve the adapter {job.adapter!r}; it serves {', '.join(adapters) or 'none'}"
    if job.task is not None and job.task.computes:
        yield "model", f"makes vectors and rankings without adapters: name {job.model!r}"


def _of_task(job: Job, task: Task, can: Capabilities, embedding_size: int) -> Iterator[Refusal]:
    if not getattr(can, TASKS[task.kind].capability):
        yield "model", TASKS[task.kind].lack
    if task.kind in MEDIA_KINDS:
        return
    if task.dimensions is not None and not can.embedding_dimensions:
        yield "dimensions", "makes vectors of one length: leave dimensions out"
    if isinstance(job.prompt, Chat):
        yield from _of_prompt(job, can)
        if has_media(job.prompt):
            yield "messages", "counts the tokens of texts only: the usage of an answer counts those of images too"
    if not isinstance(job.prompt, Inputs):
        return
    groups = job.prompt.groups
    if not can.token_prompts and any(not isinstance(each, str) for group in groups for each in group):
        yield "input", "takes texts only, not token ids"
    size, most = task.dimensions or embedding_size, MAX_NUMBERS if job.task_form.base64 else MAX_FLOATS
    if task.kind == "embed" and sum([len(group) for group in groups]) * size > most:
        remedy = f"send at most {max(1, most // size)} inputs"
        if not job.task_form.base64:
            remedy += f", or {MAX_NUMBERS // size} with encoding_format base64"
        yield "input", f"makes {size} numbers of each, and an answer has at most {most}: {remedy}"


def _of_text(job: Job, can: Capabilities) -> Iterator[Refusal]:
    yield from _of_prompt(job, can)
    yield from _of_tools(job, can)
    yield from _of_sampling(job, can)
    if job.reasoning and job.response is not None and job.sampling.logprobs is not None:
        yield "include", "gives no log-probabilities of an answer with reasoning: leave them out"
    if job.reasoning not in ("", "default") and not can.reasoning_effort:
        param = "reasoning_effort" if job.response is None else "reasoning.effort"
        if job.reasoning != "none":
            yield param, f"cannot be told how much to reason: leave {param} out"
        elif can.reasoning:
            yield param, "cannot be kept from reasoning: leave it out"


def _of_prompt(job: Job, can: Capabilities) -> Iterator[Refusal]:
    turns = job.prompt.turns if isinstance(job.prompt, Chat) else None
    if turns is not None and not can.chat:
        yield "messages", "has no chat template; use /v1/completions"
    if turns is None and not can.text_prompts:
        yield "prompt", "takes conversations only; use /v1/chat/completions"
    if isinstance(job.prompt, Tokens) and not can.token_prompts:
        yield "prompt", "takes text prompts only, not token ids"
    for turn in turns or ():
        for part in turn.parts:
            capability, what = SENSES.get(part["type"], ("", ""))
            # A document is judged once its bytes are known: one that is plain text becomes a part of the conversation.
            if capability and not getattr(can, capability) and (part["type"] != "file" or job.media):
                yield "messages", f"{what}: leave them out, or use a model that GET /v1/models shows with {capability}"


REFERENCE = "media:"
"""What the source of a part begins with, in front of a place in Job.media."""
SOURCES = {"image_url": "url", "input_audio": "data", "file": "file_data"}
"""By the type of a part with media, the field in it that holds the bytes, or says where they are."""
SENSES = {"image_url": ("images", "sees no images"), "input_audio": ("audio", "hears no recordings"),
          "file": ("files", "reads no documents")}  # fmt: skip
"""By the same, the capability of an engine, and what a model without it does."""


def source_of(part: Mapping[str, Any]) -> Any:
    """Where a part with media has its bytes; None: a text, or a file that its id alone names."""
    kind = part["type"]
    return part[kind].get(SOURCES[kind]) if kind in SOURCES else None


def _of_tools(job: Job, can: Capabilities) -> Iterator[Refusal]:
    turns, tools = job.prompt.turns if isinstance(job.prompt, Chat) else (), job.tools
    if not can.tools and any(turn.calls or turn.call_id for turn in turns):
        what = "shows its model no calls of tools; send the text of each call and of its result as messages"
        yield "messages", what
    if tools is None:
        return
    if job.sampling.json_schema is not None and not can.tools_with_schema:
        what = "cannot hold text to a schema where tools are offered, too"
        remedy = "offer a function whose parameters are that schema, and force its call with tool_choice"
        yield "response_format", f"{what}: {remedy}"
    if not tools.forced and not can.tools:
        force = ", or force a call with tool_choice" if can.forced_tools else ""
        yield "tools", f"cannot let its model choose a tool: leave tools out{force}"
    if tools.forced and not can.forced_tools:
        remedy = "use 'auto'" if can.tools else "leave tools out"
        yield "tool_choice", f"cannot force a call of a tool: {remedy}"


def _of_sampling(job: Job, can: Capabilities) -> Iterator[Refusal]:
    sampling = job.sampling
    if sampling.logprobs is not None and sampling.logprobs > can.logprobs:
        if can.logprobs < 0:
            yield "logprobs", "gives no log-probabilities"
        param = "top_logprobs" if isinstance(job.prompt, Chat) else "logprobs"
        yield param, f"gives the log-probabilities of at most {can.logprobs} alternatives per token"
    if sampling.prompt_logprobs and not can.prompt_logprobs:
        what = "max_tokens" if sampling.logprobs is None else "logprobs"
        yield what, f"tells nothing of a prompt alone: leave out echo, or {what}"
    if sampling.json_schema is not None and not can.json_schema:
        yield "response_format", "cannot be held to JSON"
    for name in ("presence_penalty", "frequency_penalty") if not can.penalties else ():
        if getattr(sampling, name):  # zero asks for nothing
            yield name, "knows no penalties"
    if sampling.seed is not None and not can.seed and sampling.temperature != 0:
        yield "seed", "samples without a seed: leave it out, or use temperature 0"
    for name, neutral in NEUTRAL.items():
        if not getattr(can, name) and getattr(sampling, name) not in (None, neutral):
            yield name, f"has no {name}: leave it out"
