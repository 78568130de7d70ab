"""Settings of the embedded engine: section [llamacpp]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from penstock.config import Positive
from penstock.engine import MAX_LOGPROBS, Capabilities


class LlamacppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [llamacpp]: the embedded CPU engine."""

    path: Path | None = None
    """A GGUF file; None: the default model, fetched once."""
    manifest: Path | None = None
    """A list of hashes in sha256sum's format; the engine does not start unless it lists every file of the model."""
    slots: Positive = 4
    """Texts generated at a time."""
    context: Positive = 4096
    """Tokens per request (prompt + completion)."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: all cores but one, which is left to the other processes because llama.cpp's threads spin."""
    gpu_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Layers to put on a GPU, where the installed xllamacpp was built for one."""
    batch: Positive = 128
    """Prompt tokens per prefill batch. Between batches other requests get their token, and a cancel takes effect."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """This and the next four are defaults for requests. 0: always the likeliest token, with which the default model
    answers best (docs/models.md) and an interrupted text is resumed exactly."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Of a request that names none."""
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 40
    """0: off."""
    min_p: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    """0: off."""
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.1
    """1: off. Applies to the last 64 tokens, those of the prompt included."""
    embeddings: bool = False
    """Also make vectors of texts (/v1/embeddings). `batch` is then at least 512: some models take no longer texts.
    Prompts of chats are not kept in the cache between requests."""
    pooling: Literal["", "cls", "last", "rank"] = ""
    """Whose vector stands for the text: that of its first token or of its last one; "": as the model file says, else
    the last one's. rank: the model ranks documents (/v1/rerank) and makes no vectors. A mean is only for models whose
    file says so: of others, llama.cpp leaves out tokens that it has in its cache."""
    hang_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """The engine counts as hung when requests run and llama.cpp has sent nothing for this long."""


SECTION = LlamacppSettings
ALWAYS = ("json_schema", "penalties", "token_prompts", "top_k", "min_p", "repetition_penalty", "logit_bias",
          "ignore_eos", "tokenize", "prompt_logprobs")  # fmt: skip
"""What every model can do."""


def capabilities(settings: LlamacppSettings, chats: Mapping[str, bool]) -> Capabilities:
    """What a model can do. `chats`: what follows from its chat template."""
    ranks = settings.embeddings and settings.pooling == "rank"
    known = dict.fromkeys(ALWAYS, True) | {"embed": settings.embeddings and not ranks, "rerank": ranks}
    return Capabilities(**known, **chats, logprobs=MAX_LOGPROBS, forced_tools=chats["chat"])
