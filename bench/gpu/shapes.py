"""Shapes of OPT models, and what one decode step of them has to compute and to move.

Source of the formulas: the roofline of LLM inference (LLM-Viewer), with grouped heads left out: these shapes have none.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Of a bfloat16."""
HEAD = 64
"""Width of a head; OPT's small models share it."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder: `layers` blocks of `hidden` with `heads` heads, a feed-forward of 4 x hidden, tied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50272
    positions: int = 2048

    @property
    def parameters(self) -> int:
        """Of the blocks and the embeddings; biases and norms are below 0.2 %."""
        return self.layers * 12 * self.hidden**2 + (self.vocabulary + self.positions) * self.hidden

    @property
    def kv_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.hidden * BYTES


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be done at least."""

    operations: float
    moved_bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """On a device of so many operations and bytes a second, whichever takes longer."""
        return max(self.operations / flops, self.moved_bytes / bandwidth)


def decode_step(shape: DecoderShape, batch: int, context: int) -> list[Work]:
    """One token for each of `batch` sequences that have `context` tokens: the linear parts, then the attention."""
    linear = shape.layers * 12 * shape.hidden**2 + shape.vocabulary * shape.hidden
    activations = shape.layers * 18 * shape.hidden * batch * BYTES + shape.vocabulary * batch * BYTES
    return [
        Work(2.0 * linear * batch, linear * BYTES + activations),
        Work(4.0 * batch * context * shape.layers * shape.hidden, float(batch * context * shape.kv_token)),
    ]


def bound(shape: DecoderShape, batch: int, context: int, flops: float, bandwidth: float) -> float:
    """Seconds below which no step can be, its parts being one after the other."""
    return sum(part.seconds(flops, bandwidth) for part in decode_step(shape, batch, context))


SHAPES = {
    "125m": DecoderShape("opt-125m", layers=12, hidden=768, heads=12),
    "1.3b": DecoderShape("opt-1.3b", layers=24, hidden=2048, heads=32),
}
