"""The settings of the HTTP door, and of who may come in."""

from __future__ import annotations

from typing import Annotated

import msgspec

from streaming.messages import Priority
from streaming.settings import check_tenant


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [api]."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    body_limit: Annotated[int, msgspec.Meta(ge=1024)] = 2 * 1024 * 1024
    """Bytes of one request body."""
    max_choices_per_request: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Choices one request may ask for: n times its prompts. Lines of batches and jobs from a broker are held to it too.
    A body cannot ask for more than 1,024."""
    keep_alive_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Silence after which a stream gets a comment, so that no proxy cuts it."""
    wait_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """How long a call that does not stream is held open; then 504 with the job's id, and the work goes on."""
    send_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """A reader that takes no byte for so long is cut off."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long open streams may go on after SIGTERM."""


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [keys.<name>]: an API key, known by its hash alone."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    tenant: str
    """Whose jobs these are: a name of letters, digits and . _ @ / -, at most 128."""
    priority: Priority = Priority.INTERACTIVE
    """The highest lane this key may use."""
    admin: bool = False
    """May look after dead letters, of all tenants."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens this tenant's unfinished batches may add up to, counted as [batch] enqueued_tokens is; None: as that
    says."""

    def __post_init__(self) -> None:
        check_tenant("tenant", self.tenant)
