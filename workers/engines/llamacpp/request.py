"""Requests of llama.cpp: the prompt as a list of texts and token ids, the body of the call, and what its chunks mean.

It uses the model file's chat template and vocabulary; llama.cpp itself tokenises (`Tokenizer`). llama.cpp recognises
control tokens in every text, so those that a message or an earlier attempt's output contains are cut in two
(workers/engines/text.py). A raw prompt is passed unchanged, with the control tokens that its caller wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx2
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from penstock.engine import EngineTimes, Failure, Logprob, Piece, Request, token_text
from workers.engines import chats
from workers.engines.chats import NONE, AnswerText, ChatFormat, Shown, Variables, refused
from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.reasoning import as_written
from workers.engines.text import ControlTokens, too_long

log = logging.getLogger(__name__)


def invalid(message: str, param: str | None = None) -> Failure:
    """A failure caused by the request: status 400."""
    return Failure(code="invalid_request_error", message=message, status=400, param=param)


def engine_error(message: str) -> Failure:
    """A failure caused by the engine: status 500."""
    return Failure(code="engine_error", message=message, status=500)


def refusal(error: Mapping[str, Any], param: str | None = None) -> Failure:
    """The failure of a request that llama.cpp refuses with this error."""
    message = f"llama.cpp refused the request: {error.get('message')}"
    return invalid(message, param) if error.get("code") == 400 else engine_error(message)


def over_context(request: Request, prompt_tokens: int, context: int) -> Failure:
    """The failure of a request whose prompt, or prompt and completion together, exceed the context."""
    return too_long("messages" if request.turns else "prompt", prompt_tokens, request.sampling.max_tokens, context)


UNUSABLE_SCHEMA = (
    "llama.cpp cannot hold its output to this JSON schema: each `type` and `pattern` must be valid, some value must "
    "follow it, and one object may have some 100 optional properties. Correct or simplify it."
)

_MAX_PROMPT_CHARS = 1 << 24
"""Characters of a rendered prompt; far more than any context holds."""


class RenderedPrompt(NamedTuple):
    """A prompt as one call takes it."""

    parts: list[str | int]
    opened: bool
    """It ends with the tag that begins reasoning."""


class ChatTemplate:
    """One model's Jinja template, compiled once. It is a program by the author of the model file, so it runs in a
    sandbox. Raises jinja2.TemplateError if it cannot be compiled; the model can still complete raw text."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._template = environment.from_string(source)

    def render(
        self, messages: Shown, tools: Shown | None = None, variables: Variables = NONE, *, begins: bool = True
    ) -> str:
        """Render the prompt, see workers.engines.chats.Render."""
        known = {**variables, **self._special}
        try:
            prompt = self._template.render(messages=messages, tools=tools, add_generation_prompt=begins, **known)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # a template is a program and may raise any of these on a conversation that its author did not expect
            raise refused(f"this model's chat template does not take the conversation: {error}", "messages") from None
        if len(prompt) > _MAX_PROMPT_CHARS:
            raise refused(f"the rendered conversation has {len(prompt)} characters; shorten the messages", "messages")
        return prompt


def _raise(message: object) -> NoReturn:
    """A template refuses a conversation."""
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: the built-in filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


