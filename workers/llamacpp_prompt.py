"""Turns what a request asks into what llama.cpp is given: texts and token ids, mixed.

It knows a model file's template and vocabulary; it does not tokenise, llama.cpp does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from streaming.messages import Turn
from workers.chat_template import ChatTemplate, TemplateBroken
from workers.engine import Refused
from workers.gguf import Gguf
from workers.llamacpp_request import invalid, is_chat

_log = logging.getLogger(__name__)


class Prompts:
    """The prompts of one model."""

    def __init__(self, file: Gguf) -> None:
        self._vocabulary = file.vocabulary
        self._bos = file.special_token("bos")
        self._template = self._compiled(file)

    @property
    def chat(self) -> bool:
        """Whether the model can be given a conversation."""
        return self._template is not None

    def render(self, prompt: Sequence[Turn] | str | Sequence[int]) -> list[str | int]:
        """Raises Refused."""
        if isinstance(prompt, str):
            parts: list[str | int] = [prompt] if prompt else [self._bos[0]] if self._bos else []
        elif is_chat(prompt):
            parts = self._conversation([turn for turn in prompt if isinstance(turn, Turn)])
        else:
            parts = [number for number in prompt if isinstance(number, int)]
        if not parts:
            raise Refused(invalid("the prompt is empty", "prompt"))
        for part in parts:
            if isinstance(part, int) and not 0 <= part < self._vocabulary:
                raise Refused(invalid(f"token {part} is not one of this model's {self._vocabulary}", "prompt"))
        return parts

    def _conversation(self, turns: Sequence[Turn]) -> list[str | int]:
        if self._template is None:
            raise Refused(invalid("this model has no chat template: use /v1/completions", "messages"))
        text, bos = self._template.render(turns), self._bos
        if bos and bos[1] and text.startswith(bos[1]):
            return [bos[0], text.removeprefix(bos[1])]  # as an id, so that llama.cpp does not add a second one
        return [text]

    def _compiled(self, file: Gguf) -> ChatTemplate | None:
        if not file.chat_template:
            return None
        bos, eos = self._bos, file.special_token("eos")
        try:
            return ChatTemplate(file.chat_template, bos=bos[1] if bos else "", eos=eos[1] if eos else "")
        except TemplateBroken as error:
            _log.warning("%s: chats are refused, raw prompts are served", error)
            return None
