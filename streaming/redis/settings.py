"""Redis settings ([redis]): where the server is, what of it may be lost, and the limits of queues and leases."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from penstock.config import Positive
from streaming.address import parse_address

Durability: TypeAlias = Literal["D0", "D1", "D2", "D3"]


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [redis]."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// or unix:// for one server, redis+sentinel://host:port,host:port/<service> for the primary
    that Sentinels name, redis+cluster://host:port,host:port for a cluster."""
    durability: Durability = "D1"
    """The loss that accepted jobs survive. D0: none; D1: of the Redis process; D2: a power cut; D3: of the Redis host,
    because every answer waits until a replica has the write."""
    partitions: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Hash slots over which the work is spread. All processes of a deployment must use the same number."""
    lease_ms: Annotated[int, msgspec.Meta(ge=200)] = 5_000
    """A worker without a heartbeat for longer loses its jobs to others."""
    max_attempts: Positive = 3
    """After so many lost workers a job is given up instead of retried."""
    lane_limit: Positive = 10_000
    """The most jobs waiting in one lane of one partition; more are refused with 429."""
    retention_s: Positive = 86_400
    """How long results are kept after their job's end, and idempotency keys with them."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """For one command; a command that exceeds it marks Redis as unavailable. At D3 half of it is for the replica."""

    def __post_init__(self) -> None:
        try:
            parse_address(self.url)
        except ValueError as error:  # "url: " names the field to the caller
            raise ValueError(f"url: {str(error).removeprefix('url ')}") from None
