"""Answers of plans: their tables, figures with three digits and a unit, and their inputs for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from planner.load import PlanInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A table of a plan; its header names the units."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @classmethod
    def of(cls, items: Iterable[T], columns: Mapping[str, Callable[[T], str]], title: str = "") -> PlanTable:
        """A row for each item; `columns`: what each column says of it."""
        return cls(list(columns), [[say(item) for say in columns.values()] for item in items], title)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What a plan has found."""

    value: Mapping[str, Any]
    """For --json; `advice` is added."""
    tables: Sequence[PlanTable]
    advice: str
    """A sentence with its reason."""
    notes: Sequence[str] = field(default_factory=tuple)
    exit_code: int = 0


TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A duration: 1.23 s, 12.3 ms, 123 us."""
    size, unit = next(((size, unit) for size, unit in TIMES if value >= size), TIMES[-1])
    return f"{three(value / size)} {unit}"


def known(form: Callable[[float], str], value: float | None) -> str:
    """A value in its form, or a dash where it is not known."""
    return "-" if value is None else form(value)


def gb(size: float) -> str:
    """Bytes as GB of 1e9: 1.2, 123."""
    return three(size / 1e9)


def three(value: float) -> str:
    """A number with three digits, or all before the point."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def inputs_of(given: PlanInput, **more: object) -> dict[str, Any]:
    """The model, device, lengths and bits of a plan, for JSON, and others of its inputs."""
    model, device = given.model, given.device
    return {
        "model": model.name,
        "model_source": model.source,
        "model_checked": model.checked or None,
        "parameters": model.weights,
        "gpu": device.name,
        "gpu_source": device.source,
        "gpu_checked": device.checked or None,
        "in": given.lengths.prompt,
        "out": given.lengths.answer,
        **{f"{name}_bits": bits for name, bits in asdict(given.precision).items()},
        **more,
    }
