"""Webhook retry policy: exponential backoff with jitter, and when to give up. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, FACTOR, MAX_WAIT_S = 5.0, 6.0, 6 * 3600.0
JITTER = 0.2
"""Fraction by which a wait varies, so that deliveries that failed together are not retried together."""

GONE = 410


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """When to retry, and why; `wait_s` is None to give up."""

    wait_s: float | None
    reason: str


def after_failure(tries: int, age_s: float, status: int, give_up_s: float, chance: float) -> RetryDecision:
    """Decide when to retry a delivery: after 5 s, 30 s, 3 min, 18 min, 1.8 h, then every 6 h, up to `give_up_s`.

    Args:
        tries: failed attempts so far.
        age_s: time since the first attempt.
        status: HTTP status of the last answer, 0 if there was none.
        give_up_s: no attempt is made later than this after the first one.
        chance: a random number from 0 to 1, for the jitter.
    """
    if status == GONE:
        return RetryDecision(None, "the endpoint answered 410 Gone")
    wait_s = min(FIRST_S * FACTOR ** min(tries - 1, 10), MAX_WAIT_S) * (1 + JITTER * (2 * chance - 1))
    if age_s + wait_s > give_up_s:
        return RetryDecision(None, f"{tries} attempts in {age_s:.0f} s, and the next would be after {give_up_s:.0f} s")
    return RetryDecision(wait_s, f"attempt {tries} failed, the next is in {wait_s:.0f} s")
