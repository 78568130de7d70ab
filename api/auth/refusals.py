"""Refusals that a browser or a proxy hides from its user: told once each in the log of the API process."""

from __future__ import annotations

import logging

from api.openai.errors import ApiError

CODES = frozenset(("foreign_origin", "misdirected_request", "proxy_without_keys"))
"""A page hears of a CORS or network error only, so whoever set the server up finds the reason in the log alone."""
MAX_TOLD = 64
"""Reasons that one process tells; senders choose the origins and hosts in them, so there must be an end."""
MAX_PATH = 128
"""Characters of a path that are logged."""

log = logging.getLogger(__name__)


class Refusals:
    """What one process has told already. A reason names its origin or host, so each of these is told once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, error: ApiError, path: str) -> None:
        """Log one warning for a new reason with its fix, and after MAX_TOLD of them that no more will come."""
        if error.code not in CODES or error.message in self._told or len(self._told) > MAX_TOLD:
            return
        self._told.add(error.message)
        if len(self._told) > MAX_TOLD:
            log.warning("more origins and hosts are refused; this process logs no more of them")
            return
        # Values of the sender are quoted: no line can be forged with them.
        log.warning(
            "refused (%s) a request for %r: %s",
            error.code,
            path[:MAX_PATH],
            error.message,
            extra={"code": error.code},
        )
