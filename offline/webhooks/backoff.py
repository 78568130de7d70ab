"""When a webhook is tried again, and when no more. Decides and says why; does nothing."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, FACTOR, MAX_WAIT_S = 5.0, 6.0, 6 * 3600.0
JITTER = 0.2
"""Waits are up to so much longer or shorter: what failed together is not tried again together."""

GONE = 410


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """`wait_s` is None when it is given up."""

    wait_s: float | None
    reason: str


def after_failure(tries: int, age_s: float, status: int, give_up_s: float, chance: float) -> RetryDecision:
    """After the `tries`th failure in a row, `age_s` after the first try: 5 s, 30 s, 3 min, 18 min, 1.8 h, then every
    6 h, while it would not be later than `give_up_s`. `status` is the answer's, 0 for none; `chance` is from 0 to 1."""
    if status == GONE:
        return RetryDecision(None, "the endpoint says it is gone (410)")
    wait_s = min(FIRST_S * FACTOR ** min(tries - 1, 10), MAX_WAIT_S) * (1 + JITTER * (2 * chance - 1))
    if age_s + wait_s > give_up_s:
        return RetryDecision(None, f"{tries} attempts in {age_s:.0f} s, and the next would be after {give_up_s:.0f} s")
    return RetryDecision(wait_s, f"attempt {tries} failed, the next is in {wait_s:.0f} s")
