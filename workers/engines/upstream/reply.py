"""Chunks and endings of replies: what a server's chunk says, and what completes, breaks or fails an answer. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from penstock.engine import Failure, Logprob, token_text
from penstock.extras import Extras, is_deep
from workers.engines.upstream import http
from workers.engines.upstream.http import ServerError, decoded, error_of, plain

MAX_TEXT = 256
"""Characters, or bytes, of one token that are taken from log-probabilities; the longest tokens, runs of one character,
are shorter."""
MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 1 << 24
"""Tokens of a prompt or an answer at most: more than any model's context. A server's numbers go into the log and onto
bills, so a chunk with one that cannot be true is malformed."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Verbose(msgspec.Struct, gc=False):
    """llama-server's own fields, with `verbose`."""

    tokens: list[TokenId] = []
    tokens_predicted: Count = 0


class Progress(msgspec.Struct, gc=False):
    """llama-server's progress of a prompt."""

    total: Count = 0
    cache: Count = 0


class ChatDelta(msgspec.Struct, gc=False):
    """The news of a chat."""

    content: str | list[Any] | None = None
    """A list holds parts, as in a message."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    """The older form of one call."""


class Choice(msgspec.Struct, gc=False):
    index: Any = 0
    """Requests ask for one choice: another one belongs to an answer that nobody asked for."""
    text: str | None = None
    delta: ChatDelta | None = None
    message: ChatDelta | None = None
    """Of a whole answer, in place of `delta`."""
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Count | None = 0


class ChunkUsage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = 0
    completion_tokens: Count | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, gc=False):
    """One chunk. Fields that are not listed are skipped while decoding."""

    choices: list[Choice] | None = None
    usage: ChunkUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_progress: Progress | None = None
    verbose: Verbose | None = msgspec.field(default=None, name="__verbose")
    error: Any = None
    object: Any = None


class _KnownDelta(ChatDelta, gc=False, forbid_unknown_fields=True):
    """A delta that has nothing beside the fields that are read, and those that bring nothing."""

    role: msgspec.Raw = msgspec.Raw()
    annotations: None = None
    audio: None = None


class _KnownChoice(Choice, gc=False, forbid_unknown_fields=True):
    delta: _KnownDelta | None = None
    index: Literal[0] = 0
    stop_reason: None = None
    matched_stop: None = None
    native_finish_reason: None = None


class _KnownChunk(Chunk, gc=False, forbid_unknown_fields=True):
    choices: list[_KnownChoice] | None = None  # type: ignore[assignment]
    id: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    system_fingerprint: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()
    timings: msgspec.Raw = msgspec.Raw()


decode = msgspec.json.Decoder(Chunk).decode
"""Raises msgspec.DecodeError, also for values of wrong types and numbers out of bounds."""
decode_known = msgspec.json.Decoder(_KnownChunk).decode
"""Like `decode`, of a chunk without extras. Raises msgspec.DecodeError also for one that may have some."""


def error_in(chunk: Chunk, data: bytes) -> ServerError | None:
    """The error that a chunk tells in any form. An object without choices that tells none, such as a ping, is no
    error."""
    if chunk.error or chunk.object == "error" or (chunk.choices is None and chunk.usage is None):
        return error_of(decoded(data))
    return None


def is_blank(data: bytes) -> bool:
    """Whether an event that is no chunk has no place for an answer or an error: a word of PINGS, or JSON that is no
    object."""
    if data.lstrip()[:1] == b"{":
        return False
    if data.lower() in http.PINGS:
        return True
    try:
        return not isinstance(msgspec.json.decode(data), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def text_of(choice: Choice) -> tuple[str, bool]:
    """The text of a chunk, and whether its tokens are hidden from it (reasoning, refusals, tool calls)."""
    delta = choice.delta
    if delta is None:
        return choice.text or "", False
    text = delta.content or ""
    if not isinstance(text, str):
        text = _read_parts(delta, text)
    return text, not text and bool(
        delta.reasoning or delta.reasoning_content or delta.refusal or delta.tool_calls or delta.function_call
    )


def _read_parts(delta: ChatDelta, parts: list[Any]) -> str:
    """The text of content in parts, which the delta then has as its content; reasoning and refusals become fields."""
    texts = {"text": "", "thinking": "", "refusal": ""}
    for part in parts:
        if isinstance(part, str):
            texts["text"] += part
        elif isinstance(part, dict):
            kind = str(part.get("type")) if part.get("type") in ("thinking", "refusal") else "text"
            said = part.get(kind)
            for each in said if isinstance(said, list) else (said,):  # Mistral's thinking is a list of texts again
                each = each.get("text") if isinstance(each, dict) else each  # noqa: PLW2901
                texts[kind] += each if isinstance(each, str) else ""
    delta.content = texts["text"]
    delta.reasoning_content = delta.reasoning_content or texts["thinking"] or None
    delta.refusal = delta.refusal or texts["refusal"] or None
    return texts["text"]


def calls_of(choice: Choice) -> Any:
    """Its part of calls."""
    delta = choice.delta
    if delta is None:
        return None
    return delta.tool_calls or ([{"index": 0, "function": delta.function_call}] if delta.function_call else None)


READ = {
    "chunk": frozenset({*Chunk.__struct_encode_fields__, *("id", "created", "model", "system_fingerprint"),
                        *("service_tier", "served_by", "timings")}),
    "choice": frozenset({*Choice.__struct_encode_fields__, "index"}),
    "delta": frozenset({*ChatDelta.__struct_encode_fields__, "role"}),
}  # fmt: skip
"""Fields that are no extras: they are read, or Penstock gives its own. `timings` would tell what is in the server's
cache."""


def extras_of(data: bytes) -> Extras:
    """The extras of a chunk, without those of its calls."""
    found = {}
    for place, fields in _parts(decoded(data)).items():
        rest = {name: value for name, value in fields.items() if name not in READ[place] and not is_empty(value)}
        if rest and not is_deep(rest):
            found[place] = rest
    return found


def _parts(chunk: Any) -> dict[str, dict[str, Any]]:
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    own = [each for each in choices if isinstance(each, dict) and not each.get("index")] if choices else []
    choice = own[0] if own else {}
    parts = {"chunk": chunk, "choice": choice, "delta": choice.get("delta") or choice.get("message")}
    return {place: fields for place, fields in parts.items() if isinstance(fields, dict)}


COUNTS = ("usage", "prompt_progress", "__verbose")
"""Fields of a chunk with counts."""


def mended(data: bytes, dropped: Collection[str] = ()) -> bytes:
    """A chunk as strict JSON, without the fields that say nothing, whatever their types, and without those that are
    `dropped`; the data itself if it is no JSON."""
    chunk = http.leniently_decoded(data)
    for fields in _parts(chunk).values():
        for name in [name for name, value in fields.items() if not value or name in dropped]:
            del fields[name]
    return data if chunk is None else msgspec.json.encode(chunk)


def is_empty(value: Any) -> bool:
    """Whether a field says nothing."""
    return value is None or value in ("", [], {})


def logprobs_of(raw: msgspec.Raw, most: int) -> tuple[Logprob, ...]:
    """The log-probabilities of a chunk, of a chat's or of a completion's form. Raises msgspec.DecodeError."""
    found = msgspec.json.decode(raw)
    if not isinstance(found, dict):
        return ()
    if isinstance(rows := found.get("content"), list):
        return tuple(Logprob(*_token(row), tuple(map(_token, (row.get("top_logprobs") or [])[:most]))) for row in rows)
    tokens, values = found.get("tokens") or [], found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        Logprob(str(token)[:MAX_TEXT], float(value or 0.0), _of_mapping(top, most))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _token(row: dict[str, Any]) -> tuple[str, float]:
    """The text of a token, by its bytes if they are told (of a part of a character some servers tell no other), and its
    log-probability."""
    data, number = row.get("bytes"), row["logprob"]
    text = token_text(bytes(data[:MAX_TEXT])) if data and isinstance(data, list) else str(row["token"])[:MAX_TEXT]
    return text, -http.INFINITY if number is None else float(number)


def _of_mapping(top: Any, most: int) -> tuple[tuple[str, float], ...]:
    if not isinstance(top, dict):
        return ()
    best = sorted(((str(token)[:MAX_TEXT], float(value)) for token, value in top.items()), key=lambda pair: -pair[1])
    return tuple(best[:most])


FINISHES = dict.fromkeys(("length", "max_tokens", "max_length", "max_output_tokens", "model_length", "token_limit",
                          "model_context_window_exceeded", "context_length_exceeded"), "length")  # fmt: skip
FINISHES |= dict.fromkeys(("content_filter", "content_filtered", "safety", "refusal", "recitation", "blocklist", "spii",
                           "prohibited_content", "guardrail_intervened", "sensitive"), "content_filter")  # fmt: skip
"""Finish reasons of servers, in our words; others mean "stop"."""
INTERRUPTED = ("error", "abort", "cancel", "timeout", "fail", "interrupt", "resource", "overload", "unavailable")
"""Parts of the finish reasons by which a server says that it did not complete the answer."""
NO_REASON = ("null", "none")
"""Words that some servers give in place of null."""
MAX_REASON = 64
"""Characters of a finish reason that a log shows."""

BUSY = (429, 503, 529)
LIMITED = (429, 529)
"""Of these, the ones that a server gives while it is there: others are waited for as for one that is away."""
TOO_LARGE = "request too large"
RETRIED = (408, 409, 425, 500, 502, 504)
PASSED_ON = (400, 403, 404, 405, 406, 413, 414, 415, 422, 431, 451)
"""Statuses that a client gets as they are: it may do something about them. Other ones of 4xx become 400."""
GOING_ON = ("draining", "internal_error")
"""Errors of a Penstock that end a stream and not its job."""


class End(Enum):
    """What a reply's end means for its request."""

    DONE = "done"
    FAILED = "failed"
    """The job fails by its own fault, whatever the server."""
    BROKEN = "broken"
    """The server's fault: the request is continued."""
    BUSY = "busy"
    """The server has no room, or a rate limit is reached: the request waits."""
    KEY = "key"
    """The server does not take the key."""
    RESTART = "restart"
    """No server that is there can continue it."""
    CANCELLED = "cancelled"


