"""Sampling parameters for TensorRT-LLM: checks those of a request, and builds the arguments of its `SamplingParams`.

Pure. It refuses inputs on which the engine would fail every running request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine import MAX_LOGPROBS, Failure, Logprob, Sampling
from workers.engines.trtllm.settings import TrtllmSettings

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
    if sampling.max_tokens is not None and sampling.max_tokens <= 0:
        return _invalid(f"max_tokens must be at least 1, got {sampling.max_tokens}", "max_tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return _invalid(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {sampling.logprobs}", "top_logprobs")
    if sampling.json_schema is not None and not limits.guided:
        message = "this model was started without guided decoding, so it cannot hold its output to a JSON schema"
        return Failure("unsupported_parameter", message, 400, "response_format")
    return _too_long(sampling, len(ids), limits)


def unresumable(sampling: Sampling, prompt: int, past: int, limits: EngineLimits) -> Failure | None:
    """Why a request that lost its worker after `past` tokens cannot be resumed here, or None."""
    if past and sampling.json_schema is not None:
        message = "the worker was lost in the middle of guided output, whose grammar cannot be resumed: send it again"
    elif prompt + past > limits.longest_prefill:
        message = (
            f"the worker was lost, and prompt and output so far ({prompt} + {past} tokens) exceed the "
            f"{limits.longest_prefill} that this engine takes in one prefill: send it again"
        )
    else:
        return None
    return Failure("resume_impossible", message, 500)


def _too_long(sampling: Sampling, prompt: int, limits: EngineLimits) -> Failure | None:
    if prompt > limits.longest_prefill:
        message = (
            f"the prompt has {prompt} tokens, but this engine takes at most {limits.longest_prefill} in one prefill: "
            "shorten it"
        )
    elif prompt + (wanted := sampling.max_tokens or 1) > limits.context:
        message = (
            f"this model's context is {limits.context} tokens, but {prompt + wanted} were asked for "
            f"({prompt} in the prompt, {wanted} for the completion): shorten the prompt or lower max_tokens"
        )
    else:
        return None
    return Failure("context_length_exceeded", message, 400, "prompt")


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
