"""Facts: models and devices by name, the dimensions of a model, and the readers of its config.json or GGUF.

From the dimensions follow a model's weights, its KV cache and its operations. Biases and norms, less than 0.1 % of the
weights, are left out. A device is one GPU, or a CPU: its memory, bandwidth and arithmetic rates.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")


class PlanError(ValueError):
    """Raised when no plan can be made: the message says in one line what is wrong, and it or `next_step` what would
    do."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


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


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device."""

    name: str
    source: str
    checked: str = ""
    """Public pages with the same figures, and what of them could not be checked; "": nothing was."""
    memory_bytes: Positive
    bytes_s: Positive
    """Bandwidth of its memory."""
    peak: dict[int, float]
    """Operations per second by bits of the operands; 16 is always there. Dense: without structured sparsity."""
    link_bytes_s: Positive
    """To the other devices of a server, in one direction."""
    hop_s: float
    """Latency of one step of a collective."""
    watts: float
    """Power limit; 0: unknown."""
    idle_watts: float = 0.0
    price_per_hour: float | None = None
    """US dollars of an hour on demand. Assumed: no data sheet gives it."""

    def peak_for(self, w_bits: float, a_bits: float) -> float:
        """Operations per second of a product: at the narrowest type that holds both operands.

        Weights of fewer bits than the activations are widened before they are multiplied, so they save bandwidth and
        no time of arithmetic (FlexQ's W6A8 runs at the rate of 8 bits).
        """
        wide = max(w_bits, a_bits)
        return self.peak[min((bits for bits in self.peak if bits >= wide), default=16)]

    def ridge(self, w_bits: float = 16, a_bits: float = 16) -> float:
        """Operations per byte from which arithmetic is the limit, and no longer the memory."""
        return self.peak_for(w_bits, a_bits) / self.bytes_s


MAX_NEAREST = 3
REPOSITORY = re.compile(r"config of [\w.-]+/([\w.-]*\w)")
"""In a model's source: its name on Hugging Face."""
VARIANT = re.compile(r"-(instruct|chat|it|hf|coder|base|\d{4})(?=-|$)")
"""Part of a name of other weights in the same shape."""


@cache
def models() -> dict[str, ModelShape]:
    """All models, by name."""
    return _rows("models", ModelShape)


@cache
def devices() -> dict[str, Accelerator]:
    """All devices, by name."""
    return _rows("devices", Accelerator)


def _rows(name: str, kind: type[T]) -> dict[str, T]:
    rows = tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **row}, kind, strict=False) for name, row in rows.items()}


def model(name: str) -> ModelShape:
    """By its name here or on Hugging Face. Raises PlanError."""
    short, known = name.lower().rpartition("/")[2], models()
    there = {match[1].lower(): each for each in known.values() if (match := REPOSITORY.search(each.source))}
    there |= {alias: each for each in known.values() for alias in each.also}
    plain = VARIANT.sub("", short)
    found = known.get(short) or there.get(short) or known.get(plain) or there.get(plain)
    sizes = [each for name, each in known.items() if re.fullmatch(rf"{re.escape(plain)}-\d+b", name)]
    if found is None and len(sizes) != 1:
        raise PlanError(f"no model {name!r} is known: {nearest(name, known)}, or give its --config config.json")
    return found or sizes[0]


