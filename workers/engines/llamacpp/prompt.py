"""Prompt builder for llama.cpp: converts a request's prompt into a list of texts and token ids.

It uses the model file's chat template and vocabulary; llama.cpp itself tokenises (`Tokenizer`). llama.cpp recognises
control tokens in every text, so those that a message or an earlier attempt's output contains are cut in two
(workers/engines/text.py). A raw prompt is passed unchanged, with the control tokens that its caller wrote.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx2
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.engine import ChatTurn, Refused, Request
from penstock.tools import Tool, Tools
from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.request import BEGIN_TAG, OTHER_FORM, answer_begin, instruction, invalid
from workers.engines.reasoning import BEGIN, EFFORT_NAMES, END, as_written
from workers.engines.text import ControlTokens

log = logging.getLogger(__name__)

PROBE = Tool("probe", "A function.")
"""Shown to a template, to find out whether it knows tools."""

_MAX_PROMPT_CHARS = 1 << 24
"""Characters of a rendered prompt; far more than any context holds."""


class RenderedPrompt(NamedTuple):
    """A prompt as one call takes it."""

    parts: list[str | int]
    opened: bool
    """It ends with the tag that begins reasoning."""


def effort_fields(reasoning: str) -> dict[str, Any]:
    """The variables of a chat template that say how much the model shall reason."""
    if reasoning in ("", "default"):
        return {}
    return {"enable_thinking": reasoning != "none"} | ({"reasoning_effort": reasoning} if reasoning != "none" else {})


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
        self._source = source
        self._template = environment.from_string(source)

    def mentions(self, *words: str) -> bool:
        """Whether its source holds one of these words."""
        return any(word in self._source for word in words)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: str = "",
        *,
        begins: bool = True,
    ) -> str:
        """Render the prompt, with `begins` up to where the assistant's answer begins; `reasoning` as in Request. Raises
        Refused if the template rejects it."""
        try:
            prompt = self._template.render(
                messages=messages,
                add_generation_prompt=begins,
                tools=tools,
                **self._special,
                **effort_fields(reasoning),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # a template is a program and may raise any of these on a conversation that its author did not expect
            raise Refused(
                invalid(f"this model's chat template does not take the conversation: {error}", "messages")
            ) from None
        if len(prompt) > _MAX_PROMPT_CHARS:
            raise Refused(
                invalid(f"the rendered conversation has {len(prompt)} characters; shorten the messages", "messages")
            )
        return prompt

    def knows_tools(self) -> bool:
        """Whether it shows tools to the model, and has it mark its calls in a way that the engine reads."""
        if BEGIN_TAG not in self._source or OTHER_FORM in self._source:
            return False
        asked = [{"role": "user", "content": "a"}]
        try:
            return self.render(asked, [PROBE.shown]) != self.render(asked)
        except Refused:
            return False


def _raise(message: object) -> NoReturn:
    """A template refuses a conversation."""
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: the built-in filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def messages_of(turns: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Turns as templates take them: with the arguments of calls as objects, and the names of the functions in the
    turns that hold their results."""
    names = {call.id: call.name for turn in turns for call in turn.calls}
    messages = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            calls = [{"name": call.name, "arguments": _arguments(call.arguments)} for call in turn.calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if turn.call_id:
            message |= {"tool_call_id": turn.call_id, "name": names.get(turn.call_id, "")}
        messages.append(message)
    return messages


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class Prompts:
    """Builds the prompts of one model."""

    def __init__(self, file: Gguf) -> None:
        self._vocabulary = file.vocabulary
        self._bos = file.special_token("bos")
        self._control_ids = file.control_tokens()
        self._control = ControlTokens(self._control_ids)
        self._template = self._compiled(file)
        self._tools = self._template is not None and self._template.knows_tools()

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def tools(self) -> bool:
        """Whether the chat template knows tools."""
        return self._tools

    @property
    def reasoning(self) -> bool:
        """Whether the chat template knows reasoning between tags."""
        return self._template is not None and self._template.mentions(END)

    @property
    def reasoning_effort(self) -> bool:
        """Whether the chat template can be told how much the model shall reason, or whether at all."""
        return self._template is not None and self._template.mentions(*EFFORT_NAMES)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises Refused for a token that the model does not have."""
        for each in ids:
            if not 0 <= each < self._vocabulary:
                raise Refused(invalid(f"token {each} is not one of this model's {self._vocabulary}", param))

    def of(self, request: Request, *, begins: bool = True) -> RenderedPrompt:
        """The prompt of a request, of a conversation up to where the answer begins (`begins`). Raises Refused, also for
        a token of its logit_bias that the model does not have."""
        self.check_ids([*request.sampling.logit_bias], "logit_bias")  # llama.cpp would ignore it
        parts, past = self._prompt(request, begins=begins), request.past
        opened = isinstance(last := parts[-1], str) and last.rstrip().endswith(BEGIN)
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
            parts = self._conversation(request.turns, request.tools, request.reasoning, begins=begins)
        else:
            parts = [*request.ids]
        if not parts:
            raise Refused(invalid("the prompt is empty", "prompt"))
        self.check_ids([part for part in parts if isinstance(part, int)], "prompt")
        return parts

    def _conversation(
        self, turns: Sequence[ChatTurn], tools: Tools | None, reasoning: str, *, begins: bool
    ) -> list[str | int]:
        if self._template is None:
            raise Refused(invalid("this model has no chat template: use /v1/completions", "messages"))
        offered = None if tools is None else [tool.shown for tool in tools.callable]
        if tools is not None and not self._tools:
            before = turns[0].content + "\n\n" if turns[0].role == "system" else ""
            told = ChatTurn("system", before + instruction(tools))
            turns, offered = [told, *(turns[1:] if before else turns)], None
        (messages, shown), mark = self._control.mark((messages_of(turns), offered))
        text = self._template.render(messages, shown, reasoning, begins=begins)
        if tools is not None and tools.forced and self._tools:
            text += answer_begin(tools)
        bos = self._bos
        first: list[str | int] = []
        if bos and bos[1] and text.startswith(bos[1]):
            first, text = [bos[0]], text.removeprefix(bos[1])  # as an id, so that llama.cpp does not add a second one
        return [*first, *(text.split(mark) if mark else [text])]

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
        raise Refused(
            invalid("a message spells a control token of this model, which it cannot take as text", "messages")
        )

    def _compiled(self, file: Gguf) -> ChatTemplate | None:
        if not file.chat_template:
            return None
        bos, eos = self._bos, file.special_token("eos")
        try:
            return ChatTemplate(file.chat_template, bos=bos[1] if bos else "", eos=eos[1] if eos else "")
        except jinja2.TemplateError as error:
            log.warning("the chat template cannot be compiled (%s): chats are refused, raw prompts are served", error)
            return None


TIMEOUT_S = 10.0
"""Seconds for the whole reply. Counting takes up to 7 s per megabyte (of digits, measured on one core), in a thread of
llama.cpp, which goes on when nobody waits any more."""
MIN_TOLD_BYTES, MAX_TOLD_BYTES, TOLD_BYTES_PER_TOKEN = 256 << 10, 1 << 20, 8
"""Of a text whose token ids are told: enough for any text that fits into the context, between the first two."""
ADDED_TOKENS = 2
"""The begin and end tokens that a model's tokenizer may add to a text."""


def max_tokens_of(prompt: Sequence[str | int]) -> int:
    """Upper bound on the prompt's tokens: each token of a text stands for at least one byte."""
    return ADDED_TOKENS + sum(len(part.encode()) + 1 if isinstance(part, str) else 1 for part in prompt)


def max_told_bytes(context: int) -> int:
    """Bytes of a text whose token ids are told, for a model with a context of so many tokens."""
    return min(MAX_TOLD_BYTES, max(MIN_TOLD_BYTES, TOLD_BYTES_PER_TOKEN * context))


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
        transport = httpx2.AsyncHTTPTransport(
            uds=str(socket), verify=False, limits=httpx2.Limits(max_keepalive_connections=0)
        )
        self._client = httpx2.AsyncClient(
            transport=transport, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
        )

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