Break: TypeAlias = Literal["", "unsent", "malformed", "stalled", "told", "bare"]
"""How a reply broke. "unsent": the server cannot have begun to compute it. "malformed": by what it says, which shows
that the server is there. "stalled": nothing came for too long. "told": by an error inside the stream, with which the
generation has ended. "bare": the stream came to its end and only lacks a finish reason; a server that gives none is
believed once it has nothing to add."""


@dataclass(frozen=True, slots=True)
class ReplyOutcome:
    """How a reply ended. `finish`: of an answer that is complete; `reason`: of one that is not, for logs."""

    end: End
    reason: str = ""
    finish: str = ""
    words: str = ""
    """The server's own words, which may repeat the prompt: for the job's owner, and never logged. Those of an error by
    the server's fault are for nobody: they may tell of its inside."""
    status: int = 0
    how: Break = ""
    """How it broke, if that matters."""
    param: str | None = None
    retry_s: float | None = None
    """Seconds that a busy server asks to wait."""

    @property
    def failure(self) -> Failure:
        """The failure of a job that ends with this outcome."""
        if self.end is End.FAILED and self.status and self.status < 500:
            code = "context_length_exceeded" if _is_too_long(self.words) else "invalid_request_error"
            said, status = self.words[: http.MAX_WORDS] or self.reason, self.status if self.status in PASSED_ON else 400
            param = None if self.param is None else self.param[: http.MAX_PARAM]
            return Failure(code, f"the upstream server refused the request: {said}", status, param)
        return Failure("upstream_error", f"the upstream server failed: {self.reason}", 502)

    def without(self, secrets: Iterable[str]) -> ReplyOutcome:
        """The same, with no key that the server repeats."""
        keys = [each for each in secrets if each]
        if not keys or not (self.words or self.reason or self.param):
            return self
        param = None if self.param is None else http.without(keys, self.param)
        return replace(self, reason=http.without(keys, self.reason), words=http.without(keys, self.words), param=param)


