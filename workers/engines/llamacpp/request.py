"""One request in llama.cpp's words: what is asked of it, and what its chunks mean.

It knows the shape of llama.cpp's completion messages, not how they are exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from streaming.jobs.frames import Logprob
from streaming.jobs.job import ChatTurn
from streaming.jobs.terminal import Failure
from workers.engines.base import EngineTimes, Piece, Request
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.stops import TokenGate


class Generation:
    """One request from submit to its last piece. `take` runs on the thread of its slot."""

    def __init__(self, request: Request, prompt: list[str | int], context: int) -> None:
        """`prompt` is rendered: texts and token ids mixed, and behind it what earlier attempts generated. `context` is
        the longest prompt + completion, in tokens."""
        self.id, self.tenant, self.prompt = request.id, request.tenant, prompt
        self.cancelled = False
        self.prompt_tokens = 0
        """Of this attempt: what earlier ones generated is part of its prompt. 0: not known yet."""
        self.generated = 0
        """By this attempt."""
        self.scheduled = 0.0
        """When a slot took it, by `time.monotonic`; llama.cpp begins with its prompt at once."""
        self._first = 0.0
        self._request, self._context = request, context
        self._gate = TokenGate(request.sampling.stop, request.past_text)
        self._cached = 0
        self._finish = "stop" if self._gate.hit else "length" if self.remaining == 0 else ""
        self._failure: Failure | None = None

    @property
    def done(self) -> bool:
        """Nothing more is wanted from llama.cpp."""
        return self.cancelled or bool(self._finish) or self._failure is not None

    @property
    def remaining(self) -> int | None:
        """`max_tokens` less what earlier attempts generated; None: as many as fit."""
        limit = self._request.sampling.max_tokens
        return None if limit is None else max(0, limit - self._request.past_tokens)

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema the text must follow, in the words that mean the same to llama.cpp."""
        schema = self._request.sampling.json_schema
        return {"type": "object"} if schema == {} else schema

    @property
    def held_tokens(self) -> int:
        """What it holds of the KV cache."""
        return self.prompt_tokens + self.generated

    def body(self, settings: LlamacppSettings, slot: int, *, reuse: bool) -> dict[str, Any]:
        """The call, for one slot. `reuse`: it may use what the slot has cached. Stop strings stay here: what llama.cpp
        holds back for one is lost when a length limit ends it."""
        sampling, remaining = self._request.sampling, self.remaining
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "id_slot": slot,
            "cache_prompt": reuse,
            "n_predict": -1 if remaining is None else remaining,
            "temperature": settings.temperature if sampling.temperature is None else sampling.temperature,
            "top_p": settings.top_p if sampling.top_p is None else sampling.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "repeat_penalty": settings.repeat_penalty,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "stream": True,
            "verbose": True,  # token ids and counts in each chunk
            "return_tokens": True,
            "return_progress": True,  # a chance to see a cancel while a long prompt is computed
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**31  # 32 bits there, and the largest value means "random"
        if sampling.logprobs is not None:
            body["logprobs"] = max(1, sampling.logprobs)
        if self.schema is not None:
            body["json_schema"] = self.schema
        return body

    def take(self, chunk: Mapping[str, Any]) -> Piece:
        """What a chunk brings, perhaps nothing."""
        if self.cancelled:
            return Piece(self.id)
        if error := chunk.get("error"):
            self.fail(self._refusal(error))
            return Piece(self.id)
        if progress := chunk.get("prompt_progress"):
            self._admit(progress["total"], progress["cache"])
            return Piece(self.id)
        return self._tokens(chunk["choices"][0], chunk["__verbose"])

    def fail(self, failure: Failure) -> None:
        """End it with a failure; the first reason stands."""
        self._failure = self._failure or failure

    def last(self) -> Piece:
        """The piece that ends it, once it is done."""
        held = Piece(self.id) if self.cancelled or self._failure else self._gate.flush(self.id)
        prompt, cached = self._prompt_size()
        return Piece(
            self.id,
            held.text,
            held.ids,
            held.n,
            finish="" if self._failure else "cancelled" if self.cancelled else self._finish,
            prompt_tokens=prompt,
            cached_tokens=cached,
            logprobs=held.logprobs,
            failure=self._failure,
            times=EngineTimes(self.scheduled, self._first, time.monotonic()),
        )

    def _prompt_size(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached: without what earlier attempts generated, which
        llama.cpp counts too."""
        tokens = max(0, self.prompt_tokens - self._request.past_tokens)
        return tokens, min(self._cached, tokens)

    def _admit(self, prompt_tokens: int, cached: int) -> None:
        """The first that is known of the prompt's length."""
        self.prompt_tokens, self._cached = prompt_tokens, cached
        if not self._request.past and prompt_tokens + (self.remaining or 1) > self._context:
            self.fail(too_long(self._request, prompt_tokens, self._context))

    def _refusal(self, error: Mapping[str, Any]) -> Failure:
        if error.get("type") == "exceed_context_size_error":
            return too_long(self._request, error["n_prompt_tokens"], self._context)
        message = f"llama.cpp refused the request: {error.get('message')}"
        return invalid(message) if error.get("code") == 400 else engine_error(message)

    def _tokens(self, choice: Mapping[str, Any], verbose: Mapping[str, Any]) -> Piece:
        count = verbose["tokens_predicted"] - self.generated
        self.generated += count
        prompt, cached = (0, 0) if self._first else self._prompt_size()
        self._first = self._first or time.monotonic()
        text = choice["text"]
        # A token without text ends the generation, and is none of the answer's.
        logprobs = self._logprobs(choice) if text else ()
        ids = tuple(verbose["tokens"])
        piece = self._gate.feed(Piece(self.id, text, ids, count, "", prompt, cached, logprobs))
        if self._gate.hit:
            self._finish = "stop"
        elif choice["finish_reason"]:
            self._finish = choice["finish_reason"]
        elif self.held_tokens >= self._context:
            self._finish = "length"
        return piece

    def _logprobs(self, choice: Mapping[str, Any]) -> tuple[Logprob, ...]:
        asked = self._request.sampling.logprobs
        if asked is None or not choice["logprobs"]:
            return ()
        return tuple(
            Logprob(
                row["token"],
                row["logprob"],
                tuple((other["token"], other["logprob"]) for other in row["top_logprobs"][:asked]),
            )
            for row in choice["logprobs"]["content"]
        )


def is_chat(prompt: Sequence[ChatTurn] | str | Sequence[int]) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], ChatTurn)


def invalid(message: str, param: str | None = None) -> Failure:
    """The requester's mistake."""
    return Failure(code="invalid_request_error", message=message, status=400, param=param)


def engine_error(message: str) -> Failure:
    """Nobody's mistake but ours."""
    return Failure(code="engine_error", message=message, status=500)


def too_long(request: Request, prompt_tokens: int, context: int) -> Failure:
    """The prompt, or the prompt and what may follow, is longer than the context."""
    what, wanted = "messages" if is_chat(request.prompt) else "prompt", request.sampling.max_tokens
    asked = f" and max_tokens asks for {wanted} more" if wanted else ""
    return Failure(
        code="context_length_exceeded",
        message=f"the {what} came to {prompt_tokens} tokens{asked}, but this model's context is {context} tokens. "
        f"Shorten the {what}" + (" or lower max_tokens." if wanted else "."),
        status=400,
        param=what,
    )
