"""Settings of a worker: section [worker]. An engine's settings are in the engine's own folder."""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [worker]."""

    prefetch: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Jobs held beyond what runs now, so that a free slot is filled without a round trip."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long running jobs may finish after SIGTERM; what is left is handed back to the queue."""
    reserved_slots: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Slots that lane batch may not fill, so that a chat does not wait for a line of a batch to end. None: one in
    sixty-four, at least one: where there are many slots, one is free again in no time."""
    checkpoint_frames: Positive = 4096
    """Steps that a running job may keep in its worker's log: then its tokens are logged anew in one piece, and the
    steps before are trimmed. A job of very many tokens may keep a quarter as many steps."""
    poll_ms: Positive = 250
    """How often an idle worker looks at its lanes even if nobody woke it."""
