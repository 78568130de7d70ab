"""Stall: why no worker can ever run a model's jobs unless somebody changes something."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streaming.fleet.overrides import Override
from streaming.fleet.plans import Plan
from streaming.fleet.process import Process
from streaming.fleet.settings import ModelSettings


class Stall(NamedTuple):
    """Why jobs of a model wait for ever, and what to do. It names no operator, because clients read the cause."""

    cause: str
    fix: str


def stall_of(
    model: str,
    settings: ModelSettings,
    workers: Iterable[Process],
    plan: Plan | None,
    override: Override | None,
    *,
    is_led: bool,
) -> Stall | None:
    """Return None while a worker takes jobs of the model, is starting, or may be started by the scheduler.

    Args:
        workers: of all models.
        is_led: whether a scheduler leads.
    """
    cordoned = {each.worker for each in plan.cordon} if plan is not None else set()
    own = [each for each in workers if each.model == model and each.worker_id not in cordoned]
    if any(each.state in ("ready", "starting") for each in own):
        return None
    resume = f"penstock scale resume {model}"
    reasons = (
        (
            override is not None and override.want == 0 == settings.least_wanted,
            Stall("an operator has set its number of workers to 0", resume),
        ),
        (
            override is not None and override.paused and not (plan and plan.want),
            Stall("an operator has paused its scaling while it has no worker", resume),
        ),
        (
            not settings.most_wanted,
            Stall(
                "the settings start no worker of it (penstock up --workers 0)",
                "start again with more --workers, or start a worker on another machine",
            ),
        ),
        (
            not is_led,
            Stall(
                "no scheduler leads, so none is started",
                "start a scheduler, or a worker: penstock up --workers 1",
            ),
        ),
        (
            plan is not None and plan.pool == "dry-run",
            Stall(
                "the scheduler only publishes its plans (scheduler.pool is dry-run)",
                "start a worker, or set scheduler.pool to local",
            ),
        ),
    )
    return next((stall for holds, stall in reasons if holds), None)