class Prompts:
    """Builds the prompts of one model."""

    def __init__(self, file: Gguf) -> None:
        self._bos = file.special_token("bos")
        self._control_ids = file.control_tokens()
        self._control = ControlTokens(self._control_ids)
        self.control = frozenset(self._control_ids.values())
        """Ids of control tokens."""
        self.vocabulary = file.vocabulary
        special = {f"{role}_token": file.special_token(role) for role in ("bos", "eos")}
        self.special = {role: found[1] for role, found in special.items() if found is not None}
        self.chats = self._format(file)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises Refused for a token that the model does not have."""
        chats.check_ids(ids, self.vocabulary, param)

    def of(self, request: Request, *, begins: bool = True) -> RenderedPrompt:
        """The prompt of a request, of a conversation up to where the answer begins (`begins`). Raises Refused, also for
        a token of its logit_bias that the model does not have."""
        self.check_ids([*request.sampling.logit_bias], "logit_bias")  # llama.cpp would ignore it
        parts, past = self._prompt(request, begins=begins), request.past
        opened = isinstance(last := parts[-1], str) and chats.opens_reasoning(last)
        if request.reasoning:
            past = [(as_written(text, opened=opened), ids, count) for text, ids, count in past]
        return RenderedPrompt(self._continued(parts, past), opened)

    def _continued(self, parts: list[str | int], past: Sequence[tuple[str, Sequence[int], int]]) -> list[str | int]:
        generated = self._past(past)
        if generated and isinstance(last := parts[-1], str) and isinstance(first := generated[0], str):
            parts[-1], generated = last + first, generated[1:]  # a token may span the boundary
        return self._mixed([*parts, *generated])

    def _prompt(self, request: Request, *, begins: bool) -> list[str | int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            parts: list[str | int] = [prompt] if prompt else [self._bos[0]] if self._bos else []
        elif request.turns:
            parts = self._conversation(request, begins=begins)
        else:
            parts = [*request.ids]
        if not parts:
            raise refused("the prompt is empty", "prompt")
        self.check_ids([part for part in parts if isinstance(part, int)], "prompt")
        return parts

    def _conversation(self, request: Request, *, begins: bool) -> list[str | int]:
        text, *more = self.chats.conversation(request, begins=begins)
        bos = self._bos
        first: list[str | int] = []
        if bos and bos[1] and text.startswith(bos[1]):
            first, text = [bos[0]], text.removeprefix(bos[1])  # as an id, so that llama.cpp does not add a second one
        return [*first, text, *more]

    def _past(self, past: Sequence[tuple[str, Sequence[int], int]]) -> list[str | int]:
        """What earlier attempts generated: as token ids where all are known, else as text."""
        parts: list[str | int] = []
        for known, deltas in groupby(past, key=lambda delta: delta[2] > 0 and len(delta[1]) == delta[2]):
            rows = list(deltas)
            if known:
                parts.extend(number for _, ids, _ in rows for number in ids)
            else:
                parts.extend(self._control.cut("".join(text for text, _, _ in rows)))
        return [part for part in parts if part != ""]

    def _mixed(self, parts: list[str | int]) -> list[str | int]:
        """Make sure that several parts include a token id: llama.cpp reads a list of texts only as several prompts.
        Raises Refused."""
        parts = [part for part in parts if part != ""] or parts
        if len(parts) == 1 or any(isinstance(part, int) for part in parts):
            return parts
        for place, part in enumerate(parts):
            for text, number in self._control_ids.items():
                before, found, after = str(part).partition(text)
                if found:  # a control token of the template itself
                    return [each for each in (*parts[:place], before, number, after, *parts[place + 1 :]) if each != ""]
        raise refused("a message spells a control token of this model, which it cannot take as text", "messages")

    def _format(self, file: Gguf) -> ChatFormat:
        bos, eos = self._bos, file.special_token("eos")
        try:
            template = ChatTemplate(file.chat_template, bos=bos[1] if bos else "", eos=eos[1] if eos else "")
            return ChatFormat(file.chat_template, template.render, self._control)
        except jinja2.TemplateError as error:
            log.warning("the chat template cannot be compiled (%s): chats are refused, raw prompts are served", error)
            return ChatFormat("", ChatTemplate("").render, self._control)


TIMEOUT_S = 10.0
"""Seconds for the whole reply. Counting takes up to 7 s per megabyte (of digits, measured on one core), in a thread of
llama.cpp, which goes on when nobody waits any more."""
ADDED_TOKENS = 2
"""The begin and end tokens that a model's tokenizer may add to a text."""


def max_tokens_of(prompt: Sequence[str | int]) -> int:
    """Upper bound on the prompt's tokens: each token of a text stands for at least one byte."""
    return ADDED_TOKENS + sum(len(part.encode()) + 1 if isinstance(part, str) else 1 for part in prompt)


class TokenizerFailed(Exception):
    """Raised when llama.cpp's listener gave no usable reply."""


