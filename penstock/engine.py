"""Engine protocol: the calls a worker makes to an engine, and the values that pass between them.

An engine generates texts. It does not know jobs, lanes, leases, attempts or Redis: those are the worker's. This module
needs msgspec, and of Penstock only penstock/tools.py and penstock/extras.py.

ChatTurn, Sampling, Task, Logprob, Failure, Capabilities and ModelCard are also parts of the messages between processes:
the rules for changing a message (streaming/jobs) hold for their fields.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

import msgspec

from penstock.extras import Extras
from penstock.tools import ToolCall, Tools

MAX_LOGPROBS = 20
"""The most alternatives per token that OpenAI's API can ask for."""
CHARACTERS_PER_TOKEN = 4
"""Estimate of a text's tokens where no tokenizer is at hand."""


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of a chat, its content already flattened to text."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    """The calls of a turn of the assistant."""
    call_id: str = ""
    """The call that a turn of a tool answers."""
    extras: dict[str, Any] = {}
    """Further fields of the message, and its `content` if that has parts with further fields."""
    parts: tuple[dict[str, Any], ...] = ()
    """All of its content as parts of OpenAI's chats, if one of them is an image, a recording or a document; `content`
    is the text of them. Only an engine with the capability gets any, with their bytes as OpenAI's servers take them."""

    @property
    def shown(self) -> dict[str, Any]:
        """As a message of OpenAI's chats."""
        message: dict[str, Any] = {"role": self.role, "content": self.parts or self.content}
        if self.calls:
            message |= {
                "content": self.parts or self.content or None,
                "tool_calls": [call.shown for call in self.calls],
            }
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message | self.extras if self.extras else message


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample. None means "the engine's own default"."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: off. k >= 0: the log-probability of each token and of its k best alternatives."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    json_schema: dict[str, Any] | None = None
    """The output must be JSON of this schema; `{}` means any JSON object."""
    top_k: int | None = None
    """Only the k likeliest tokens are sampled; 0: all."""
    min_p: float | None = None
    """Only tokens at least this likely, relative to the likeliest, are sampled."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens that prompt or answer have already; 1: off."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of tokens, by their ids; -100 bans a token, 100 forces it."""
    ignore_eos: bool = False
    """The model may not end the text: it has as many tokens as the limit says."""
    prompt_logprobs: bool = False
    """The first piece has no token, but a row for each token of the prompt, unless `logprobs` is None. Only then may
    max_tokens be 0."""


MediaKind: TypeAlias = Literal["transcribe", "translate", "draw", "edit"]
TaskKind: TypeAlias = Literal["embed", "rerank", "tokenize", "detokenize"] | MediaKind
MEDIA_KINDS: tuple[str, ...] = get_args(MediaKind)
Input: TypeAlias = str | tuple[int, ...]
"""A text, or its token ids."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request asks for instead of a generated text. Its answer is one piece without tokens, whose text is:

    - embed: the vector of each input, as base64 of little-endian float32, separated by commas;
    - rerank: a JSON list with the score of each input after the first, which is the query; higher is more relevant;
    - tokenize: a JSON object with `tokens`, the prompt's token ids, and `max_model_len`, the context in tokens;
    - detokenize: the text of the prompt, which is token ids;
    - MEDIA_KINDS (transcripts of recordings, and images): the reply of a server with OpenAI's API. The prompt is a
      conversation of one turn, with the text and the files of the request.
    """

    kind: TaskKind
    dimensions: int | None = None
    """Of each vector; None: as the model has them. Only an engine with `embedding_dimensions` gets others."""
    special_tokens: bool = True
    """Whether the tokens that the model's tokenizer adds to a text are among those of `tokenize`."""
    generation_prompt: bool = True
    """Whether the begin of the assistant's turn is at the end of a conversation that is tokenized."""

    options: dict[str, Any] = {}
    """Further fields of a request of MEDIA_KINDS."""

    @property
    def computes(self) -> bool:
        """Whether the model must compute; else its tokenizer alone answers."""
        return self.kind not in ("tokenize", "detokenize")


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability and its best alternatives as (token text, log-probability). A token that is only part
    of a character is written as `token_text` does. The first token of a prompt has NaN: it follows nothing."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


_BYTES = re.compile(r"bytes:(?:[^\\]|\\x[0-9a-f]{2})*\\x[0-9a-f]{2}(?:[^\\]|\\x[0-9a-f]{2})*", re.DOTALL)