def by_finish(reason: str) -> ReplyOutcome | None:
    """A stream that gave this finish reason; None if the reason says nothing.

    An answer is complete only by a finish reason that does not say that the server was interrupted. An unknown word
    completes it too, because the next reply would end with the same word. `[DONE]` proves nothing: vLLM and SGLang send
    it after errors too.
    """
    word = reason.lower()
    if not word or word in NO_REASON:
        return None
    if word not in FINISHES and any(part in word for part in INTERRUPTED):
        return ReplyOutcome(End.BROKEN, f"finish reason {reason[:MAX_REASON]!r}")
    return ReplyOutcome(End.DONE, finish=FINISHES.get(word, "stop"))


def by_status(status: int, body: bytes) -> ReplyOutcome:
    """A reply with an error status."""
    error = error_of(decoded(body))
    words, param = (error.words, error.param) if error else (plain(body.decode(errors="replace")), None)
    return _by_code(status, f"HTTP {status}", words, param)


def by_error(error: ServerError) -> ReplyOutcome:
    """An error inside a stream that began with 200."""
    reason = f"error {error.status} inside the stream" if error.status else "an error inside the stream"
    outcome = _by_code(error.status, reason, error.words, error.param)
    return replace(outcome, how="told") if outcome.end is End.BROKEN and error.name not in GOING_ON else outcome


def by_cut(reason: str, how: Break = "") -> ReplyOutcome:
    """A stream that ended without a finish reason."""
    return ReplyOutcome(End.BROKEN, reason, how=how)


def by_malformed(what: str) -> ReplyOutcome:
    """A reply that cannot be read."""
    return ReplyOutcome(End.BROKEN, f"a malformed {what}", how="malformed")


def _by_code(code: int, reason: str, words: str, param: str | None) -> ReplyOutcome:
    end, about = End.BROKEN, None
    if code in LIMITED and TOO_LARGE in words.lower():  # for the limit, however long it waits
        end = End.FAILED
    elif code in BUSY:
        end = End.BUSY
    elif code in http.KEY_REFUSED:
        end = End.KEY
    elif 400 <= code < 500 and code not in RETRIED:
        end, about = End.FAILED, param
    return ReplyOutcome(end, reason, words=words, status=code, param=about)


def _is_too_long(words: str) -> bool:
    lower = words.lower()
    return "context" in lower and any(each in lower for each in ("length", "exceed", "maximum", "size"))
