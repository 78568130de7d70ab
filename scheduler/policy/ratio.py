"""Workers that only read prompts beside workers that only write answers: how many of each.

A controller after semi-PD and xLLM, whose own rules were not published: each side's 90th percentile over its target
says whether it is behind, and a worker changes sides when one is and the other is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

EVERY_S = 10.0
"""Between two looks."""
DWELL_S = 30.0
"""After a change, before the next."""
CALM = 0.7
"""Both sides below this share of their targets could do with fewer workers."""
REGRET_S = 300.0
"""A worker that would go back within this time shows that no split is good enough: one more is needed."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The workers of each side, when anything was last changed, and which way the last one went."""

    prefill: int
    decode: int
    changed: float | None = None
    moved: int = 0
    """+1: to prefill, -1: to decode."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sides from now on, what is asked of the scaler (+1, 0, -1 worker) and why."""

    sides: Sides
    scale: int
    why: str


def balance(sides: Sides, ttft_share: float, tpot_share: float, now: float) -> Verdict:
    """One look. `ttft_share` and `tpot_share`: 90th percentiles of TTFT and of time per token over their targets.

    A worker the scaler adds goes to the side that is behind.
    """
    told = f"TTFT at {ttft_share:.2f} and TPOT at {tpot_share:.2f} of target"
    since = now - sides.changed if sides.changed is not None else REGRET_S
    if since < DWELL_S:
        return Verdict(sides, 0, f"{told}; changed {since:.0f} s ago")
    move = (ttft_share > 1) - (tpot_share > 1)
    if move == 0:
        return _scaled(sides, ttft_share, tpot_share, told, now)
    giving = sides.decode if move > 0 else sides.prefill
    if giving == 1 or (sides.moved == -move and since < REGRET_S):
        return Verdict(replace(sides, changed=now), 1, f"{told}: one is behind, and the other has no worker to spare")
    to = "prefill" if move > 0 else "decode"
    moved = Sides(sides.prefill + move, sides.decode - move, now, move)
    return Verdict(moved, 0, f"{told}: one worker goes to {to}")


def _scaled(sides: Sides, ttft_share: float, tpot_share: float, told: str, now: float) -> Verdict:
    """Both are behind, or neither."""
    if ttft_share > 1:
        return Verdict(replace(sides, changed=now), 1, f"{told}: both are behind")
    if max(ttft_share, tpot_share) < CALM and sides.prefill + sides.decode > 2:
        return Verdict(replace(sides, changed=now), -1, f"{told}: both are well ahead")
    return Verdict(sides, 0, told)
