"""The Penstock that is measured, as a client knows it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 30.0


class Unsuitable(RuntimeError):
    """There is nothing there that could be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class BreakdownTarget:
    """Its address, and what every request to it says."""

    host: str
    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, base_url: str, key: str = "", model: str = "") -> BreakdownTarget:
        """A server somebody else has started; its first model unless one is named. Raises Unsuitable, OSError."""
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme != "http" or not parts.hostname:
            raise Unsuitable(f"{base_url}: give a plain http:// address; what is in front of it is not Penstock's time")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        target = cls(parts.hostname, parts.port or 80, model, headers)
        return target if model else cls(target.host, target.port, target.first_model(), headers)

    def first_model(self) -> str:
        """Raises Unsuitable, OSError."""
        models = next(self.get(["/v1/models"])).get("data") or []
        if not models:
            raise Unsuitable("no model is served there: name one with --model")
        return str(models[0]["id"])

    def get(self, paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The JSON answers, one after the other, over one connection. Raises Unsuitable, OSError."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        try:
            for path in paths:
                connection.request("GET", path, headers=self.headers)
                response = connection.getresponse()
                body = response.read()
                if response.status != 200:
                    raise Unsuitable(f"GET {path} is answered with {response.status}: {body[:200].decode('replace')}")
                yield json.loads(body)
        except (http.client.HTTPException, ValueError) as error:
            raise Unsuitable(f"{self.host}:{self.port} does not answer like Penstock: {error}") from error
        finally:
            connection.close()
