"""Parameters of llama.cpp: fills in the library's own structure from the settings of the embedded engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.llamacpp.tokenizer import Tokenizer

MIN_EMBEDDING_BATCH = 512
"""Tokens that a text to embed may have at least."""


def batch_of(settings: LlamacppSettings) -> int:
    """Prompt tokens per prefill batch, which for most poolings must hold a whole text."""
    return max(settings.batch, MIN_EMBEDDING_BATCH) if settings.embeddings else settings.batch


def fill(
    params: Any, settings: LlamacppSettings, path: Path, context: int, listener: Tokenizer, *, pooled: bool
) -> Any:
    """Fill in the parameters, and return them.

    Args:
        params: the library's CommonParams.
        context: tokens of a request.
        pooled: the model file says how one vector is made of those of all tokens.
    """
    threads = settings.threads or max(1, _cores() - 1)
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = settings.slots, settings.slots * context
    params.n_batch = params.n_ubatch = batch_of(settings)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = settings.gpu_layers
    # 0: this cache would share prompts between all slots, and so between tenants.
    params.cache_ram_mib = 0
    params.verbosity = -1
    # The library requires a listener: a Unix socket of this user, with a key that only this process knows.
    # It also counts tokens, for which the library has no call.
    params.hostnames, params.api_keys = [str(listener.socket)], [listener.key]
    params.ui = params.endpoint_slots = False
    if settings.embeddings:
        params.embedding = True
        name = settings.pooling or ("unspecified" if pooled else "last")
        params.pooling_type = getattr(type(params.pooling_type), f"LLAMA_POOLING_TYPE_{name.upper()}")
    return params


def _cores() -> int:
    """The number of cores this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