def device(name: str) -> Accelerator:
    """Raises PlanError."""
    if found := devices().get(name.lower()):
        return found
    raise PlanError(f"no GPU {name!r} is known: {nearest(name, [*devices(), 'cpu'])}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names closest to an unknown one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=MAX_NEAREST, cutoff=0.5)
    return f"nearest are {', '.join(close)}" if close else f"known are {', '.join(known)}"


# --- a model's own description: its config.json, as Hugging Face's format has it, or the metadata of a GGUF -----------

GATED = frozenset({"silu", "swiglu", "swish"})
"""Activations of feed-forward networks that have a gate, with three matrices; others have two."""
GATED_TYPES = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Model types with a gate that their activation's name does not tell."""
TIED_UNLESS_SAID = True
"""Hugging Face's default of tie_word_embeddings."""
LEARNED_POSITIONS = {"opt": 2, "gpt2": 0, "gpt_bigcode": 0}
"""Model types with a learned table of positions, and how many rows it has beyond the context."""

MAX_STORED_BITS = 32


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes. Raises PlanError, which names what is missing or not modelled."""
    config = _object(config, name, "text_config") or config
    hidden = _number(config, name, "hidden_size", "n_embd", "d_model")
    heads = _number(config, name, "num_attention_heads", "n_head", "n_heads")
    context = _number(config, name, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    kind = str(config.get("model_type", ""))
    ffn = _optional(config, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    experts = _optional(config, "num_local_experts", "num_experts", "n_routed_experts") or 1
    kv_heads = _kv_heads(config, name) or heads
    chosen = _optional(config, "num_experts_per_tok", "experts_per_token") or 1 if experts > 1 else 1
    layers = _number(config, name, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    dense = _dense_layers(config, layers) if experts > 1 else 0
    shared = (_optional(config, "n_shared_experts") or int(kind == "llama4_text")) * (ffn or 0) if experts > 1 else 0
    latent = _optional(config, "kv_lora_rank")
    windowed = _window_layers(config, layers)
    if hidden < heads or heads % kv_heads:
        raise PlanError(f"{name}: {heads} heads and {kv_heads} of keys cannot share a hidden size of {hidden}")
    if chosen > experts:
        raise PlanError(f"{name}: a token cannot have {chosen} of {experts} experts (num_experts_per_tok)")
    return ModelShape(
        name=name,
        source="its config.json",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_optional(config, "head_dim") or hidden // heads,
        ffn=ffn or (_optional(config, "expansion_ratio") or 4) * hidden,
        ffn_matrices=3 if _is_gated(config, kind) else 2,
        vocab=_number(config, name, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", TIED_UNLESS_SAID)),
        positions=context + LEARNED_POSITIONS[kind] if kind in LEARNED_POSITIONS else 0,
        experts=experts,
        experts_per_token=chosen,
        dense_layers=dense,
        dense_ffn=(_optional(config, "intermediate_size_mlp", "intermediate_size") or 0) if dense else 0,
        shared_ffn=shared,
        attention=_latent_attention(config, name, hidden, heads, latent) if latent else 0,
        cached=latent + _number(config, name, "qk_rope_head_dim") if latent else 0,
        window=(_optional(config, "sliding_window", "attention_chunk_size") or 0) if windowed else 0,
        window_layers=windowed,
        context=context,
        stored_bits=_stored_bits(config, name),
    )


def _latent_attention(config: Mapping[str, Any], name: str, hidden: int, heads: int, latent: int) -> int:
    """Attention weights of a layer with multi-head latent attention: the matrices down to the latents and up again."""
    rotary, plain = _number(config, name, "qk_rope_head_dim"), _number(config, name, "qk_nope_head_dim")
    value, query = _number(config, name, "v_head_dim"), _optional(config, "q_lora_rank")
    wide = heads * (rotary + plain)
    queries = query * (hidden + wide) if query else hidden * wide
    return queries + hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers of a model with experts that have none."""
    step = _optional(config, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    return layers - layers // step if step > 1 else _optional(config, "first_k_dense_replace") or 0


def _window_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers that attend to a sliding window, or to a chunk, instead of the whole text."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    if (pattern := _optional(config, "sliding_window_pattern", "_sliding_window_pattern")) is not None:
        return layers - layers // pattern
    if isinstance(without := config.get("no_rope_layers"), list) and _optional(config, "attention_chunk_size"):
        return sum(map(bool, without))
    whole = config.get("use_sliding_window", True) is False or _optional(config, "sliding_window") is None
    return 0 if whole else layers


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, int], vocab: int, name: str) -> ModelShape:
    """The shape that a GGUF describes.

    Args:
        metadata: the scalars of the file's head.
        tensors: the bytes of each tensor, by name.
        vocab: tokens of the vocabulary.

    Raises PlanError, which names the key that is missing.
    """
    kind = str(metadata.get("general.architecture", ""))

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{kind}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"{name}: its metadata has no number {kind}.{key}; give its --config config.json instead")
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    shape = ModelShape(
        name=name,
        source="its GGUF metadata",
        layers=number("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", hidden // heads),
        ffn=number("expert_feed_forward_length", number("feed_forward_length")),
        ffn_matrices=3 if any("ffn_gate" in each and "inp" not in each for each in tensors) else 2,
        vocab=vocab,
        tied="output.weight" not in tensors,
        experts=number("expert_count", 1),
        experts_per_token=number("expert_used_count", 1),
        context=number("context_length"),
    )
    return msgspec.structs.replace(shape, stored_bits=8 * sum(tensors.values()) / shape.weights)


def _object(config: Mapping[str, Any], name: str, key: str) -> Mapping[str, Any]:
    """A part of a config.json, empty if it is not there. Raises PlanError."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise PlanError(f"{name}: {key!r} is no object")
    return found


def _kv_heads(config: Mapping[str, Any], name: str) -> int | None:
    if config.get("multi_query"):
        return 1
    inner = _object(config, name, "attn_config")
    return _optional(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or _optional(inner, "kv_n_heads")


def _is_gated(config: Mapping[str, Any], kind: str) -> bool:
    return kind in GATED_TYPES or str(config.get("hidden_act") or config.get("activation_function")).lower() in GATED


def _stored_bits(config: Mapping[str, Any], name: str) -> float:
    quantised = _object(config, name, "quantization_config")
    if bits := quantised.get("bits"):
        if not isinstance(bits, int | float) or not 0 < bits <= MAX_STORED_BITS:
            raise PlanError(f"{name}: {bits!r} bits of a weight (quantization_config)")
        return float(bits)
    return 8.0 if "fp8" in str(quantised.get("quant_method", "")).lower() else 16.0


def _number(config: Mapping[str, Any], name: str, *keys: str) -> int:
    found = _optional(config, *keys)
    if found is None:
        raise PlanError(f"{name}: it has no whole number {keys[0]!r}; a model's config.json has it")
    return found


def _optional(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