def token_text(data: bytes) -> str:
    """The text of a token; one that is only part of a character is written with its bytes, as OpenAI does:
    `bytes:\\xf0\\x9f`."""
    with suppress(UnicodeDecodeError):
        text = data.decode()
        if "\ufffd" not in text and _BYTES.fullmatch(text) is None:
            return text
    return "bytes:" + "".join([chr(each) if 32 <= each < 127 and each != 92 else f"\\x{each:02x}" for each in data])


def token_bytes(text: str) -> bytes:
    """The bytes of a token as `token_text` writes it."""
    if not text.startswith("bytes:") or _BYTES.fullmatch(text) is None:
        return text.encode()
    return text.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a job did not complete, in words for its owner. `status` is the HTTP code it stands for."""

    code: str
    message: str
    status: int = 500
    param: str | None = None
    """The field that it is about. A message that names it begins with it."""

    def about(self, param: str, named: str = "") -> Failure:
        """The same failure of another field, which its message calls `named`, or `param`."""
        start = f"{self.param}: "
        if not self.message.startswith(start):
            return msgspec.structs.replace(self, param=param)
        message = f"{named or param}: {self.message.removeprefix(start)}"
        return msgspec.structs.replace(self, message=message, param=param)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Which known request fields an engine honours. What it cannot do is refused with 400, never ignored."""

    chat: bool = True
    logprobs: int = 0
    """The most alternatives per token; -1: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Whether it tells the log-probabilities of a prompt's tokens, too."""
    json_schema: bool = False
    json_resume: bool = False
    """Whether the engine can continue JSON output that an earlier attempt began: it restores the grammar's state."""
    penalties: bool = False
    """presence_penalty and frequency_penalty."""
    seed: bool = True
    """Whether a sampled answer with a seed is the same each time, as far as the engine can."""
    token_prompts: bool = False
    text_prompts: bool = True
    """Whether it takes raw prompts, and not conversations alone."""
    tools: bool = False
    """Whether the model sees functions and earlier calls in a conversation, and may itself choose to call one."""
    forced_tools: bool = False
    """Whether the engine can force a call, of any function or of a named one."""
    tool_resume: bool = False
    """Whether the engine can continue an answer to a request with tools that an earlier attempt began."""
    reattaches: bool = False
    """Whether an answer may go on elsewhere after the loss of its worker, JSON and calls of tools too, where the
    engine then finds it. Its `restart_reason` (ContinuationJudge) judges each request."""
    tools_with_schema: bool = False
    """Whether an answer may be calls that the model chooses, or else JSON of a schema."""
    top_k: bool = False
    min_p: bool = False
    repetition_penalty: bool = False
    logit_bias: bool = False
    ignore_eos: bool = False
    reasoning: bool = False
    """Whether the model reasons before it answers, and the engine marks that in its text."""
    reasoning_effort: bool = False
    """Whether a request can say how much it reasons, also that it does not."""
    embed: bool = False
    """Vectors of texts (`Task`); of token ids too, if the engine has `token_prompts`."""
    embedding_dimensions: bool = False
    """Whether a request can choose the length of its vectors."""
    rerank: bool = False
    tokenize: bool = False
    """Token ids of a prompt, and the text of token ids."""
    passes_fields: bool = False
    """Whether fields that nobody here reads reach an engine or a server that may know them."""
    tokenize_chats: bool = False
    """Whether `tokenize` gives the ids of a conversation without functions from which its answer is computed."""
    images: bool = False
    """Whether the model sees the images of a conversation."""
    audio: bool = False
    """Whether it hears recordings."""
    files: bool = False
    """Whether it reads documents, such as PDF."""
    transcribe: bool = False
    """Transcripts of recordings, also in English."""
    draw: bool = False
    """Images, from a text or from images."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found when it loaded a model. It stays in Redis, so a sleeping model is still described."""

    name: str
    engine: str
    context: int
    """Longest prompt + completion, in tokens."""
    max_output: int
    capabilities: Capabilities
    created: int
    """Unix seconds of the first load."""
    default_output: int = 0
    """Tokens of an answer whose request names no limit, at most; 0: max_output."""
    embedding_size: int = 0
    """Numbers of one vector; 0: not known, or it makes none."""
    withheld: tuple[str, ...] = ()
    """Names of fields of a request that are not passed on, although others are; "*": all but those it `takes`."""
    takes: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """Those that the engine serves, of the adapters in the model's settings."""
    special_tokens: dict[str, str] = {}
    """Texts of special tokens by their roles, such as `eos_token`."""


