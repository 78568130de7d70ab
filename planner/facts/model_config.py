"""Reader of a model's own description: its config.json, as Hugging Face's format has it, or the metadata of a GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from planner.facts.catalogue import PlanError
from planner.facts.model import ModelShape

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
