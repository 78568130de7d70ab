"""Catalogue: finds a model or a device by its name, and names the nearest ones to a name that is unknown.

A device is one GPU, or a CPU: its memory, bandwidth and arithmetic rates.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from planner.facts.model import ModelShape

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


MAX_NEAREST = 3
REPOSITORY = re.compile(r"config of [\w.-]+/([\w.-]*\w)")
"""In a model's source: its name on Hugging Face."""
VARIANT = re.compile(r"-(instruct|chat|it|hf|coder|base|\d{4})(?=-|$)")
"""Part of a name of other weights in the same shape."""


class PlanError(ValueError):
    """Raised when no plan can be made: the message says in one line what is wrong, and it or `next_step` what would
    do."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class UnknownName(PlanError):
    """Raised for a name that the catalogue has not got."""


@cache
def models() -> dict[str, ModelShape]:
    """All models, by name."""
    return {name: msgspec.convert({"name": name, **row}, ModelShape, strict=False) for name, row in _rows("models")}


@cache
def devices() -> dict[str, Accelerator]:
    """All devices, by name."""
    return {name: msgspec.convert({"name": name, **row}, Accelerator, strict=False) for name, row in _rows("devices")}


def model(name: str) -> ModelShape:
    """By its name here or on Hugging Face. Raises UnknownName."""
    short, known = name.lower().rpartition("/")[2], models()
    there = {match[1].lower(): each for each in known.values() if (match := REPOSITORY.search(each.source))}
    there |= {alias: each for each in known.values() for alias in each.also}
    plain = VARIANT.sub("", short)
    sizes = [each for name, each in known.items() if re.fullmatch(rf"{re.escape(plain)}-\d+b", name)]
    found = known.get(short) or there.get(short) or known.get(plain) or there.get(plain)
    return (
        found
        or (sizes[0] if len(sizes) == 1 else None)
        or _unknown("model", name, known, "or give its --config config.json")
    )


def device(name: str) -> Accelerator:
    """Raises UnknownName."""
    return devices().get(name.lower()) or _unknown("GPU", name, [*devices(), "cpu"], "")


def _unknown(what: str, name: str, known: Iterable[str], otherwise: str) -> Any:
    near = nearest(name, known)
    raise UnknownName(f"no {what} {name!r} is known: {near}" + (f", {otherwise}" if otherwise else ""))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names closest to an unknown one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=MAX_NEAREST, cutoff=0.5)
    return f"nearest are {', '.join(close)}" if close else f"known are {', '.join(known)}"


def _rows(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    text = (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text).items()