RETURNED = "returned"
"""Finish of a request that the engine gives back unfinished, because what computes it is away: the worker puts the job
back, and it counts as no attempt."""

NEUTRAL_PRIORITY = 0.5
"""The priority of a request that is neither more nor less urgent than others."""


class Request(msgspec.Struct, frozen=True):
    """One text to generate. `id` is unique among live requests, and opaque to the engine but for its begin: what comes
    before a `/` is the same for all of one job."""

    id: str
    prompt: Sequence[ChatTurn] | str | Sequence[int]
    """A conversation (the engine renders it with its chat template), a raw text, or token ids."""
    sampling: Sampling
    """`n` and prompt lists are already expanded: one request is one text."""
    past: Sequence[tuple[str, Sequence[int], int]] = ()
    """What earlier attempts generated: (text, known token ids, token count) each, oldest first. The engine continues
    after it and never emits it again; `sampling.max_tokens` still counts from the beginning. Together with a JSON
    schema it is passed only to an engine with the capability `json_resume` or `reattaches`, and with tools only to one
    with `tool_resume` or `reattaches`."""
    tenant: str = ""
    """Owner of the request: an engine never reuses the cached prompts of one tenant for another."""
    priority: float = NEUTRAL_PRIORITY
    """From 0 to 1, higher first: a hint for engines that let requests wait inside them. The worker sets it by lane."""
    tools: Tools | None = None
    """Functions that the answer may call, in the form that penstock/tools.py describes. Only an engine with one of the
    capabilities `tools` and `forced_tools` gets them."""
    served_by: str = ""
    """The model that generated `past`, if the engine said that it is another one than asked for (`Piece.served_by`)."""
    reasoning: str = ""
    """Not empty: the engine marks reasoning as penstock/tools.py describes. How much the model shall reason, in the
    words of OpenAI's reasoning_effort, or "default"."""
    task: Task | None = None
    """Asks for something else than a text; only an engine with the capability gets it."""
    inputs: Sequence[Input] = ()
    """Of a task on several texts, whose `prompt` is empty: those to embed, or a query and the documents to rank."""
    text_id: str = ""
    """The same each time this text is submitted, where `id` is another one; "": not told. Opaque to the engine."""
    trace: str = ""
    """W3C `traceparent` of the request, for calls that the engine makes to other servers; "": it has none."""
    begun_by: str = ""
    """The run that generated the first row of `past`, or this one: the same for all that continue one answer, another
    once the job begins again; "": not told. Opaque to the engine."""
    passed: Mapping[str, Any] = MappingProxyType({})
    """Fields of the request that nobody here reads, for a model's server; only an engine with `passes_fields` gets
    them, and further fields of turns, calls and tools."""
    adapter: str = ""
    """One of the engine's `adapters`; "": the model alone. An engine never reuses what is cached with one adapter for
    another."""

    @property
    def turns(self) -> Sequence[ChatTurn]:
        """Of a conversation; () of any other prompt."""
        is_chat = not isinstance(self.prompt, str) and self.prompt and isinstance(self.prompt[0], ChatTurn)
        return cast("Sequence[ChatTurn]", self.prompt) if is_chat else ()

    @property
    def has_media(self) -> bool:
        """Whether its conversation has images, recordings or documents."""
        return any(turn.parts for turn in self.turns)

    @property
    def ids(self) -> Sequence[int]:
        """Of a prompt of token ids; () of any other."""
        return () if isinstance(self.prompt, str) or self.turns else cast("Sequence[int]", self.prompt)

    @property
    def past_tokens(self) -> int:
        """How many tokens of this text earlier attempts generated."""
        return sum(count for _, _, count in self.past)

    @property
    def past_text(self) -> str:
        """The text that earlier attempts generated."""
        return "".join(text for text, _, _ in self.past)


