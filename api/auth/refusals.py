"""Refusal log: logs, once each, refusals whose reason a browser or proxy hides from its user."""

from __future__ import annotations

import logging

from api.openai.errors import ApiError

CODES = frozenset(("foreign_origin", "misdirected_request", "proxy_without_keys"))
"""The browser shows only a CORS or network error for these, so the operator needs the reason in the log."""
MAX_LOGGED = 64
"""Reasons that one process logs: senders choose the origins and hosts in them, so the number must be bounded."""
MAX_PATH = 128
"""Characters of a path that are logged."""

log = logging.getLogger(__name__)


class Refusals:
    """Remembers the reasons logged by this process. Each origin and host has a reason of its own."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log_once(self, error: ApiError, path: str) -> None:
        """Log a new reason with its fix as one warning; after MAX_LOGGED of them, log once that no more follow."""
        if error.code not in CODES or error.message in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(error.message)
        if len(self._logged) > MAX_LOGGED:
            log.warning("more origins and hosts are refused; this process logs no more of them")
            return
        # The sender's values are quoted, so that they cannot forge a log line.
        log.warning(
            "refused (%s) a request for %r: %s",
            error.code,
            path[:MAX_PATH],
            error.message,
            extra={"code": error.code},
        )
