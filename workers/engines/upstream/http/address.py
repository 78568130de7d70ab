"""Address of a server: host, port and paths of a checked URL. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens."""

    url: str
    host: str
    port: int
    secure: bool
    base: str
    """Path in front of "/chat/completions", such as "/v1", which an address without a path means too."""

    @property
    def root(self) -> str:
        """Path in front of the server's own endpoints, such as "/health"."""
        return self.base.removesuffix("/v1")

    @classmethod
    def of(cls, url: str) -> ServerAddress:
        """Parse a checked address (settings.url_problem)."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return cls(url, parts.hostname or "", port, secure, parts.path.rstrip("/") or "/v1")
