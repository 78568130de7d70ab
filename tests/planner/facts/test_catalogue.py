"""Models and devices: their figures agree with themselves and with what is published; unknown names name near ones."""

from __future__ import annotations

import pytest

from planner.facts import catalogue
from planner.facts.catalogue import ModelShape, UnknownName, device, devices, model, models


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
        with pytest.raises(UnknownName, match=near):
            model(name)
    with pytest.raises(UnknownName, match=r"known are .*h200.*mi300x"):
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
