"""Settings of the embedded engine: section [llamacpp]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from workers.settings import Positive


class LlamacppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [llamacpp]: the embedded CPU engine."""

    path: Path | None = None
    """A GGUF file; None: the default model, fetched once."""
    manifest: Path | None = None
    """A list of hashes as sha256sum writes it; every file of the model must be in it, or the engine does not start."""
    slots: Positive = 4
    context: Positive = 4096
    """Tokens per request (prompt + completion)."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: all cores but one (llama.cpp's threads spin; the other processes need a core)."""
    gpu_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Layers to put on a GPU, where the installed xllamacpp was built for one."""
    batch: Positive = 128
    """Prompt tokens computed in one go. Between two goes other requests get their token, and a cancel is seen."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """This and the next four apply where a request does not say; requests cannot set the last three. 0: always the
    likeliest token, with which the default model answers best (docs/models.md) and a lost text is resumed exactly."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 40
    """0: off."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    """0: off."""
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.1
    """1: off. Looks back 64 tokens, the prompt's included."""
    hang_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Running requests and no sign of life from llama.cpp for so long: the engine is taken for hung."""


SECTION = LlamacppSettings
