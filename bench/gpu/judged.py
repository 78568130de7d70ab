"""Judged: what follows from rows that were measured on a GPU: knees, and the bound of a step by the card's figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

from planner.facts import catalogue
from planner.facts.device import Accelerator
from planner.knee import Knee, knee
from planner.roofline import RooflineInput, decode

HALF_RUN = 33
"""Tokens that a step's context grew by, in the mean of its repeats."""
DRIVER_PREFIX = "NVIDIA "

Row = dict[str, Any]


def knees(rows: Sequence[Row]) -> dict[str, Knee]:
    """Of each shape, by throughput over the batch."""
    dice = Random(1)  # noqa: S311 - draws for the confidence
    names = dict.fromkeys(row["shape"] for row in rows)
    return {name: knee({row["batch"]: [row["tokens_per_s"]] for row in _of(name, rows)}, dice) for name in names}


def knee_notes(rows: Sequence[Row]) -> list[str]:
    """The knee of each shape, by the fit and by single doublings, and what the last doublings gained."""
    notes = []
    for name, found in knees(rows).items():
        rates = {row["batch"]: row["tokens_per_s"] for row in _of(name, rows)}
        largest = max(rates)
        fit, single = (f"{each} or beyond" if each == largest else f"{each}" for each in (found.batch, found.ruled))
        gains = [
            f"{100 * (rates[after] / rates[before] - 1):.1f} % from {before} to {after}"
            for before, after in pairwise(sorted(rates)[-3:])
        ]
        notes.append(
            f"{name}: knee at batch {single} by single doublings, at {fit} by a curve through all batches. Measured: "
            f"{' and '.join(gains)} more tokens per second; beyond {largest}, nothing."
        )
    return notes


def card_of(device: str) -> Accelerator | None:
    """The planner's card of a device, by the name that its driver tells; None: it has none."""
    return catalogue.devices().get(device.removeprefix(DRIVER_PREFIX).lower())


def by_card(rows: Sequence[Row], card: Accelerator | None) -> list[Row]:
    """Each decode step with its bound by the card, which `penstock plan roofline` says, and that bound's share."""
    found = []
    for row in rows:
        given = None if card is None else RooflineInput(catalogue.model(row["shape"]), card)
        bound = None if given is None else 1e3 * decode(given, row["batch"], row["context"] + HALF_RUN).seconds
        found.append({**row, "card_ms": bound, "card_share": bound and bound / row["step_ms"]})
    return found


def _of(name: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["shape"] == name]
