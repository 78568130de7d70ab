"""Settings of the TensorRT-LLM engine: section [trtllm]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from workers.settings import Positive


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


SECTION = TrtllmSettings
