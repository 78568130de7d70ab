"""Access errors: the answers that refuse a caller, a host name, a proxy or a web page of another origin."""

from __future__ import annotations

import logging

from api.openai.errors import ApiError


def foreign_host(host: str) -> ApiError:
    """The Host header is none of this server's names; without keys, these are loopback names and those listed."""
    message = (
        f"The request's Host {host[:128]!r} is not one of this server's names. Use http://127.0.0.1 or "
        "http://localhost with its port, or add the name to [api] hosts. Without an API key ([keys.<name>]) there are "
        "no other names."
    )
    return ApiError(421, "misdirected_request", message)


def foreign_origin(origin: str) -> ApiError:
    """A page may not use this server: without keys, pages of other origins are refused. `origin` is its Origin header,
    or what else its browser says of it."""
    message = (
        f"Pages of {origin[:128]!r} may not use this server. Add the origin, such as https://app.example, to [api] "
        "cors_origins and restart."
    )
    return ApiError(403, "foreign_origin", message)


def proxy_without_keys() -> ApiError:
    """A server without keys cannot tell a proxy's clients from programs of this machine, so it refuses them."""
    message = "A proxy forwards to this server, which has no API keys. Configure a key ([keys.<name>])."
    return ApiError(403, "proxy_without_keys", message)


def invalid_api_key(message: str, code: str = "invalid_api_key") -> ApiError:
    return ApiError(401, code, message, headers={"WWW-Authenticate": "Bearer"})


def admin_token_required() -> ApiError:
    message = (
        "Without API keys /admin needs the admin token of this server. `penstock up` writes a new one at each start to "
        "run/admin-token in its data folder, and the penstock command sends it by itself. Send it as 'Authorization: "
        "Bearer <token>'."
    )
    return invalid_api_key(message, "admin_token_required")


def admin_not_configured() -> ApiError:
    message = (
        "Neither an API key nor an admin token is configured, so nobody may administer this server. Add a key with "
        "admin = true ([keys.<name>]), or set [api] admin_token_sha256 to the SHA-256 of a token of yours."
    )
    return ApiError(403, "admin_not_configured", message)


def permission_denied() -> ApiError:
    message = "This key may not administer the queue (admin = true in its [keys] row)."
    return ApiError(403, "permission_denied", message)


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
