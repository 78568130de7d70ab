"""Figures of a plan as people read them: three digits and a unit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision, RequestLengths

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A duration: 1.23 s, 12.3 ms, 123 us."""
    size, unit = next(((size, unit) for size, unit in TIMES if value >= size), TIMES[-1])
    return f"{three(value / size)} {unit}"


def gb(size: float) -> str:
    """Bytes as GB of 1e9: 1.2, 123."""
    return three(size / 1e9)


def three(value: float) -> str:
    """A number with three digits, or all before the point."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def given(
    model: ModelShape, device: Accelerator, lengths: RequestLengths | None = None, precision: Precision | None = None
) -> dict[str, Any]:
    """The inputs of a plan, for JSON: names, sources and lengths."""
    found: dict[str, Any] = {
        "model": model.name,
        "model_source": model.source,
        "model_checked": model.checked or None,
        "parameters": model.weights,
        "gpu": device.name,
        "gpu_source": device.source,
        "gpu_checked": device.checked or None,
    }
    if lengths is not None:
        found |= {"in": lengths.prompt, "out": lengths.answer}
    if precision is not None:
        found |= {f"{name}_bits": bits for name, bits in asdict(precision).items()}
    return found
