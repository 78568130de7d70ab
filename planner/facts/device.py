"""Device: memory, bandwidth and arithmetic rates of one GPU (or of a CPU) that a plan counts with."""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


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
