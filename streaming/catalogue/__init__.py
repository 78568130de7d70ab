"""Catalogue: every kind of key and channel that Penstock has in Redis, who writes it, how long it lives, its use."""

from __future__ import annotations

from streaming.catalogue.batches import BATCHES
from streaming.catalogue.conversations import CONVERSATIONS
from streaming.catalogue.events import EVENTS
from streaming.catalogue.fleet import FLEET
from streaming.catalogue.jobs import JOBS

__all__ = ["CATALOGUE", "CHANNELS", "FLEET", "ROOT"]

ROOT = "penstock:"
"""What every name of ours begins with."""
CATALOGUE = (*JOBS, *CONVERSATIONS, *BATCHES, *EVENTS)
"""Keys of a partition. Each name becomes a function of the Lua scripts: job_key(id), lane_key(model, priority)..."""
CHANNELS = {
    "api": "penstock:api:{}: frames and terminals for the responses one API process holds open",
    "worker": "penstock:worker:{}: wake, cancel, follow, cordon and hold messages for one worker",
    "scheduler": "penstock:scheduler:wake: a job waits and no worker was there to be woken, or an override has changed",
    "pools": "penstock:pools:plan: the plan has changed",
}
