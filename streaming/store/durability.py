"""Durability check: compares a Redis server's configuration with the required level, and names each fix.

| level | Redis process lost | power cut             | Redis host lost or cut off   | needs                            |
|-------|--------------------|-----------------------|------------------------------|----------------------------------|
| D0    | all is lost        | all is lost           | all is lost                  | nothing                          |
| D1    | nothing is lost    | the last second       | down until it is back        | append-only file, fsync everysec |
| D2    | nothing is lost    | nothing               | down until it is back        | append-only file, fsync always   |
| D3    | nothing is lost    | nothing, for one host | nothing that was answered    | as D1, and a replica             |

At D3 `RedisClient.calls` answers put, cancel and finish only once a replica has the write, and raises Unavailable if
none has it in time. The job may still run: the same idempotency key finds it. A worker repeats a finish until a replica
has it or another worker has the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import ConfigError
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability

MIN_REDIS_VERSION = (7, 0)
FSYNC: dict[Durability, tuple[str, ...]] = {
    "D1": ("everysec", "always"),
    "D2": ("always",),
    "D3": ("everysec", "always"),
}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One setting that a server lacks. `fatal`: the level cannot be kept without it; else this is a warning."""

    key: str
    found: str
    needed: str
    fatal: bool
    fix: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found}, needed: {self.needed} ({self.fix})"


def shortfalls(level: Durability, facts: Mapping[str, str]) -> list[Shortfall]:
    """List every shortfall by the facts of `RedisClient.inspect`, the fatal ones first."""
    found = [*_version(facts), *_eviction(level, facts), *_file(level, facts), *_replicas(level, facts)]
    return sorted(found, key=lambda shortfall: not shortfall.fatal)


def _version(facts: Mapping[str, str]) -> list[Shortfall]:
    version = facts["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) >= MIN_REDIS_VERSION:
        return []
    return [Shortfall("redis_version", version or "unknown", "7.0 or later", True, "use Redis 7.0 or later, or Valkey")]


def _eviction(level: Durability, facts: Mapping[str, str]) -> list[Shortfall]:
    policy = facts["maxmemory-policy"]
    if facts["maxmemory"] == "0":
        fix = "CONFIG SET maxmemory to what the machine can spare, or it takes jobs until the system kills it"
        return [Shortfall("maxmemory", "0", "a limit", False, fix)] if level != "D0" else []
    if policy == "noeviction":
        return []
    fix = "CONFIG SET maxmemory-policy noeviction, or accepted jobs are thrown away when memory is full"
    return [Shortfall("maxmemory-policy", policy or "unknown", "noeviction", level != "D0", fix)]


def _file(level: Durability, facts: Mapping[str, str]) -> list[Shortfall]:
    if level == "D0":
        fix = "for trying things out only: a restart of Redis loses every job; set redis.durability to D1 for more"
        return [Shortfall("redis.durability", "D0", "D1, D2 or D3", False, fix)]
    if facts["appendonly"] != "yes":
        return [Shortfall("appendonly", facts["appendonly"], "yes", True, "CONFIG SET appendonly yes")]
    fsync, enough = facts["appendfsync"], FSYNC[level]
    needed = " or ".join(enough)
    if not fsync:
        return [Shortfall("appendfsync", "unknown", needed, False, "CONFIG is forbidden here, so it cannot be checked")]
    if fsync not in enough:
        return [Shortfall("appendfsync", fsync, needed, True, f"CONFIG SET appendfsync {enough[0]}")]
    return []


def _replicas(level: Durability, facts: Mapping[str, str]) -> list[Shortfall]:
    if level != "D3":
        return []
    found = []
    if facts["replicas"] == "0":
        fix = "connect one: until then nothing is accepted"
        found.append(Shortfall("connected replicas", "0", "1 or more", False, fix))
    if facts["min-replicas-to-write"] == "0":
        fix = "CONFIG SET min-replicas-to-write 1, or a primary cut off from its replicas does work that is thrown away"
        found.append(Shortfall("min-replicas-to-write", "0", "1", False, fix))
    return found


async def check_level(client: RedisClient) -> list[str]:
    """Check all servers; returns warnings for the operator. Raises ConfigError if a server cannot keep
    `redis.durability`, Unavailable if it does not answer (yet)."""
    level, warnings = client.settings.durability, []
    for facts in await client.servers():
        server = f"{facts['place']}: " if facts["place"] else ""
        for shortfall in shortfalls(level, facts):
            if shortfall.fatal:
                raise ConfigError("redis.durability", f"Redis cannot keep {level}: {server}{shortfall}", LESS)
            warnings.append(f"{server}{shortfall}")
    return warnings


LESS = "or ask for less: D0 needs nothing and keeps nothing"