class EngineTimes(msgspec.Struct, frozen=True, gc=False):
    """An engine's timestamps of one request, by `time.monotonic`; 0.0: unknown, and the worker's own stamp is used."""

    scheduled: float = 0.0
    """When it got a slot and its prefill began."""
    first: float = 0.0
    last: float = 0.0
    """When its first and its last token came."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The output of one request in one step. `finish` or `failure` ends the request: nothing follows for that id.

    Created once a token: a frozen dataclass would cost ten times as much, and its `replace` fifty times.
    """

    id: str
    text: str = ""
    ids: tuple[int, ...] = ()
    n: int = 0
    finish: str = ""
    """"stop" | "length" | "content_filter" | "cancelled" | RETURNED."""
    prompt_tokens: int = 0
    """Set in the first piece that has tokens and in the last one, else 0: so the log has it if the worker is lost."""
    cached_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    failure: Failure | None = None
    """Why this request alone failed; the engine keeps running."""
    times: EngineTimes | None = None
    """Set in the last piece, if the engine measures them."""
    served_by: str = ""
    """Set in the first piece of an answer that another model gives than the one asked for: that model's name."""
    extras: Extras | None = None
    """What the model's server says beside it (penstock/extras.py)."""

    @property
    def last(self) -> bool:
        return bool(self.finish) or self.failure is not None


Step: TypeAlias = Callable[[list[Piece]], None]
"""Called on the event loop with everything one engine step produced. Must not block."""


class Refused(Exception):
    """Raised by check and submit: the request can never run here (too long, unknown option); a client error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class EngineDead(Exception):
    """Raised when the engine as a whole has failed: the worker process must exit and be restarted."""


class Stats(msgspec.Struct, frozen=True):
    """An engine's current load."""

    slots: int
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens; 0: not limited beyond the slots."""
    kv_used: int = 0
    kv_pinned: int = 0
    """Tokens of the KV cache that no request may use, e.g. prefixes that are kept."""
    evicts: bool = False
    """Whether the engine takes requests that may not fit into its KV cache, and evicts or pauses some when they do not
    (MAX_UTILIZATION). If not, it keeps each request's longest answer free before it begins."""
    evictions: int = 0
    """How often the engine has evicted or paused a request since it started."""
    miscounted: int = 0
    """Complete answers since it started whose counts of tokens could not be true; they are counted as without."""
    steps: int = 0
    accepts: bool = True
    """False while the engine can begin no request, because what computes them is away: its worker claims nothing."""
    away: tuple[str, ...] = ()
    """The servers that are away, each with the reason, if `accepts` is False for that; for people."""
    away_s: float = 0.0
    """For how long no server has been there."""
    adapters: tuple[str, ...] = ()
    """The adapters that are loaded: a worker prefers jobs of these."""
    swaps: int = 0
    """How often an adapter was loaded for a request since it started."""
    extra: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`ok` False means the process should be restarted, `reason` says why."""

    ok: bool
    reason: str = ""
    error: BaseException | None = field(default=None, compare=False)
    """What the engine died of, if it is known: the worker logs its traceback."""


def task_health(task: asyncio.Task[Any]) -> EngineHealth:
    """Health of an engine that steps in one task: well until the task ends, which must not happen before `stop`."""
    if not task.done():
        return EngineHealth(ok=True)
    error = None if task.cancelled() else task.exception()
    cause = f": {type(error).__name__}: {error}" if error else ""
    return EngineHealth(ok=False, reason=f"its task ended{cause}", error=error)


@runtime_checkable
class ContinuationJudge(Protocol):
    """An engine that cannot continue every request after its past."""

    def restart_reason(self, request: Request) -> str:
        """Why the job must begin again, although a part of its answer is known; "" if the engine can continue it."""


@runtime_checkable
class Leaver(Protocol):
    """An engine whose requests may go on elsewhere without it."""

    def leave(self, request_id: str) -> None:
        """As `cancel`, but the answer may go on, since another worker will continue it."""


@runtime_checkable
class BudgetSharer(Protocol):
    """An engine whose requests run on servers that other workers of the model use too."""

    def share(self, workers: int) -> None:
        """So many workers share the servers, this one included."""


class Engine(Protocol):
    """Used from one event loop in one process. docs/engines.md explains how to write one; examples/engine is a small
    one."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model and begin stepping; report phases ("loading weights") as they begin. Raises EngineDead."""

    async def check(self, request: Request) -> None:
        """Check that a request can run here at all, whatever else runs; keeps no state. The worker checks every prompt
        of a job before it submits the first. Raises Refused, EngineDead; `submit` may still refuse it."""

    def submit(self, request: Request) -> None:
        """Queue one request in the engine. Raises Refused, EngineDead. Never blocks."""

    def cancel(self, request_id: str) -> None:
        """Cancel one request. Idempotent. Its last piece (finish="cancelled") still comes through on_step."""

    def stats(self) -> Stats: ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None:
        """Abort running requests and free the device. Bounded in time; idempotent."""
