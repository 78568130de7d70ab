"""GPU packing: how many replicas of a small model share one GPU, and each one's memory budget in absolute numbers.

The numbers are absolute, because a share of the free memory would give most to the replica that starts first. The
formulas follow the paper SLM-Pareto. TensorRT-LLM takes a budget as `KvCacheConfig.max_tokens` or
`max_gpu_total_bytes`. The planner uses this module; no decision of the scheduler does yet.
"""

from __future__ import annotations

from dataclasses import dataclass

USABLE = 0.9
"""Share of a GPU's memory that replicas may use; the rest is for the driver and for fragmentation."""
SLACK_BYTES = 1 << 30
"""Memory that each replica needs besides weights and KV cache."""
MAX_REPLICAS = 3
"""More replicas gained nothing in the paper."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's memory use in bytes, and the size of its typical request in tokens."""

    weights: int
    kv_token: int
    """Per token: 2 * layers * kv heads * head size * bytes of the cache's type."""
    activations: int = 0
    prompt: int = 512
    answer: int = 256

    @property
    def request_tokens(self) -> float:
        """Mean tokens that a request holds in the KV cache while it runs."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True, slots=True)
class Packing:
    """What each of `replicas` equal replicas gets."""

    replicas: int
    kv_bytes: int
    kv_tokens: int
    batch: int
    """Concurrent requests."""
    mps_percent: int
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, if MPS is used."""


def replicas_for(footprint: Footprint, gpu_bytes: int, knee: int) -> int:
    """How many replicas fit, each with `knee` concurrent requests, beyond which throughput hardly grows; 0: none fits.

    min(3, floor(0.9 M / (W + knee * kv_token * (L + G/2) + 1 GiB)))
    """
    each = footprint.weights + knee * footprint.kv_token * footprint.request_tokens + SLACK_BYTES
    return min(MAX_REPLICAS, int(USABLE * gpu_bytes / each))


def pack(footprint: Footprint, gpu_bytes: int, replicas: int) -> Packing:
    """The budget of each replica: 0.9 M / R - W - activations bytes of cache. Raises ValueError if that is nothing.

    All budgets and weights together are at most 0.9 of the GPU.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas: at least one is needed")
    kv_bytes = int(USABLE * gpu_bytes / replicas) - footprint.weights - footprint.activations
    kv_tokens = kv_bytes // footprint.kv_token
    batch = int(kv_tokens / footprint.request_tokens)
    if batch < 1:
        raise ValueError(f"{replicas} replicas do not fit: each would have {max(0, kv_bytes)} bytes of cache")
    return Packing(replicas, kv_bytes, kv_tokens, batch, 100 // replicas)
