"""Streamed chunks: decodes one chunk of any OpenAI-compatible server. Pure; the hot path of the engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.engine import Logprob

MAX_TEXT = 1 << 16
"""Characters of one token's text that are taken from log-probabilities."""
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

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: ChatDelta | None = None
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


class Uncounted(Chunk, gc=False):
    """One chunk, read without its counts."""

    usage: Any = None
    prompt_progress: Any = None
    verbose: Any = msgspec.field(default=None, name="__verbose")


decode = msgspec.json.Decoder(Chunk).decode
"""Raises msgspec.DecodeError, also for values of wrong types and numbers out of bounds."""
_decode_uncounted = msgspec.json.Decoder(Uncounted).decode


def decode_uncounted(data: bytes) -> Chunk:
    """The chunk as if it had no counts. Raises msgspec.DecodeError if something else of it is wrong too."""
    chunk = _decode_uncounted(data)
    chunk.usage = chunk.prompt_progress = chunk.verbose = None
    return chunk


def is_error(chunk: Chunk) -> bool:
    """Whether the chunk tells an error, in any form."""
    return chunk.error is not None or chunk.object == "error" or (chunk.choices is None and chunk.usage is None)


def text_of(choice: Choice) -> tuple[str, bool]:
    """The text of a chunk, and whether its tokens are hidden from it (reasoning, tool calls)."""
    delta = choice.delta
    if delta is None:
        return choice.text or "", False
    text = delta.content or ""
    return text, not text and bool(delta.reasoning or delta.reasoning_content or delta.tool_calls)


def calls_of(choice: Choice) -> Any:
    """Its part of calls."""
    return choice.delta.tool_calls if choice.delta is not None else None


def decoded(data: bytes) -> Any:
    """The JSON of these bytes; None if they are none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def logprobs_of(raw: msgspec.Raw, most: int) -> tuple[Logprob, ...]:
    """The log-probabilities of a chunk, of a chat's or of a completion's form. Raises msgspec.DecodeError."""
    found = msgspec.json.decode(raw)
    if not isinstance(found, dict):
        return ()
    if isinstance(rows := found.get("content"), list):
        return tuple(_of_chat(row, most) for row in rows)
    tokens, values = found.get("tokens") or [], found.get("token_logprobs") or []
    tops = found.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        Logprob(str(token)[:MAX_TEXT], float(value or 0.0), _of_mapping(top, most))
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _of_chat(row: dict[str, Any], most: int) -> Logprob:
    others = tuple((str(each["token"]), float(each["logprob"])) for each in (row.get("top_logprobs") or [])[:most])
    return Logprob(str(row["token"])[:MAX_TEXT], float(row["logprob"]), others)


def _of_mapping(top: Any, most: int) -> tuple[tuple[str, float], ...]:
    if not isinstance(top, dict):
        return ()
    best = sorted(((str(token), float(value)) for token, value in top.items()), key=lambda pair: -pair[1])
    return tuple(best[:most])