class Tokenizer:
    """Client of llama.cpp's listener: its Unix socket and its API key.

    The library itself has no call that counts tokens. The engine counts only when it must know before a slot takes the
    prompt.
    """

    def __init__(self, socket: Path, key: str) -> None:
        self.socket, self.key = socket, key
        # A connection that stays open would hold one of llama.cpp's threads.
        limits, headers = httpx2.Limits(max_keepalive_connections=0), {"Authorization": f"Bearer {key}"}
        transport = httpx2.AsyncHTTPTransport(uds=str(socket), verify=False, limits=limits)
        self._client = httpx2.AsyncClient(transport=transport, headers=headers, timeout=TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def count(self, prompt: Sequence[str | int]) -> int | None:
        """Count the tokens of a prompt of texts and ids, as a completion does. Returns None on an error: the prompt is
        then counted once a slot has taken it."""
        try:
            return len(await self.ids(prompt))
        except TokenizerFailed as error:
            log.warning("llama.cpp does not count tokens: %s", error)
            return None

    async def ids(self, prompt: Sequence[str | int], *, special: bool = True) -> list[int]:
        """The token ids of a prompt of texts and ids. `special`: with those that a completion has beside the text.
        Raises TokenizerFailed."""
        content = prompt[0] if len(prompt) == 1 else list(prompt)
        if isinstance(content, int):
            return [content]
        body = {"content": content, "add_special": special, "parse_special": True}
        return [int(each) for each in await self._ask("tokenize", body, "tokens")]

    async def tokens(self, prompt: Sequence[str | int]) -> list[tuple[int, bytes]]:
        """The token ids of a prompt as a completion has them, each with its text. Raises TokenizerFailed."""
        content = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], str) else list(prompt)
        body = {"content": content, "add_special": True, "parse_special": True, "with_pieces": True}
        found = [(int(each["id"]), each["piece"]) for each in await self._ask("tokenize", body, "tokens")]
        return [(number, piece.encode() if isinstance(piece, str) else bytes(piece)) for number, piece in found]

    async def text(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises TokenizerFailed."""
        return str(await self._ask("detokenize", {"tokens": list(ids)}, "content"))

    async def _ask(self, path: str, body: dict[str, Any], field: str) -> Any:
        """Raises TokenizerFailed."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._client.post(f"http://localhost/{path}", json=body)
            return answer.json()[field]
        except (httpx2.HTTPError, TimeoutError, ValueError, KeyError) as error:
            raise TokenizerFailed(f"{type(error).__name__} {error}") from error


class Generation:
    """One request from submit to its last piece. `take` runs on the thread of its slot."""

    def __init__(self, request: Request, prompt: list[str | int], context: int, *, opened: bool = False) -> None:
        """
        Args:
            prompt: rendered texts and token ids, followed by what earlier attempts generated.
            context: maximum of prompt + completion in tokens.
            opened: the prompt ends with the tag that begins reasoning.
        """
        self.id, self.prompt = request.id, prompt
        self.owner = request.tenant, request.adapter
        """Only prompts of the same tenant and adapter may be reused."""
        self.scales: Mapping[str, float] = {}
        """How much each adapter counts: all of them in llama.cpp's order."""
        self.cancelled = False
        self.prompt_tokens = 0
        """Prompt of this attempt, which includes what earlier ones generated. 0: not known yet."""
        self.generated = 0
        """Tokens generated by this attempt."""
        self.scheduled = 0.0
        """When a slot took it, by `time.monotonic`; llama.cpp begins its prefill at once."""
        self._first = 0.0
        self._request, self._context = request, context
        self._text = AnswerText(request, opened=opened)
        self._cached = 0
        self._finish = "stop" if self._text.hit else "length" if self.remaining == 0 else ""
        self._failure: Failure | None = None

    @property
    def done(self) -> bool:
        """Whether llama.cpp need not generate any more."""
        return self.stopped or bool(self._finish)

    @property
    def stopped(self) -> bool:
        """Whether it was cancelled or has failed."""
        return self.cancelled or self._failure is not None

    def begin_prompt(self, tokens: int) -> int | None:
        """Note the size of a prompt that is scored. Returns the alternatives of each row; None: no row is wanted."""
        self._admit(tokens, 0)
        return self._request.sampling.logprobs

    @property
    def scores(self) -> bool:
        """Whether its prompt's log-probabilities, or at least its size, are wanted before its first token."""
        return self._request.sampling.prompt_logprobs

    @property
    def remaining(self) -> int | None:
        """`max_tokens` minus what earlier attempts generated; None: as many as fit."""
        limit = self._request.sampling.max_tokens
        return None if limit is None else max(0, limit - self._request.past_tokens)

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the text must follow, as llama.cpp understands it. Raises UnusableSchemaError."""
        schema = chats.answer_schema(self._request)
        return None if schema is None else chats.as_grammar(schema)

    @property
    def schema_field(self) -> str:
        """The field of the request that the schema is from."""
        return "response_format" if self._request.tools is None else "tools"

    @property
    def held_tokens(self) -> int:
        """Tokens that it holds in the KV cache."""
        return self.prompt_tokens + self.generated

    def body(self, settings: LlamacppSettings, slot: int, *, reuse: bool) -> dict[str, Any]:
        """The body of the call for one slot. `reuse`: it may use the slot's cached prompt.

        Stop strings are matched here: llama.cpp loses the text it holds back for one when a length limit ends it.
        """
        sampling, remaining = self._request.sampling, self.remaining
        body: dict[str, Any] = {
            **self.placed(slot, reuse=reuse),
            "prompt": self.prompt,
            "n_predict": -1 if remaining is None else remaining,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "stream": True,
            "verbose": True,  # token ids and counts in each chunk
            "return_tokens": True,
            "return_progress": True,  # a callback per prompt batch, to notice a cancel
        }
        for name in ("temperature", "top_p", "top_k", "min_p"):
            asked = getattr(sampling, name)
            body[name] = getattr(settings, name) if asked is None else asked
        repeats = sampling.repetition_penalty
        body["repeat_penalty"] = settings.repeat_penalty if repeats is None else repeats
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**31  # llama.cpp takes 32 bits, and the largest value means "random"
        if sampling.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.logprobs is not None:
            body["logprobs"] = max(1, sampling.logprobs)
        if self.schema is not None:
            body["json_schema"] = self.schema
        return body

    def placed(self, slot: int, *, reuse: bool) -> dict[str, Any]:
        """What each of its calls has: its slot, and the adapters."""
        found: dict[str, Any] = {"id_slot": slot, "cache_prompt": reuse}
        if self.scales:
            found["lora"] = [{"id": number, "scale": scale} for number, scale in enumerate(self.scales.values())]
        return found

    def take(self, chunk: Mapping[str, Any]) -> Piece:
        """Convert a chunk into a piece, which may be empty."""
        if self.cancelled:
            return Piece(self.id)
        if error := chunk.get("error"):
            exceeds = error.get("type") == "exceed_context_size_error"
            tokens = error["n_prompt_tokens"] if exceeds else 0
            self.fail(over_context(self._request, tokens, self._context) if exceeds else refusal(error))
            return Piece(self.id)
        if progress := chunk.get("prompt_progress"):
            self._admit(progress["total"], progress["cache"])
            return Piece(self.id)
        return self._tokens(chunk["choices"][0], chunk["__verbose"])

    def fail(self, failure: Failure) -> None:
        """End the request with a failure; the first reason stands."""
        self._failure = self._failure or failure

    def last(self) -> Piece:
        """The piece that ends the request, once it is done."""
        ended = self.cancelled or self._failure
        held = Piece(self.id) if ended else self._text.rest(whole=self._finish == "stop")
        prompt, cached = self._prompt_size()
        finish = "" if self._failure else "cancelled" if self.cancelled else self._finish
        times = EngineTimes(self.scheduled, self._first, time.monotonic())
        held = replace(held, finish=finish, failure=self._failure, times=times)
        return replace(held, prompt_tokens=prompt, cached_tokens=cached)

    def _prompt_size(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached; llama.cpp's counts without what earlier attempts
        generated."""
        tokens = max(0, self.prompt_tokens - self._request.past_tokens)
        return tokens, min(self._cached, tokens)

    def _admit(self, prompt_tokens: int, cached: int) -> None:
        """Record the prompt's length when it first becomes known; fail a prompt that is too long."""
        self.prompt_tokens, self._cached = prompt_tokens, cached
        if not self._request.past and prompt_tokens + (self.remaining or 1) > self._context:
            self.fail(over_context(self._request, prompt_tokens, self._context))

    def _tokens(self, choice: Mapping[str, Any], verbose: Mapping[str, Any]) -> Piece:
        count, text = verbose["tokens_predicted"] - self.generated, choice["text"]
        self.generated += count
        prompt, cached = (0, 0) if self._first else self._prompt_size()
        self._first = self._first or time.monotonic()
        # A token without text ends the generation and is not part of the answer. Only behind the rows of a prompt it
        # has a row, as with OpenAI: lm-eval counts on it.
        rows = self._logprobs(choice) if text or self.scores else ()
        piece = self._text.feed(Piece(self.id, text, tuple(verbose["tokens"]), count, "", prompt, cached, rows))
        if self._text.hit:
            self._finish = "stop"
        elif choice["finish_reason"]:
            self._finish = choice["finish_reason"]
        elif self.held_tokens >= self._context:
            self._finish = "length"
        return piece

    def _logprobs(self, choice: Mapping[str, Any]) -> tuple[Logprob, ...]:
        """One row for each token; one for all tokens of a character of several tokens."""
        asked = self._request.sampling.logprobs
        if asked is None or not choice["logprobs"]:
            return ()
        rows = choice["logprobs"]["content"]
        return tuple(Logprob(*_token(row), tuple(map(_token, row["top_logprobs"][:asked]))) for row in rows)


def _token(row: Mapping[str, Any]) -> tuple[str, float]:
    """The text of a token and its log-probability."""
    return token_text(bytes(row["bytes"])), row["logprob"]
