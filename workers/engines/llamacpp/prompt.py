"""Turns what a request asks into what llama.cpp is given: texts and token ids, mixed.

It knows a model file's template and vocabulary; it does not tokenise, llama.cpp does. llama.cpp reads control tokens
in every text it is given, so those that a message or an earlier attempt's output spells are cut into two texts
(workers/engines/control_tokens.py). A raw prompt is left as it is: all of it is its caller's, control tokens included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from streaming.jobs.job import ChatTurn
from workers.engines.base import Refused
from workers.engines.control_tokens import ControlTokens
from workers.engines.llamacpp.chat_template import ChatTemplate, TemplateBroken
from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.request import invalid, is_chat

_log = logging.getLogger(__name__)


class Prompts:
    """The prompts of one model."""

    def __init__(self, file: Gguf) -> None:
        self._vocabulary = file.vocabulary
        self._bos = file.special_token("bos")
        self._control_ids = file.control_tokens()
        self._control = ControlTokens(self._control_ids)
        self._template = self._compiled(file)

    @property
    def chat(self) -> bool:
        """Whether the model can be given a conversation."""
        return self._template is not None

    def render(
        self, prompt: Sequence[ChatTurn] | str | Sequence[int], past: Sequence[tuple[str, Sequence[int], int]] = ()
    ) -> list[str | int]:
        """The prompt and what earlier attempts generated behind it, as one call takes it. Raises Refused."""
        parts = self._prompt(prompt)
        generated = self._past(past)
        if generated and isinstance(last := parts[-1], str) and isinstance(first := generated[0], str):
            parts[-1], generated = last + first, generated[1:]  # tokens do not end where an attempt did
        return self._mixed([*parts, *generated])

    def _prompt(self, prompt: Sequence[ChatTurn] | str | Sequence[int]) -> list[str | int]:
        if isinstance(prompt, str):
            parts: list[str | int] = [prompt] if prompt else [self._bos[0]] if self._bos else []
        elif is_chat(prompt):
            parts = self._conversation([turn for turn in prompt if isinstance(turn, ChatTurn)])
        else:
            parts = [number for number in prompt if isinstance(number, int)]
        if not parts:
            raise Refused(invalid("the prompt is empty", "prompt"))
        for part in parts:
            if isinstance(part, int) and not 0 <= part < self._vocabulary:
                raise Refused(invalid(f"token {part} is not one of this model's {self._vocabulary}", "prompt"))
        return parts

    def _conversation(self, turns: Sequence[ChatTurn]) -> list[str | int]:
        if self._template is None:
            raise Refused(invalid("this model has no chat template: use /v1/completions", "messages"))
        marked, mark = self._control.mark(turns)
        text, bos = self._template.render(marked), self._bos
        first: list[str | int] = []
        if bos and bos[1] and text.startswith(bos[1]):
            first, text = [bos[0]], text.removeprefix(bos[1])  # as an id, so that llama.cpp does not add a second one
        return [*first, *(text.split(mark) if mark else [text])]

    def _past(self, past: Sequence[tuple[str, Sequence[int], int]]) -> list[str | int]:
        """What earlier attempts generated: token ids where all are known, else the text they stand for."""
        parts: list[str | int] = []
        for known, deltas in groupby(past, key=lambda delta: delta[2] > 0 and len(delta[1]) == delta[2]):
            rows = list(deltas)
            if known:
                parts.extend(number for _, ids, _ in rows for number in ids)
            else:
                parts.extend(self._control.cut("".join(text for text, _, _ in rows)))
        return [part for part in parts if part != ""]

    def _mixed(self, parts: list[str | int]) -> list[str | int]:
        """The same parts with at least one id among them if there are several: nothing but texts would be that many
        prompts to llama.cpp. Raises Refused."""
        parts = [part for part in parts if part != ""] or parts
        if len(parts) == 1 or any(isinstance(part, int) for part in parts):
            return parts
        for place, part in enumerate(parts):
            for text, number in self._control_ids.items():
                before, found, after = str(part).partition(text)
                if found:  # the template's own
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
        except TemplateBroken as error:
            _log.warning("%s: chats are refused, raw prompts are served", error)
            return None
