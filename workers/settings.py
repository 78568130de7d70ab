"""Settings of a worker: section [worker]. An engine's settings are in the engine's own folder."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config import Positive


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [worker]."""

    prefetch: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Jobs held beyond the running ones, so that a free slot is filled without a round trip."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long running jobs may finish after SIGTERM; the worker then puts the others back into the queue."""
    reserved_slots: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Slots that lane batch may not fill, so that a chat does not wait for a line of a batch to end. None: one in
    sixty-four, at least one; where there are many slots, one becomes free soon."""
    tenant_slots: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Slots that a tenant with more than its share of them, by weight, may not fill while others use the worker, so
    that a job of another one begins at once. None: one in 128, rounded, at least one."""
    gate: bool = True
    """Give the engine a text only if its KV cache is predicted to hold all texts until they have ended. It matters for
    engines that are limited by their KV cache alone."""
    checkpoint_frames: Positive = 4096
    """Steps that a running job may keep in its worker's log before the worker writes a checkpoint of its tokens and
    trims those steps. For a job of more than four times as many tokens: a quarter of its tokens."""
    poll_ms: Positive = 250
    """How often an idle worker claims from its lanes without having been woken."""
