"""Request schemas: validates the bodies of chats, completions, jobs and tasks (embeddings, rankings, the tokenizer's
calls), and turns them into jobs.

Unknown fields are ignored and listed in the answer's X-Ignored-Fields. Fields of `queue` outside it are refused, and so
are OpenAI fields that Penstock knows but does not support, so that no client takes an answer for one that used them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec.structs import replace
from pydantic import Field, PrivateAttr, Tag

from api.anthropic.request import MessageCountRequest, MessagesRequest, PromptFields
from api.openai import fields
from api.openai.errors import invalid_request, refuse_if
from api.openai.json_body import read_object, validated
from api.openai.responses.items import HostedItem
from api.openai.responses.request import CountRequest, InputFields, ResponseRequest
from penstock.engine import MAX_LOGPROBS, ChatTurn, Input, MediaKind, ModelCard, Sampling, Task
from streaming.events import EventSubscriptions, with_webhook
from streaming.jobs.job import Chat, Inputs, Job, TaskForm, Text, Tokens, version_of
from streaming.jobs.job import Prompt as JobPrompt
from streaming.jobs.records import MAX_CHOICES
from streaming.order import Priority

Kind: TypeAlias = Literal[
    "chat", "completion", "job", "response", "count", "embedding", "rerank", "tokenize", "detokenize", "message",
    "message_count", "transcription", "translation", "image", "image_edit",
]  # fmt: skip

MAX_N = 8
"""Choices for one prompt; `[api] max_choices_per_request` bounds those of all prompts together."""

MAX_ECHO = 1 << 20
"""Characters of prompts that one request may have repeated, over all choices: the store keeps them with the answers."""

MAX_IGNORED = 20
"""Names listed in X-Ignored-Fields."""

MAX_EXTRAS = 1000
"""Unknown fields examined for X-Ignored-Fields."""


_PLAIN = frozenset({type(None), bool, int, float, str, dict})
"""Types without fields of their own: most values, skipped because isinstance on a pydantic model is slow."""

_HEADER_WORD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,80}")


class CompletionFields(fields.GenerationRequest):
    """Fields shared by chats and completions. Two say the same: `ignore_eos`, and `min_tokens` with the limit."""

    ignore_eos: bool | None = None
    """Go on to the token limit. Refused if the engine cannot, and with an output format or tools."""
    min_tokens: Annotated[int, Field(ge=0, le=1_048_576)] | None = None
    """Must be 0, or the token limit: then it says the same as ignore_eos."""

    max_tokens: fields.TokenLimit | None = None
    """Most tokens of one choice. Null: the engine's default."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    """Choices for each prompt."""
    stop: fields.Stop | None = None
    """A choice ends before the first of these texts."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Repeats the sampling."""
    response_format: fields.ResponseFormat | None = None
    """Plain text, any JSON object, or JSON of a schema."""
    stream_options: fields.StreamOptions | None = None
    """What the stream holds beside the tokens."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """The schema that constrains the answer; None for plain text."""
        return self.response_format.schema_wanted if self.response_format else None

    @property
    def known_to_servers(self) -> dict[str, Any]:
        return super().known_to_servers | fields.named_format(self.response_format and self.response_format.json_schema)

    @property
    def sampler_fields(self) -> dict[str, Any]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return super().sampler_fields | {
            "max_tokens": self.token_limit,
            "seed": self.seed,
            "n": self.n or 1,
            "stop": tuple(stop for stop in stops if stop),
            "json_schema": self.schema_asked,
            "ignore_eos": bool(self.ignore_eos or self.min_tokens),
        }

    def check(self) -> None:
        super().check()
        what = "must be 0, or equal the token limit. Leave it out"
        refuse_if(self.min_tokens and self.min_tokens != self.token_limit, "min_tokens", what)
        name = "ignore_eos" if self.ignore_eos else "min_tokens"
        what = "cannot be combined with a response_format, whose JSON has its own end"
        refuse_if((self.ignore_eos or self.min_tokens) and self.schema_asked is not None, name, what)


class ChatRequest(fields.OfferedTools, CompletionFields):
    """The body of POST /v1/chat/completions."""

    REFUSED: ClassVar[fields.Refused] = {**fields.UNSUPPORTED, **fields.CONSTRAINTS, **fields.COMPLETION_ONLY}

    messages: fields.Messages
    """The conversation, oldest turn first."""
    tools: Annotated[list[fields.AnyChatTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call. Refused if it knows none. Other tools are ignored."""
    max_completion_tokens: fields.TokenLimit | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Log-probabilities of the tokens. Refused if the engine has none."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Likeliest alternatives of each token; needs logprobs."""

    reasoning_effort: fields.Effort | None = None
    """How much the model reasons before it answers. Refused if it cannot be told that."""

    def check(self) -> None:
        super().check()
        older = (None, self.max_completion_tokens)
        what = "must not differ from max_tokens, its older name; give one of them"
        refuse_if(self.max_completion_tokens and self.max_tokens not in older, "max_completion_tokens", what)
        refuse_if(self.top_logprobs and not self.logprobs, "top_logprobs", "needs logprobs: true")

    @property
    def prompt_asked(self) -> JobPrompt:
        return Chat(tuple([message.turn for message in self.messages]))

    @property
    def sampler_fields(self) -> dict[str, Any]:
        return super().sampler_fields | {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def known_to_servers(self) -> dict[str, Any]:
        named = {"max_completion_tokens": self.max_completion_tokens if self.max_tokens is None else None}
        return super().known_to_servers | named

    @property
    def effort(self) -> fields.Effort | None:
        return self.reasoning_effort


class CompletionRequest(CompletionFields):
    """The body of POST /v1/completions."""

    REFUSED: ClassVar[fields.Refused] = {**fields.UNSUPPORTED, **fields.CONSTRAINTS, **fields.CHAT_ONLY}

    prompt: fields.Prompt
    """One text or several, or their token ids; each has its own choices."""
    max_tokens: Annotated[int, Field(ge=0, le=1_048_576)] | None = None
    """Most tokens of one choice; 0, with echo alone: only the prompt is shown. Null: the engine's default."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """Alternatives of each token with log-probabilities. Refused if the engine has none."""
    echo: bool | None = False
    """Begin each text with its prompt, and log-probabilities with those of its tokens. Refused with an output format,
    and with token ids that have no logprobs."""

    @property
    def _shows_prompt(self) -> bool:
        """Whether an engine must tell something of the prompt."""
        return bool(self.echo) and (self.logprobs is not None or self.max_tokens == 0)

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        return super().particulars(card) | {"echo": bool(self.echo)}

    def check(self) -> None:
        super().check()
        what = "must be 1 or more, unless echo is true: there would be nothing to show"
        refuse_if(self.max_tokens == 0 and not self.echo, "max_tokens", what)
        if not self.echo:
            return
        texts = fields.inputs_of(self.prompt)
        what = "needs texts, or logprobs: only with these is the text of token ids known. Leave it out"
        refuse_if(self.logprobs is None and not isinstance(texts[0], str), "echo", what)
        what = "cannot be combined with response_format, which a prompt has not. Leave one of them out"
        refuse_if(self.schema_asked is not None, "echo", what)
        size = sum(map(len, texts)) * (self.n or 1)
        what = f"would repeat {size:,} characters or token ids, at most {MAX_ECHO:,}"
        what += ". Put the prompts in front of the answers yourself"
        refuse_if(size > MAX_ECHO, "echo", what)

    @property
    def prompt_asked(self) -> JobPrompt:
        found = tuple(fields.inputs_of(self.prompt))
        return Text(found) if isinstance(found[0], str) else Tokens(found)

    @property
    def prompts(self) -> int:
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    @property
    def sampler_fields(self) -> dict[str, Any]:
        return super().sampler_fields | {"logprobs": self.logprobs, "prompt_logprobs": self._shows_prompt}


class ChatJobRequest(fields.OfJob, ChatRequest):
    """The body of POST /v1/jobs for a chat: by default in the standard lane, and it continues on a disconnect."""

    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    """What the other fields describe: a chat (with `messages`) or a completion (with `prompt`)."""


class CompletionJobRequest(fields.OfJob, CompletionRequest):
    """The body of POST /v1/jobs for a completion."""

    endpoint: Literal["/v1/completions"]
    """What the other fields describe: a chat (with `messages`) or a completion (with `prompt`)."""


# --- tasks -----------------------------------------------------------------------------------------------------------

GROUP_INPUTS = 64
"""Inputs that an engine computes at once; another worker computes only the groups that have no answer."""
MAX_DIMENSIONS = 65_536


def groups_of(inputs: list[Input], first: tuple[Input, ...] = ()) -> Inputs:
    """Inputs in groups, each of which begins with `first`."""
    starts = range(0, len(inputs), GROUP_INPUTS)
    return Inputs(tuple([first + tuple(inputs[start : start + GROUP_INPUTS]) for start in starts]))


class TaskRequest(fields.QueuedRequest):
    """A request for something else than generated texts."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=1, temperature=0)  # it has no tokens; equal requests have equal answers


class EmbeddingRequest(TaskRequest):
    """The body of POST /v1/embeddings."""

    input: fields.Prompt
    """One text or several, or their token ids; at most 2,048."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: of little-endian float32. Null: `float`."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Numbers of each vector. Refused if the model makes vectors of one length."""

    @property
    def prompt_asked(self) -> JobPrompt:
        return groups_of(fields.inputs_of(self.input))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = TaskForm(base64=self.encoding_format == "base64")
        return {"task": Task(kind="embed", dimensions=self.dimensions), "task_form": form}


class TextDocument(fields.StrictBody):
    """A document to rank, as an object."""

    text: fields.PromptText
    """Its text."""


Document: TypeAlias = Annotated[
    Annotated[fields.PromptText, Tag("<str>")] | Annotated[TextDocument, Tag("<dict>")],
    fields.by_shape(fields.shape, "a string or an object with text"),
]


class RerankRequest(TaskRequest):
    """The body of POST /v1/rerank."""

    query: fields.PromptText
    """What is asked."""
    documents: Annotated[list[Document], Field(min_length=1, max_length=fields.MAX_INPUTS, fail_fast=True)]
    """Texts, or objects with `text`; at most 2,048."""
    top_n: Annotated[int, Field(ge=0, le=1_048_576)] | None = None
    """Only the best so many. Null or 0: all."""
    return_documents: bool | None = False
    """Repeat the text of each document."""

    @property
    def prompt_asked(self) -> JobPrompt:
        texts = [each if isinstance(each, str) else each.text for each in self.documents]
        return groups_of([*texts], (self.query,))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = TaskForm(top_n=self.top_n or None, documents=bool(self.return_documents))
        return {"task": Task(kind="rerank"), "task_form": form}


class FormRequest(TaskRequest):
    """A request for a transcript or for images, most fields of which only the model's server reads."""

    REFUSED: ClassVar[fields.Refused] = {"stream": ((False, "false"), "The answer comes in one piece.")}
    KIND: ClassVar[MediaKind]

    prompt: Annotated[str, Field(max_length=32_000)] | None = None
    """What the recording is about, or what the image shows."""
    _files: tuple[dict[str, Any], ...] = PrivateAttr(default=())

    def attach(self, files: Iterable[dict[str, Any]]) -> None:
        """Set its files, as parts of a turn. Raises ApiError (400)."""
        self._files = tuple(files)

    @property
    def prompt_asked(self) -> JobPrompt:
        text = {"type": "text", "text": self.prompt or ""}
        return Chat((ChatTurn("user", self.prompt or "", parts=(text, *self._files) if self._files else ()),))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        own = self.__class__.model_fields.keys() - fields.QueuedRequest.model_fields.keys() - {"prompt", "endpoint"}
        options = {name: value for name in sorted(own) if (value := getattr(self, name)) is not None}
        return {"task": Task(kind=self.KIND, options=options)}


class TranslationRequest(FormRequest):
    """The form of POST /v1/audio/translations."""

    KIND: ClassVar[MediaKind] = "translate"

    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    """Null: `json`."""
    temperature: Annotated[float, Field(ge=0, le=1, strict=False, allow_inf_nan=False)] | None = None
    """Null: the server's."""


class TranscriptionRequest(TranslationRequest):
    """The form of POST /v1/audio/transcriptions."""

    KIND: ClassVar[MediaKind] = "transcribe"

    language: Annotated[str, Field(max_length=32)] | None = None
    """Of the recording, such as en."""


class ImageRequest(FormRequest):
    """The body of POST /v1/images/generations."""

    KIND: ClassVar[MediaKind] = "draw"

    prompt: Annotated[str, Field(min_length=1, max_length=32_000)]
    """What the image shows."""
    n: Annotated[int, Field(ge=1, le=10)] | None = None
    """How many. All of them together may have 8 MiB."""
    size: Annotated[str, Field(max_length=32)] | None = None
    """Such as 1024x1024."""
    quality: Annotated[str, Field(max_length=32)] | None = None
    """As the server names it."""
    background: Annotated[str, Field(max_length=32)] | None = None
    """As the server names it."""
    response_format: Literal["url", "b64_json"] | None = None
    """Null: the server's."""


class EditRequest(ImageRequest):
    """The form of POST /v1/images/edits."""

    KIND: ClassVar[MediaKind] = "edit"

    n: Annotated[int, Field(ge=1, le=10, strict=False)] | None = None
    """How many. All of them together may have 8 MiB."""


class ImageJobRequest(fields.OfJob, ImageRequest):
    """The body of POST /v1/jobs for images."""

    endpoint: Literal["/v1/images/generations"]
    """What the other fields describe."""


class EmbeddingJobRequest(fields.OfJob, EmbeddingRequest):
    """The body of POST /v1/jobs for embeddings."""

    endpoint: Literal["/v1/embeddings"]
    """What the other fields describe."""


class RerankJobRequest(fields.OfJob, RerankRequest):
    """The body of POST /v1/jobs for a ranking."""

    endpoint: Literal["/v1/rerank"]
    """What the other fields describe."""


class TokenizeRequest(TaskRequest):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    """A text. Or give `messages`."""
    messages: fields.Messages | None = None
    """A conversation, which the model's template renders. Or give `prompt`."""
    add_special_tokens: bool | None = None
    """Count what the tokenizer adds to a text, such as its first token. Null: true."""
    add_generation_prompt: bool | None = True
    """Count the begin of the answer's turn at the end of a conversation."""
    return_token_strs: bool | None = None
    """Refused if true: use `/detokenize` for the text of each token."""

    def check(self) -> None:
        what = "is not supported here: use /detokenize for the text of each token"
        refuse_if(self.return_token_strs, "return_token_strs", what)
        both = self.messages is not None and self.prompt is not None
        refuse_if(both, "messages", "must not be given together with prompt")

    @property
    def prompt_asked(self) -> JobPrompt:
        """Raises ApiError (400)."""
        if self.messages is not None:
            return Chat(tuple([message.turn for message in self.messages]))
        refuse_if(self.prompt is None, "prompt", "is required, or messages")
        return Text((self.prompt or "",))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        special, begun = self.add_special_tokens is not False, self.add_generation_prompt is not False
        return {"task": Task(kind="tokenize", special_tokens=special, generation_prompt=begun)}


class DetokenizeRequest(TaskRequest):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
    """Token ids of the model."""

    @property
    def prompt_asked(self) -> JobPrompt:
        return Tokens((tuple(self.tokens),))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        return {"task": Task(kind="detokenize")}


# --- all of them -----------------------------------------------------------------------------------------------------

Request: TypeAlias = ChatRequest | CompletionRequest | ResponseRequest | CountRequest | PromptFields | TaskRequest

JOB_MODELS: Mapping[str, type[Request]] = {
    "/v1/chat/completions": ChatJobRequest,
    "/v1/completions": CompletionJobRequest,
    "/v1/embeddings": EmbeddingJobRequest,
    "/v1/rerank": RerankJobRequest,
    "/v1/images/generations": ImageJobRequest,
}
"""What a job may be, by its `endpoint`."""


MODELS: Mapping[str, type[Request]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "response": ResponseRequest,
    "count": CountRequest,
    "message": MessagesRequest,
    "message_count": MessageCountRequest,
    "embedding": EmbeddingRequest,
    "rerank": RerankRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "transcription": TranscriptionRequest,
    "translation": TranslationRequest,
    "image": ImageRequest,
    "image_edit": EditRequest,
}


def parse(kind: Kind, body: bytes, default_model: str = "") -> Request:
    """Parse and validate a body. Raises ApiError (400) that names the field, never its value.

    Args:
        default_model: of a body without `model`; "": it is required.
    """
    asked = read_object(body)
    if default_model and asked.get("model") is None:
        asked["model"] = default_model
    model = _model(kind, asked)
    fields.refuse(asked, model.REFUSED)
    request = validated(model, asked)
    request.check()
    if request.tools_asked is not None:
        sampling, what = request.sampling, "cannot be combined with tools here. Leave one of them out"
        refuse_if(sampling.logprobs is not None, "include" if isinstance(request, InputFields) else "logprobs", what)
        refuse_if(sampling.ignore_eos, "ignore_eos", what)
    return request


def check_choices(request: Request, max_choices: int) -> None:
    """Refuse a request that asks for more than `max_choices` choices. Raises ApiError (400)."""
    n = (request.n or 1) if isinstance(request, CompletionFields) else 1
    prompts = request.prompts if isinstance(request, CompletionRequest) else 1
    max_choices = min(max_choices, MAX_CHOICES)
    if n * prompts <= max_choices:
        return
    bound = f"one request may have at most {max_choices:,} (setting api.max_choices_per_request)"
    if prompts == 1:
        raise invalid_request(f"n asks for {n} choices, but {bound}. Lower n.", "n")
    asked = f"prompt and n ask for {n * prompts:,} choices ({prompts} prompts, n {n})"
    raise invalid_request(f"{asked}, but {bound}. Send the prompts in several requests, or lower n.", "prompt")


def recipients(subscriptions: EventSubscriptions, tenant: str, asked: Request, *, waits: bool) -> tuple[str, str]:
    """Return who gets the events of a job, and the webhook that the request names, as Job has them: nobody else, if its
    client waits for the answer. Raises ApiError (400)."""
    if waits and asked.queue.scheduled:
        what = "queue.not_before and queue.delay_ms are for clients that do not wait for the answer."
        fix = "Send the request to POST /v1/jobs, with Prefer: respond-async, or as a response with background."
        raise invalid_request(f"{what} {fix}", "queue.not_before")
    if isinstance(asked, ResponseRequest):
        letters = subscriptions.of(tenant, "response") if asked.background else ""
    else:
        letters = "" if waits else subscriptions.of(tenant, "job")
    if not asked.queue.webhook:
        return letters, ""
    try:
        webhook = subscriptions.webhook(tenant, asked.queue.webhook)
    except ValueError as error:
        raise invalid_request(f"queue.webhook {error}.", "queue.webhook") from None
    return with_webhook(letters, response=isinstance(asked, ResponseRequest)), webhook


def to_job(
    request: Request,
    *,
    tenant: str,
    ceiling: Priority,
    job_id: str = "",
    reply_to: str = "",
    trace: dict[str, str] | None = None,
    events: str = "",
    webhook: str = "",
    card: ModelCard | None = None,
) -> Job:
    """Build the job of a request, in the requested lane but not above `ceiling`. `card`: of its model, if known."""
    queue, shown = request.queue, isinstance(request, InputFields)
    prompt, tools = fields.passed_parts(request.prompt_asked, request.tools_asked, card, shown=shown)
    sampling, passed = request.sampling, fields.passed_fields(request, card)
    if tools is not None and tools.forced and sampling.json_schema is not None:
        sampling = replace(sampling, json_schema=None)  # a forced call has no text that a schema could hold
    tier = fields.TIERS.get(request.service_tier or "auto")
    if tier is not None and clamp(tier, ceiling) is not tier:
        passed.pop("service_tier", None)  # a tier above the key's lanes is not bought elsewhere
    job = Job(
        id=job_id,
        model=request.model,
        tenant=tenant,
        priority=clamp(request.lane, ceiling),
        prompt=prompt,
        sampling=sampling,
        reply_to=reply_to,
        deadline_ms=queue.deadline_ms,
        max_queue_ms=queue.max_queue_ms,
        not_before_ms=queue.not_before_ms,
        delay_ms=queue.delay_ms,
        trace=trace or {},
        metadata=request.metadata or {},
        user=request.end_user,
        on_disconnect=request.on_disconnect,
        events=events,
        webhook=webhook,
        tools=tools,
        passed=passed,
        adapter=request.adapter,
        **request.particulars(card),
    )
    return replace(job, v=version_of(job))


def clamp(lane: Priority, ceiling: Priority) -> Priority:
    """Return the lower of the two lanes."""
    return lane if lane.rank >= ceiling.rank else ceiling


def ignored_fields(request: fields.StrictBody, card: ModelCard | None = None) -> list[str]:
    """Return the names of ignored fields that fit into a header: the first MAX_IGNORED, unusual names left out.

    `card`: of the model, if one is known: what it passes on is not ignored.
    """
    passing = card if card is not None and card.capabilities.passes_fields else None
    names: dict[str, None] = {}  # an ordered set
    for name in islice(_extras(request, "", passing), MAX_EXTRAS):
        if name == "modalities" and (request.model_extra or {}).get(name) == ["text"]:
            continue
        if name not in request.REFUSED and _HEADER_WORD.fullmatch(name):
            names[name] = None
        if len(names) == MAX_IGNORED:
            break
    return list(names)


def _extras(part: fields.StrictBody, path: str, passing: ModelCard | None) -> Iterator[str]:
    if isinstance(part, (fields.HostedTool, HostedItem)):  # a union is made anew at each call
        yield f"{path}{part.type}"
        return
    if part.model_extra:
        top = passing if isinstance(part, fields.QueuedRequest) and part.OPEN else None
        inner = passing is not None and part.PASSED and fields.ALL not in passing.withheld
        for name in part.model_extra:
            if not (name in part.used or fields.passes(name, top) or (inner and fields.passable(name))):
                yield path + name
    for name in part.ignored:
        if name != "verbosity" or not fields.passes(name, passing):
            yield path + name
    sent = part.model_fields_set
    for name, value in vars(part).items():  # in the order of the class
        if type(value) in _PLAIN or name not in sent:
            continue
        if isinstance(value, fields.StrictBody):
            yield from _extras(value, f"{path}{name}.", passing)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, fields.StrictBody):
                    yield from _extras(item, f"{path}{name}[].", passing)


def _model(kind: Kind, asked: Mapping[str, Any]) -> type[Request]:
    if kind == "job":
        endpoint = asked.get("endpoint", "/v1/chat/completions")
        if not isinstance(endpoint, str) or endpoint not in JOB_MODELS:
            endpoints = ", ".join(map(repr, JOB_MODELS))
            raise invalid_request(f"endpoint must be one of {endpoints}.", "endpoint")
        return JOB_MODELS[endpoint]
    return MODELS[kind]
