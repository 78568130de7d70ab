"""Peer counter: tells an engine that shares its servers with other workers how many of these run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, Process
from streaming.fleet.processes import Fleet

log = logging.getLogger(__name__)


def peers_of(me: Process, others: list[Process]) -> int:
    """How many workers of the same pool may run requests, this one included. Those that start run none yet, and those
    that drain still do."""
    lives = {
        each.life for each in others if (each.model, each.shape) == (me.model, me.shape) and each.state != "starting"
    }
    return len(lives | {me.life})


async def keep_counting(fleet: Fleet, me: Process, share: Callable[[int], None]) -> NoReturn:
    """Call `share` with the number every few seconds; while the store does not answer, the last one stays."""

    async def count() -> None:
        share(peers_of(me, await fleet.processes("worker")))

    expected = ExpectedErrors(Unavailable, log.warning, "the other workers cannot be counted: %s", once=True)
    await run_periodically(count, HEARTBEAT_INTERVAL_S, expected)
