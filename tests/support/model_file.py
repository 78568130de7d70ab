"""As much of a model file as the prompts of the embedded engine need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from workers.engines.llamacpp.gguf import Gguf
from workers.engines.llamacpp.request import Prompts


class ModelFile:
    vocabulary = 100

    def __init__(self, template: str, control: Mapping[str, int]) -> None:
        self.chat_template, self._control = template, control

    def special_token(self, _name: str) -> None:
        return None

    def control_tokens(self) -> dict[str, int]:
        return dict(self._control)


def prompts_of(template: str = "", **control: int) -> Prompts:
    """The prompts of a model with this chat template and these control tokens."""
    return Prompts(cast(Gguf, ModelFile(template, control)))
