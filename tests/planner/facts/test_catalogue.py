"""Models and devices agree with themselves and with what is published; unknown names name near ones; a config.json or
GGUF gives the same shape, or a message that names what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts import catalogue
from planner.facts.catalogue import (
    ModelShape,
    PlanError,
    device,
    devices,
    from_config,
    from_gguf,
    model,
    models,
)


@pytest.mark.parametrize("shape", models().values(), ids=lambda shape: shape.name)
def test_the_weights_of_a_shape_are_the_published_number(shape: ModelShape) -> None:
    """Biases and norms, which are left out, are less than a thousandth."""
    assert shape.weights == pytest.approx(shape.parameters, rel=1e-3)
    assert shape.source and shape.heads % shape.kv_heads == 0


def test_ridge_points_are_those_of_the_data_sheets() -> None:
    """Operations per byte."""
    found = {name: round(device(name).ridge()) for name in ("a100-40gb", "h100", "h200")}
    assert found == {"a100-40gb": 201, "h100": 295, "h200": 206}
    assert all(each.source and 16 in each.peak for each in devices().values())


def test_a_product_runs_at_the_narrowest_type_that_holds_both_operands() -> None:
    h200, b200 = device("h200"), device("b200")
    assert h200.peak_for(4, 16) == h200.peak[16]  # weights alone are narrow: they are widened first
    assert h200.peak_for(6, 8) == h200.peak_for(8, 8) == h200.peak[8]
    assert b200.peak_for(4, 4) == b200.peak[4] and h200.peak_for(4, 4) == h200.peak[8]
    assert device("a100-40gb").peak_for(32, 32) == device("a100-40gb").peak[16]


def test_a_key_of_grouped_queries_is_kept_once_for_its_group() -> None:
    """2 * layers * kv heads * head size * bytes; a device holds one head at least."""
    llama = model("llama-3.1-8b")
    assert llama.kv_token_bytes() == 2 * 32 * 8 * 128 * 2
    assert llama.kv_token_bytes(8) == llama.kv_token_bytes() / 2
    assert llama.kv_token_bytes(tp=8) == llama.kv_token_bytes(tp=16) == llama.kv_token_bytes() / 8
    assert model("opt-1.3b").kv_token_bytes() == 196_608  # the paper's 2 * 2 * h * L


def test_latent_attention_keeps_one_latent_for_all_heads_on_each_device() -> None:
    deepseek = model("deepseek-v3")
    assert deepseek.kv_token_bytes() == deepseek.kv_token_bytes(tp=8) == 61 * 576 * 2


def test_an_unknown_name_names_near_ones_or_all() -> None:
    for name, near in (("opt-13c", "opt-13b"), ("LLAMA3.1-8b", "llama-3.1-8b")):
        with pytest.raises(PlanError, match=near):
            model(name)
    with pytest.raises(PlanError, match=r"known are .*h200.*mi300x"):
        device("toaster")
    assert device("H200") is device("h200") and catalogue.nearest("h20", ["h200"]) == "nearest are h200"


@pytest.mark.parametrize(("name", "shape"), [
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"), ("google/gemma-3-4b-it", "gemma-3-4b"),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3"), ("opt-1.3b", "opt-1.3b"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("deepseek-v3-0324", "deepseek-v3"),
    ("mistral-nemo", "mistral-nemo-12b"),
    ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-24b"),
])  # fmt: skip
def test_a_model_has_its_name_on_hugging_face(name: str, shape: str) -> None:
    assert model(name) is models()[shape]


LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "hidden_act": "silu", "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA,
    "opt-1.3b": {
        "model_type": "opt", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32, "ffn_dim": 8192,
        "activation_function": "relu", "vocab_size": 50272, "max_position_embeddings": 2048,
    },
    "gpt-j-6b": {
        "model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_inner": None,
        "activation_function": "gelu_new", "vocab_size": 50400, "n_positions": 2048, "tie_word_embeddings": False,
    },
    "mpt-7b": {
        "model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "expansion_ratio": 4, "vocab_size": 50432,
        "max_seq_len": 2048,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "hidden_act": "silu", "vocab_size": 129280, "tie_word_embeddings": False, "max_position_embeddings": 163840,
    },
    "mixtral-8x7b": LLAMA | {
        "model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
SHAPE = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "ffn_matrices", "experts", "experts_per_token",
    "dense_layers", "dense_ffn", "shared_ffn", "attention", "cached", "window", "window_layers",
)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shape_of_the_catalogue(name: str) -> None:
    """Families name their fields differently."""
    found, known = from_config(CONFIGS[name], "mine"), model(name)
    assert {key: getattr(found, key) for key in SHAPE} == {key: getattr(known, key) for key in SHAPE}
    assert (found.weights, found.context, found.name) == (known.weights, known.context, "mine")


@pytest.mark.parametrize(
    ("quantised", "bits"), [({"bits": 4, "quant_method": "awq"}, 4), ({"quant_method": "fp8"}, 8), ({}, 16)]
)
def test_a_quantised_config_says_its_bits(quantised: dict[str, Any], bits: int) -> None:
    assert from_config({**LLAMA, "quantization_config": quantised}, "m").stored_bits == bits


@pytest.mark.parametrize(("more", "layers"), [
    ({"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16),
    ({"sliding_window": 1024, "sliding_window_pattern": 6}, 27),
    ({"attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 8}, 24),
    ({"sliding_window": 4096}, 32),
    ({"sliding_window": 4096, "use_sliding_window": False}, 0),
    ({"sliding_window": None}, 0),
])  # fmt: skip
def test_layers_with_a_window_keep_only_its_tokens(more: dict[str, Any], layers: int) -> None:
    found = from_config({**LLAMA, **more}, "m")
    assert found.window_layers == layers
    whole, window = from_config(LLAMA, "m").kv_token_bytes(), found.window
    long = 8 * (window or 1000)
    assert found.kv_token_bytes(context=long) == pytest.approx(whole * (32 - layers * 7 / 8) / 32)
    assert found.kv_token_bytes(context=window or 1000) == found.kv_token_bytes() == whole


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.feed_forward_length": 1536,
    "llama.context_length": 8192,
}


def test_a_gguf_gives_the_shape_of_the_catalogue() -> None:
    """Its bits are those of the file: here 8.5, of 34 bytes for 32 weights. A number that it lacks is named."""
    known = model("smollm2-135m")
    tensors = {"blk.0.ffn_gate.weight": known.weights // 32 * 34}
    found = from_gguf(GGUF, tensors, 49152, "mine")
    assert {key: getattr(found, key) for key in SHAPE} == {key: getattr(known, key) for key in SHAPE}
    assert found.weights == known.weights and found.stored_bits == pytest.approx(8.5)
    with pytest.raises(PlanError, match=r"llama\.block_count"):
        from_gguf({**GGUF, "llama.block_count": 0}, {}, 49152, "mine")


@pytest.mark.parametrize(("changed", "says"), [
    *(({key: None}, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")),
    ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ({"text_config": 5}, "'text_config' is no object"),
    ({"quantization_config": "int4"}, "'quantization_config' is no object"),
    ({"quantization_config": {"bits": "four"}}, "'four' bits of a weight"),
    ({"quantization_config": {"bits": -4}}, "-4 bits of a weight"),
    ({"attn_config": [1]}, "'attn_config' is no object"),
    ({"hidden_size": 16}, "cannot share a hidden size of 16"),
    ({"num_key_value_heads": 5}, "32 heads and 5 of keys"),
    ({"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
])  # fmt: skip
def test_a_config_that_makes_no_sense_or_lacks_a_field(changed: dict[str, Any], says: str) -> None:
    config = {name: value for name, value in {**LLAMA, **changed}.items() if value is not None}
    with pytest.raises(PlanError, match=f"mine: .*{says}"):
        from_config(config, "mine")


def test_what_a_config_need_not_say() -> None:
    """Of a model with pictures, the text part is counted; an empty list is no part of a config."""
    assert from_config({"model_type": "llava", "text_config": LLAMA}, "m").layers == 32
    assert from_config({**LLAMA, "attn_config": []}, "m").layers == 32
