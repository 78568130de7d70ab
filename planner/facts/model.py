"""Model shape: the dimensions of a model, from which its weights, its KV cache and its operations follow.

Biases and norms, less than 0.1 % of the weights, are left out.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as its config.json describes it."""

    name: str
    source: str
    checked: str = ""
    """A public copy of its configuration with the same shape; "": none was found."""
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    """Width of the feed-forward network; of one expert, if there are several."""
    ffn_matrices: Count
    """3 with a gate (SwiGLU), else 2."""
    vocab: Count
    tied: bool
    """Whether input and output share one table of embeddings."""
    positions: int = 0
    """Rows of a learned table of positions."""
    experts: Count = 1
    experts_per_token: Count = 1
    context: Count
    """Most tokens of prompt and answer together."""
    parameters: float = 0.0
    """The published number; 0: none is known."""
    stored_bits: float = 16.0
    """Bits of one weight in the file; a GGUF's mean."""

    @property
    def attention_weights(self) -> int:
        """Of one layer: the matrices q, k, v and o."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer; of a dense model, its whole feed-forward network."""
        return self.ffn_matrices * self.hidden * self.ffn

    @property
    def router_weights(self) -> int:
        """Of one layer."""
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def head_weights(self) -> int:
        """The matrix from the last hidden state to the vocabulary."""
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """All of them."""
        layer = self.attention_weights + self.experts * self.expert_weights + self.router_weights
        tables = self.head_weights * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * layer + tables

    @property
    def active_weights(self) -> int:
        """Those that one token is multiplied with: its experts alone, and no table of embeddings but the last."""
        layer = self.attention_weights + self.experts_per_token * self.expert_weights + self.router_weights
        return self.layers * layer + self.head_weights

    def weight_bytes(self, bits: float) -> float:
        """Of all weights at so many bits each."""
        return self.weights * bits / 8

    def kv_token_bytes(self, bits: float = 16, tp: int = 1) -> float:
        """What one token takes in the KV cache of one of `tp` devices: 2 * layers * kv heads * head size * bytes.

        SLM-Pareto's form, with the hidden size instead of kv heads * head size, holds for models without grouped
        queries alone. A device holds at least one head of keys and values.
        """
        return 2 * self.layers * -(-self.kv_heads // tp) * self.head_dim * bits / 8
