"""Open-file limit: raises this process's RLIMIT_NOFILE for its connections, or lowers their number to fit."""

from __future__ import annotations

import resource

from api.stream.connection_guard import MAX_SURPLUS

RESERVED_FILES = 2 * MAX_SURPLUS + 256
"""Open files besides the counted connections: refused connections, Redis, logs, uploads."""


def allowed_connections(wanted: int) -> int:
    """Return how many connections this process may have open, at most `wanted`.

    Raises the soft limit as far as needed and as the hard limit allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return allowed_by(max(limit, soft), wanted)


def allowed_by(limit: int, wanted: int) -> int:
    """Return how many connections fit into a limit of `limit` open files, at most `wanted`."""
    return max(1, min(wanted, limit - RESERVED_FILES))
