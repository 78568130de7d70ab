"""Fitting: coefficients of step times from measured times, by least squares of relative errors, none below zero.

After DistServe: a prefill takes a + b sum(n) + c sum(n^2) seconds, a decode step a + b sum(ctx) + c B, in two regimes
that meet near a batch of 95. The terms of both are fitted together (planner/calibration.py), for requests share steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

REGIME = 95
"""Batch at which DistServe's decode times change their slope."""
ROUNDS, SOME_ROUNDS = 8, 3
"""Of reweighting, from equal weights and from those of nearly the same fit."""
LEAST_ERROR = 0.01
"""Smaller relative errors count as this one."""


def least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """The coefficients x for which rows * x is nearest to the values. Errors count relative to the value, as the noise
    of a time is a share of it, times the row's weight. Raises ValueError if the rows do not tell all coefficients."""
    if not rows:
        raise ValueError("nothing was measured")
    size = len(rows[0])
    normal = [[0.0] * (size + 1) for _ in range(size)]
    for row, value, weight in zip(rows, values, weights or [1.0] * len(rows), strict=True):
        scaled = [each / value for each in (*row, value)]
        for i in range(size):
            for j in range(size + 1):
                normal[i][j] += weight * scaled[i] * scaled[j]
    return _solved(normal)


def _solved(matrix: list[list[float]]) -> list[float]:
    """Gauss' elimination of a square matrix with a last column of values. Its columns are scaled to one size first."""
    size = len(matrix)
    scales = [matrix[i][i] ** 0.5 or 1.0 for i in range(size)]
    rows = [[matrix[i][j] / scales[i] / (scales[j] if j < size else 1.0) for j in range(size + 1)] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        if abs(rows[pivot][i]) < 1e-10:
            raise ValueError("the measurements do not differ enough to tell all coefficients")
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in range(size):
            if row != i:
                factor = rows[row][i] / rows[i][i]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] for i in range(size)]


def nonnegative(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    doubtful: Sequence[int],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Coefficients that are not negative: the column that would take most away is left out (0), and so are columns that
    the rows do not tell apart, in the order of `doubtful`. Raises ValueError if they do not tell the others apart."""
    left, doubts = list(range(len(rows[0] if rows else ()))), list(doubtful)
    while True:
        try:
            found = least_squares([[row[each] for each in left] for row in rows], values, weights)
        except ValueError:
            doubts = [each for each in doubts if each in left]
            if not doubts:
                raise
            left.remove(doubts[0])
            continue
        if min(found) >= 0:
            return [found[left.index(each)] if each in left else 0.0 for each in range(len(rows[0]))]
        added = [each * sum(row[column] for row in rows) for each, column in zip(found, left, strict=True)]
        left.pop(added.index(min(added)))


def robust(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    doubtful: Sequence[int],
    weights: Sequence[float] | None = None,
    rounds: int = ROUNDS,
) -> list[float]:
    """Coefficients that are not negative, with the least sum of |relative errors|, so that outliers count little: least
    squares, again and again with each row weighted by 1 / its error, from these weights on. Raises ValueError as
    `nonnegative`."""
    found = nonnegative(rows, values, doubtful, weights)
    for _ in range(rounds):
        found = nonnegative(rows, values, doubtful, _weights(rows, values, found))
    return found


def sparse(rows: Sequence[Sequence[float]], values: Sequence[float], doubtful: Sequence[int]) -> list[float]:
    """As `robust`, with those of the doubtful columns alone, in their order, that the rows call for. A column stays if
    Schwarz's criterion says so, of errors with a Laplace distribution: without it the sum of |errors| must grow by more
    than a factor of n^(1/2n). Raises ValueError as `nonnegative`."""
    kept = [list(row) for row in rows]
    found = robust(kept, values, doubtful)
    enough = len(rows) ** (0.5 / len(rows))
    for column in doubtful:
        if found[column]:
            fewer = [[0.0 if place == column else each for place, each in enumerate(row)] for row in kept]
            less = robust(fewer, values, (column, *doubtful), _weights(kept, values, found), SOME_ROUNDS)
            if sum(_errors(fewer, values, less)) <= enough * sum(_errors(kept, values, found)):
                kept, found = fewer, less
    return found


def _weights(rows: Sequence[Sequence[float]], values: Sequence[float], found: Sequence[float]) -> list[float]:
    return [1 / max(error, LEAST_ERROR) for error in _errors(rows, values, found)]


def _errors(rows: Sequence[Sequence[float]], values: Sequence[float], found: Sequence[float]) -> list[float]:
    return [abs(sum(map(mul, row, found)) / value - 1) for row, value in zip(rows, values, strict=True)]


@dataclass(frozen=True, slots=True)
class DecodeRegime:
    """a + b sum(ctx) + c B seconds."""

    fixed_s: float
    held_s: float
    text_s: float

    def step_s(self, texts: int, held: int) -> float:
        return self.fixed_s + self.held_s * held + self.text_s * texts


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times by measurement. It is a `StepTime` of the simulator."""

    prefill: tuple[float, float, float]
    """a, b, c of a + b sum(n) + c sum(n^2): what prompts of n tokens add to a step."""
    small: DecodeRegime
    large: DecodeRegime
    """From REGIME texts on."""
    lone_s: float | None = None
    """A step that gives one token alone, if it takes another time than `small` says: it multiplies matrices with a
    vector, for which engines have other kernels. It also takes `small.held_s` for each token in the cache."""

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        regime = self.large if texts >= REGIME else self.small
        if texts == 1 and not prefilled and self.lone_s is not None:
            return self.lone_s + regime.held_s * held
        decode = regime.step_s(texts, held - prefilled)
        if not prefilled:
            return decode
        a, b, c = self.prefill
        return decode + a + b * prefilled + c * float(prefilled**2 if squares is None else squares)
