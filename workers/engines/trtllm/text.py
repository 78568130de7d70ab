"""Tokenizer adapter of TensorRT-LLM: prompts to token ids, ids to text up to a stop string; limits and sampling.

It works with any tokenizer that has encode, decode and apply_chat_template, and does not know the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.engine import ChatTurn, Failure, Logprob, Refused, Request, Sampling, token_text
from workers.engines.text import ControlTokens, StopMatcher, too_long
from workers.engines.trtllm.settings import TrtllmSettings

INCOMPLETE = "\ufffd"
"""A decoder's output for the bytes of an incomplete character."""

WINDOW = 16
"""Tokens decoded again with each step, because a token's text depends on its neighbours. Half are kept as context."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Properties of a model from its checkpoint folder; 0 and () if missing."""

    context: int = 0
    vocabulary: int = 0
    end_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> CheckpointInfo:
        """Read the folder's configuration files. Raises ValueError if one is not JSON."""
        config = _read_json(folder / "config.json")
        model = config | config.get("text_config", {})
        ends = _read_json(folder / "generation_config.json").get("eos_token_id", model.get("eos_token_id"))
        return cls(
            context=int(model.get("max_position_embeddings") or 0),
            vocabulary=int(model.get("vocab_size") or 0),
            end_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte in the vocabulary of a SentencePiece tokenizer."""
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [each for each in range(256) if each not in _VISIBLE]
_BYTE_LETTERS = {chr(each): each for each in _VISIBLE} | {chr(256 + at): each for at, each in enumerate(_HIDDEN)}
"""The bytes that the letters of a byte-level tokenizer's vocabulary stand for."""


class Codec:
    """Wraps the model's tokenizer behind one interface."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._inner = getattr(tokenizer, "tokenizer", tokenizer)
        self._control = ControlTokens(_control_texts(self._inner))

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return hasattr(self._tokenizer, "apply_chat_template") and bool(getattr(self._inner, "chat_template", True))

    @property
    def end_id(self) -> int | None:
        return getattr(self._tokenizer, "eos_token_id", None)

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 0: unknown."""
        return len(self._inner) if hasattr(self._inner, "__len__") else 0

    def prompt_ids(self, prompt: Sequence[ChatTurn] | str | Sequence[int]) -> list[int]:
        """Convert a prompt to token ids. Control tokens in messages become text, those in a raw prompt stay.

        Raises Refused when the chat template rejects the conversation."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt, add_special_tokens=True))
        if prompt and isinstance(prompt[0], ChatTurn):
            turns = [turn for turn in prompt if isinstance(turn, ChatTurn)]
            messages, mark = self._control.mark([{"role": turn.role, "content": turn.content} for turn in turns])
            text = self._render(messages)
            return self._ids(text.split(mark) if mark else [text])
        return cast("list[int]", list(prompt))

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        """Tokenise each piece separately, so that a control token that was cut in two stays text."""
        return [each for piece in pieces for each in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.chats:
            message = "this model has no chat template: use the completions endpoint"
            raise Refused(Failure("unsupported_parameter", message, 400, "messages"))
        try:
            # As text: the result of tokenize=True differs between versions of the tokenizer library.
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # the template is the model's own code and may raise anything
            message = f"the model's chat template does not take these messages: {error}"
            raise Refused(Failure("invalid_value", message, 400, "messages")) from error
        return str(text)

    def past_ids(self, past: Sequence[tuple[str, Sequence[int], int]]) -> list[int]:
        """Token ids of what earlier attempts generated; text is tokenised again where not all ids are known."""
        ids: list[int] = []
        for text, known, count in past:
            ids += known if len(known) == count else self._ids(self._control.cut(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def name(self, token: int) -> str:
        """The text of one token, special tokens included, as `token_text` writes it."""
        text = str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if INCOMPLETE not in text or not hasattr(self._inner, "convert_ids_to_tokens"):
            return text
        piece = str(self._inner.convert_ids_to_tokens(token))
        if _BYTE.fullmatch(piece):
            return token_text(bytes([int(piece[3:5], 16)]))
        data = [_BYTE_LETTERS.get(letter, -1) for letter in piece]
        return text if -1 in data else token_text(bytes(data))


def _control_texts(tokenizer: Any) -> list[str]:
    """Texts that this tokenizer recognises as control tokens anywhere."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [str(token) for token in added.values() if getattr(token, "special", False)]
    return special + [str(text) for text in getattr(tokenizer, "all_special_tokens", ())]


class Detokenizer:
    """Takes token ids and returns the text they add; bytes of an incomplete character wait for the rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(before[-WINDOW // 2 :])
        self._shown = len(decode(self._window).rstrip(INCOMPLETE)) if self._window else 0

    def feed(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        self._window += ids
        whole = self._decode(self._window)
        ready = whole.rstrip(INCOMPLETE)
        added, self._shown = ready[self._shown :], max(self._shown, len(ready))
        if ready == whole and len(self._window) > WINDOW:
            self._window = self._window[-WINDOW // 2 :]
            self._shown = len(self._decode(self._window))
        return added

    def flush(self) -> str:
        """Return the text held back, once nothing follows."""
        rest = self._decode(self._window)[self._shown :] if self._window else ""
        self._shown += len(rest)
        return rest


class TextStream:
    """The text of one request: detokenised, and cut at its stop strings."""

    def __init__(self, codec: Codec, request: Request, prompt: Sequence[int], past: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(codec.decode, prompt)
        self._stops = StopMatcher(request.sampling.stop)
        # Replay what earlier attempts generated: text that they held back is in the ids but was not shown.
        generated, shown = self._detokenizer.feed(past), request.past_text
        self._overdue = generated[len(shown) :] if generated.startswith(shown) else ""

    @property
    def stopped(self) -> bool:
        return self._stops.hit

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that may be shown now."""
        text, self._overdue = self._overdue + self._detokenizer.feed(ids), ""
        return self._stops.feed(text)

    def flush(self) -> str:
        """Return the text held back, once generation ended; it may still contain a stop string."""
        text, self._overdue = self._overdue + self._detokenizer.flush(), ""
        return self._stops.feed(text) + self._stops.flush()


UNLIKELY = -9999.0
"""Replaces a missing log-probability; finite, because JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the loaded engine. All lengths in tokens."""

    context: int
    default_output: int
    longest_prefill: int
    """The longest prompt that one step prefills; the context if prefill is chunked."""
    guided: bool
    vocabulary: int
    """0: unknown."""

    @classmethod
    def of(cls, settings: TrtllmSettings, model_context: int, kv_tokens: int, vocabulary: int) -> EngineLimits:
        """Derive the limits from the settings, the model's context and the KV cache's capacity (0: unknown)."""
        context = settings.max_seq_len or model_context
        context = min(context, kv_tokens) if kv_tokens else context
        return cls(
            context=context,
            default_output=settings.default_output,
            longest_prefill=context if settings.chunked_prefill else min(context, settings.max_num_tokens),
            guided=bool(settings.guided_decoding),
            vocabulary=vocabulary,
        )


def budget(sampling: Sampling, prompt: int, limits: EngineLimits) -> int:
    """Maximum of tokens to generate; always explicit, because the engine's default is 32."""
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    return min(limits.default_output, limits.context - prompt)


def refusal(sampling: Sampling, ids: Sequence[int], limits: EngineLimits) -> Failure | None:
    """Why a prompt of these ids can never run here with this sampling, or None."""
    if not ids:
        return _invalid("the prompt has no tokens: send some text", "prompt")
    if limits.vocabulary and not all(0 <= token < limits.vocabulary for token in ids):
        return _invalid(f"the prompt holds a token id outside 0..{limits.vocabulary - 1}", "prompt")
    if sampling.json_schema is not None and not limits.guided:
        message = "this model was started without guided decoding, so it cannot hold its output to a JSON schema"
        return Failure("unsupported_parameter", message, 400, "response_format")
    if len(ids) > limits.longest_prefill:
        message = f"the prompt has {len(ids)} tokens, and this engine takes {limits.longest_prefill} in one prefill"
        return Failure("context_length_exceeded", message, 400, "prompt")
    if len(ids) + (sampling.max_tokens or 1) > limits.context:
        return too_long("prompt", len(ids), sampling.max_tokens, limits.context)
    return None


def unresumable(prompt: int, past: int, limits: EngineLimits) -> Failure | None:
    """Why a request that lost its worker after `past` tokens cannot be resumed here, or None."""
    if prompt + past <= limits.longest_prefill:
        return None
    message = (
        f"the worker was lost, and prompt and output so far ({prompt} + {past} tokens) exceed the "
        f"{limits.longest_prefill} that this engine takes in one prefill: send it again"
    )
    return Failure("resume_impossible", message, 500)


def _invalid(message: str, param: str) -> Failure:
    return Failure("invalid_value", message, 400, param)


def keywords(
    sampling: Sampling, max_tokens: int, end_ids: Sequence[int], guided: Callable[..., Any], *, timed: bool = False
) -> dict[str, Any]:
    """Keyword arguments of a new SamplingParams, into which the engine writes, so that requests never share one.

    Stop strings are left out: without the engine's detokeniser they would match only one exact tokenisation.

    Args:
        timed: the engine measures when it ran the request.
    """
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens,
        "end_id": end_ids[0],
        "stop_token_ids": list(end_ids[1:]) or None,
        "n": 1,
        "best_of": 1,
        "detokenize": False,
        "return_perf_metrics": timed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        **_randomness(sampling),
    }
    if sampling.logprobs is not None:
        chosen["logprobs"] = max(1, sampling.logprobs)  # versions differ on whether 0 means "the token's own" or "off"
    if sampling.json_schema is not None:
        chosen["guided_decoding"] = (
            guided(json=json.dumps(sampling.json_schema)) if sampling.json_schema else guided(json_object=True)
        )
    return chosen


def _randomness(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {"top_k": 1}  # greedy by every version's definition
    chosen: dict[str, Any] = {
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
    }
    if sampling.top_k is not None:
        chosen["top_k"] = sampling.top_k
    if sampling.min_p is not None:
        chosen["min_p"] = sampling.min_p
    if sampling.seed is not None:
        chosen["seed"] = sampling.seed % 2**63  # the engine takes no negative seed
    return chosen


def logprobs(
    ids: Sequence[int], entries: Sequence[Any], alternatives: int, text: Callable[[int], str]
) -> tuple[Logprob, ...]:
    """One Logprob per token. An entry maps token ids to objects with `.logprob`, or is the token's own number."""
    return tuple(_logprob(token, entry, alternatives, text) for token, entry in zip(ids, entries, strict=False))


def _logprob(token: int, entry: Any, alternatives: int, text: Callable[[int], str]) -> Logprob:
    if not isinstance(entry, Mapping):
        return Logprob(text(token), float(entry))
    values: dict[int, float] = {other: float(value.logprob) for other, value in entry.items()}
    best = sorted(values.items(), key=lambda pair: pair[1], reverse=True)[:alternatives]
    return Logprob(text(token), values.get(token, UNLIKELY), tuple((text(other), value) for other, value in best))
