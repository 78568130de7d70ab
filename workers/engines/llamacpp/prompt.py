"""Prompt builder for llama.cpp: converts a request's prompt into a list of texts and token ids.

It uses the model file's chat template and vocabulary; llama.cpp itself tokenises. llama.cpp recognises control tokens
in every text, so those that a message or an earlier attempt's output contains are cut in two
(workers/engines/control_tokens.py). A raw prompt is passed unchanged, with the control tokens that its caller wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from penstock.engine import ChatTurn, Refused
from workers.engines.control_tokens import ControlTokens
from workers.engines.llamacpp.chat_template import ChatTemplate, TemplateBroken
from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.request import invalid, is_chat

_log = logging.getLogger(__name__)


class Prompts:
    """Builds the prompts of one model."""

    def __init__(self, file: Gguf) -> None:
        self._vocabulary = file.vocabulary
        self._bos = file.special_token("bos")
        self._control_ids = file.control_tokens()
        self._control = ControlTokens(self._control_ids)
        self._template = self._compiled(file)

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(
        self, prompt: Sequence[ChatTurn] | str | Sequence[int], past: Sequence[tuple[str, Sequence[int], int]] = ()
    ) -> list[str | int]:
        """The prompt followed by what earlier attempts generated, as one call takes it. Raises Refused."""
        parts = self._prompt(prompt)
        generated = self._past(past)
        if generated and isinstance(last := parts[-1], str) and isinstance(first := generated[0], str):
            parts[-1], generated = last + first, generated[1:]  # a token may span the boundary
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
        except TemplateBroken as error:
            _log.warning("%s: chats are refused, raw prompts are served", error)
            return None
