"""Draft: the text of a response that was given up, because the engine that took its job over had to start again.

Readers of the response have seen it, so its deltas stay in the job's record: every later replay shows them, too.
"""

from __future__ import annotations

import msgspec

from streaming.jobs.frames import Delta


class Draft(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The deltas of one text that was given up, as far as the log has them without a gap."""

    rows: tuple[Delta, ...]
