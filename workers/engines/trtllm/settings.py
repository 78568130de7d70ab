"""Settings of the TensorRT-LLM engine: section [trtllm]."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.config import Positive


class TrtllmSection(msgspec.Struct, frozen=True, kw_only=True):
    """Section [trtllm]: TensorRT-LLM's LLM API. Names follow TorchLlmArgs where they pass through unchanged."""

    model: str = ""
    """A checkpoint folder, or a hub name if the machine can reach the hub."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty: the checkpoint's own."""
    manifest: Path | None = None
    """A list of hashes in sha256sum's format for checkpoint, tokenizer, draft model and adapters, which must then be
    local folders; the engine does not start unless it lists every file in them."""
    tensor_parallel_size: Positive = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: Positive = 1
    """Groups of GPUs that share the layers between them."""
    moe_expert_parallel_size: Positive | None = None
    """GPUs that share the experts; it must divide `tensor_parallel_size`."""
    max_batch_size: Positive = 256
    """Requests in flight."""
    max_num_tokens: Positive = 8192
    """Tokens of one engine step."""
    max_seq_len: Positive | None = None
    """Tokens per request (prompt + completion); not set: the model's own."""
    kv_cache: dict[str, Any] = {}
    """Fields of KvCacheConfig."""
    scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    """What is admitted to the KV cache."""
    scheduler: dict[str, Any] = {}
    """Further fields of SchedulerConfig, such as `context_chunking_policy`."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """"priority": inside the engine, higher lanes go first, and in each lane requests that lost their worker."""
    chunked_prefill: bool = True
    """Compute long prompts in pieces; without it, a prompt beyond `max_num_tokens` is refused."""
    stream_interval: Positive = 1
    """Tokens between two deltas, for the whole engine."""
    speculative: dict[str, Any] = {}
    """Fields of one speculative config, with `decoding_type`."""
    guided_decoding: Literal["", "xgrammar", "llguidance"] = ""
    """Library that constrains outputs to a JSON schema; empty: schemas are refused."""
    max_lora_rank: Positive = 64
    """Highest rank of an adapter."""
    max_loras: Positive = 4
    """Adapters on the GPU at a time."""
    max_cpu_loras: Positive = 32
    """Adapters in the memory of the host."""
    default_output: Positive = 1024
    """max_tokens of a request without one; GUARANTEED_NO_EVICT reserves them all, so keep it below the context."""
    enable_iter_perf_stats: bool = False
    """Collect the engine's own statistics per iteration, which costs time in every step."""
    return_perf_metrics: bool = False
    """Collect the engine's own timestamps of each request, for /v1/jobs/{id}/timing; without them the timing does not
    separate prefill from waiting inside the engine. Costs time in every step."""
    extra: dict[str, Any] = {}
    """Any other TorchLlmArgs field, checked against the installed version at start."""
    config: Path | None = None
    """A settings file of TensorRT-LLM (YAML), whose fields hold where neither `extra` nor a setting says otherwise."""
    watchdog_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """The engine counts as hung when requests run and it has generated no token for this long."""


SECTION = TrtllmSection


class TrtllmSettings(TrtllmSection, frozen=True, kw_only=True):
    """The settings of one model."""

    adapters: dict[str, str] = {}
    """By name, the folder of each adapter."""

    @classmethod
    def of(cls, section: TrtllmSection, adapters: Mapping[str, str]) -> TrtllmSettings:
        """The section with the model's adapters."""
        return cls(**msgspec.structs.asdict(section), adapters=dict(adapters))
