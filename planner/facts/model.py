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
    also: tuple[str, ...] = ()
    """Names of other weights in the same shape."""
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
    dense_layers: int = 0
    """Layers of a model with experts that have one network instead, `dense_ffn` wide."""
    dense_ffn: int = 0
    shared_ffn: int = 0
    """Width of the expert that every token uses besides its own; 0: there is none."""
    attention: int = 0
    """Attention weights of one layer where they do not follow from the heads (multi-head latent attention); else 0."""
    cached: int = 0
    """Numbers that a token takes in a layer's cache on each device (multi-head latent attention: the latent and the
    rotary key); 0: a key and a value for each of `kv_heads`."""
    window: int = 0
    """Tokens that `window_layers` attend to and keep: their sliding window or chunk."""
    window_layers: int = 0
    context: Count
    """Most tokens of prompt and answer together."""
    parameters: float = 0.0
    """The published number; 0: none is known."""
    stored_bits: float = 16.0
    """Bits of one weight in the file; a GGUF's mean."""

    @property
    def attention_weights(self) -> int:
        """Of one layer: the matrices q, k, v and o."""
        return self.attention or self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> float:
        """Of one expert, in the mean of all layers; of a dense model, its whole feed-forward network."""
        return self.ffn_matrices * self.hidden * self.ffn * self._sparse

    @property
    def router_weights(self) -> float:
        """Of one layer, in the mean: the router, the shared expert, and the networks of layers without experts. Each
        token is multiplied with them."""
        if self.experts == 1:
            return 0
        always = self.experts + self.ffn_matrices * self.shared_ffn
        return self.hidden * (self._sparse * always + (1 - self._sparse) * self.ffn_matrices * self.dense_ffn)

    @property
    def _sparse(self) -> float:
        """The share of layers that have experts, or of a dense model all."""
        return 1 - self.dense_layers / self.layers

    @property
    def head_weights(self) -> int:
        """The matrix from the last hidden state to the vocabulary."""
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        """All of them, without encoders of images."""
        layer = self.attention_weights + self.experts * self.expert_weights + self.router_weights
        tables = self.head_weights * (1 if self.tied else 2) + self.positions * self.hidden
        return round(self.layers * layer) + tables

    @property
    def active_weights(self) -> int:
        """Those that one token is multiplied with: its experts alone, and no table of embeddings but the last."""
        layer = self.attention_weights + self.experts_per_token * self.expert_weights + self.router_weights
        return round(self.layers * layer) + self.head_weights

    def weight_bytes(self, bits: float) -> float:
        """Of all weights at so many bits each."""
        return self.weights * bits / 8

    def seen(self, context: float) -> float:
        """Tokens that a layer's attention reads of a text of `context` tokens, in the mean of all layers."""
        return context - self.window_layers / self.layers * max(0.0, context - self.window)

    def cached_numbers(self, tp: int = 1) -> int:
        """Numbers that one token takes in one layer's cache of one of `tp` devices."""
        return self.cached or 2 * -(-self.kv_heads // tp) * self.head_dim

    def kv_token_bytes(self, bits: float = 16, tp: int = 1, context: float = 0) -> float:
        """What one token takes in the KV cache of one of `tp` devices: 2 * layers * kv heads * head size * bytes.

        `context`: mean tokens of a text, of which layers with a window keep only the last; 0: all layers keep all.

        SLM-Pareto's form, with the hidden size instead of kv heads * head size, holds for models without grouped
        queries alone. A device holds at least one head of keys and values.
        """
        kept = self.seen(context) / context if context else 1
        return self.layers * self.cached_numbers(tp) * kept * bits / 8
