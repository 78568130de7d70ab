"""Several replicas of a small model on one GPU: how many, and what each may take of its memory, in absolute numbers.

A share of what is free when a process starts would give the first one most; tokens or bytes are the same for all.
After the replication of SLM-Pareto. TensorRT-LLM takes them as `KvCacheConfig.max_tokens` or `max_gpu_total_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

USABLE = 0.9
"""Of a GPU's memory; the rest is left for its driver and for fragments."""
SLACK_BYTES = 1 << 30
"""Of each replica, beside weights and cache."""
MAX_REPLICAS = 3
"""More replicas gained nothing in the paper."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's memory, in bytes, and the requests it is for, in tokens."""

    weights: int
    kv_token: int
    """Per token: 2 * layers * kv heads * head size * bytes of the cache's type."""
    activations: int = 0
    prompt: int = 512
    answer: int = 256

    @property
    def request_tokens(self) -> float:
        """What a running request holds of the cache, in the mean over its life."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True, slots=True)
class Packing:
    """What each of `replicas` equal replicas gets."""

    replicas: int
    kv_bytes: int
    kv_tokens: int
    batch: int
    """Requests at once."""
    mps_percent: int
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, where MPS is used at all."""


def replicas_for(footprint: Footprint, gpu_bytes: int, knee: int) -> int:
    """How many fit that each run the batch beyond which more gains little (`knee`, from a sweep); 0: not one does.

    min(3, floor(0.9 M / (W + knee * kv_token * (L + G/2) + 1 GiB)))
    """
    each = footprint.weights + knee * footprint.kv_token * footprint.request_tokens + SLACK_BYTES
    return min(MAX_REPLICAS, int(USABLE * gpu_bytes / each))


def pack(footprint: Footprint, gpu_bytes: int, replicas: int) -> Packing:
    """What each of so many replicas gets: 0.9 M / R - W - activations of cache. Raises ValueError when that is nothing.

    All budgets with all weights are never more than 0.9 of the GPU.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas: at least one is needed")
    kv_bytes = int(USABLE * gpu_bytes / replicas) - footprint.weights - footprint.activations
    kv_tokens = kv_bytes // footprint.kv_token
    batch = int(kv_tokens / footprint.request_tokens)
    if kv_bytes <= 0 or batch < 1:
        raise ValueError(f"{replicas} replicas do not fit: each would have {max(0, kv_bytes)} bytes of cache")
    return Packing(replicas, kv_bytes, kv_tokens, batch, 100 // replicas)
