"""The settings of a worker and of the engines it may drive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [worker]."""

    prefetch: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Jobs held beyond what runs now, so that a free slot is filled without a round trip."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long running jobs may finish after SIGTERM; what is left is handed back to the queue."""
    reserved_slots: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Slots that lane batch may not fill, so that a chat does not wait for a line of a batch to end. None: one in
    sixty-four, at least one: where there are many slots, one is free again in no time."""
    checkpoint_frames: Positive = 4096
    """Steps that a running job may keep in its worker's log: then its tokens are logged anew in one piece, and the
    steps before are trimmed. A job of very many tokens may keep a quarter as many steps."""
    poll_ms: Positive = 250
    """How often an idle worker looks at its lanes even if nobody woke it."""


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [sim]: the simulated engine's time model."""

    step_ms: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    step_ms_per_text: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds more of a step for each text that gets a token in it."""
    prefill_ms: Annotated[float, msgspec.Meta(ge=0)] = 25.0
    prefill_ms_per_1k_tokens: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Milliseconds more of the steps in which 1,000 prompt tokens are computed, which hold up every text; prompts are
    computed one after the other. 0: prompts of any size cost nothing more."""
    prefill_batch: Positive = 512
    """Prompt tokens of one step, where they cost time."""
    slots: Positive = 256
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens the simulated KV cache holds; 0: as many as the slots need."""
    kv_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    context: Positive = 8192
    load_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Simulated time to load the weights."""
    cache_prompts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompts whose prefill is not simulated again for what they have in common with a new one of the same tenant."""
    faults: bool = False
    """Obey fault words in prompts ([[crash@5]], [[hang@5]], [[fail@5]], [[slow@5]]). For tests only."""
    authors: bool = False
    """Put four capital letters, drawn anew for each request the engine is given, behind each token: a text shows which
    run of an engine gave which token, as sampled text would. For tests only."""


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


class TrtllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [trtllm]: TensorRT-LLM's LLM API. Names follow TorchLlmArgs where they pass through unchanged."""

    model: str = ""
    """A checkpoint folder (or a hub name, if your machine may reach a hub)."""
    tokenizer: str = ""
    manifest: Path | None = None
    """The same for the checkpoint, tokenizer, draft model and adapters; they must then be folders of this machine."""
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    moe_expert_parallel_size: Positive | None = None
    max_batch_size: Positive = 256
    max_num_tokens: Positive = 8192
    max_seq_len: Positive | None = None
    kv_cache: dict[str, Any] = {}
    """Fields of KvCacheConfig."""
    scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """"priority": requests that lost their worker overtake new ones inside the engine."""
    chunked_prefill: bool = True
    stream_interval: Positive = 1
    speculative: dict[str, Any] = {}
    """Fields of one speculative config, with `decoding_type`."""
    guided_decoding: Literal["", "xgrammar", "llguidance"] = ""
    lora: dict[str, str] = {}
    """Adapters by name: the folder of each."""
    adapter: str = ""
    """The adapter of `lora` this model's requests use; "": the bare checkpoint."""
    max_lora_rank: Positive = 64
    default_output: Positive = 1024
    """Tokens for a request that names no limit; GUARANTEED_NO_EVICT reserves them all, so not the whole context."""
    enable_iter_perf_stats: bool = False
    """The engine's own statistics per iteration; they cost time in every step."""
    return_perf_metrics: bool = False
    """The engine's own times of each request, for /v1/jobs/{id}/timing; without them waiting inside the engine and
    prefill are not told apart. They cost time in every step."""
    extra: dict[str, Any] = {}
    """Any other TorchLlmArgs field, checked against the installed version at start."""
    watchdog_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Running requests and no token for so long: the engine is taken for hung."""
