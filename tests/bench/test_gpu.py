"""The arithmetic of `bench gpu`: what needs no GPU."""

import pytest

from bench.gpu.__main__ import main
from bench.gpu.knee import knee
from bench.gpu.shapes import SHAPES, bound, decode_step


def test_shapes_have_the_parameters_that_their_names_say() -> None:
    assert SHAPES["125m"].parameters == pytest.approx(125e6, rel=0.01)
    assert SHAPES["1.3b"].parameters == pytest.approx(1.315e9, rel=0.01)
    assert (SHAPES["125m"].kv_token, SHAPES["1.3b"].kv_token) == (36_864, 196_608)


def test_one_sequence_is_bound_by_the_weights_and_many_by_arithmetic_or_keys() -> None:
    shape, flops, bandwidth = SHAPES["1.3b"], 800e12, 4e12
    weights = 2 * (shape.layers * 12 * shape.hidden**2 + shape.vocabulary * shape.hidden)
    assert bound(shape, 1, 0, flops, bandwidth) == pytest.approx(weights / bandwidth, rel=0.01)
    linear, attention = decode_step(shape, 512, 640)
    assert linear.operations / flops > linear.moved_bytes / bandwidth
    assert attention.moved_bytes == 512 * 640 * shape.kv_token
    assert attention.moved_bytes / bandwidth > attention.operations / flops


@pytest.mark.parametrize("batch", [1, 8, 64, 512])
def test_a_bound_grows_with_batch_and_context(batch: int) -> None:
    shape = SHAPES["125m"]
    least = bound(shape, batch, 512, 8e14, 4e12)
    assert least < bound(shape, batch + 1, 512, 8e14, 4e12) and least < bound(shape, batch, 513, 8e14, 4e12)


def test_the_knee_of_an_analytic_curve() -> None:
    """thr(B) = B / (1 + B/32): doubling from B gives 2 (1 + B/32) / (1 + B/16) - 1, below 0.10 from B = 144 on."""
    rows = [{"batch": 2**i, "tokens_per_s": 2**i / (1 + 2**i / 32)} for i in range(11)]
    assert knee(rows) == 256
    assert knee(rows[:5]) is None


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "error: " in capsys.readouterr().out
