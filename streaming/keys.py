"""Names of keys and channels in Redis, made from the catalogue. The Lua scripts get theirs from here too.

All keys of a partition share its hash tag, so one script may touch them all, on one server and on a cluster alike.
"""

from __future__ import annotations

from streaming.catalogue import CATALOGUE, CHANNELS, FLEET, ROOT
from streaming.order import Priority

GROUP = "workers"
"""The consumer group of every lane; a consumer is a worker's lease id."""
FLEET_SLOT = -1
"""The number of the fleet's slot, in the place of a partition's number."""
BROKER = f"{ROOT}celery:"
"""Prefix of all keys of Celery's broker. They hold only reminders, so losing them loses no work."""

_PATTERNS = {key.name: key.pattern for key in (*CATALOGUE, *FLEET)}


def prefix(partition: int) -> str:
    """Prefix of all keys of a partition, or of the fleet's slot."""
    return f"{ROOT}{{{'fleet' if partition == FLEET_SLOT else partition}}}:"


def partition_key(partition: int, name: str, *args: str) -> str:
    """A key of the catalogue."""
    return prefix(partition) + _PATTERNS[name].format(*args)


def fixed_keys(partition: int) -> list[str]:
    """The keys of a partition, or of the fleet's slot, whose names have no arguments."""
    catalogue = FLEET if partition == FLEET_SLOT else CATALOGUE
    return [prefix(partition) + key.pattern for key in catalogue if "{}" not in key.pattern]


def kind_of(key: str) -> str:
    """The kind of a key by its name, which need not be one of this version's; "" for a name of another form."""
    parts = key.split(":", 3)
    return parts[2] if len(parts) > 2 and parts[1].startswith("{") else ""


def parse_lane(key: str) -> tuple[str, Priority]:
    """The model and the priority of a lane, or of one its jobs were put back to, by its key."""
    model, _, priority = key.split(":", 3)[3].rpartition(":")
    return model, Priority(priority)


def fleet_key(name: str, *args: str) -> str:
    """A key of FLEET."""
    return partition_key(FLEET_SLOT, name, *args)


def channel(kind: str, name: str) -> str:
    """A channel of CHANNELS."""
    assert kind in CHANNELS
    return f"{ROOT}{kind}:{name}"


def lua_prelude() -> str:
    """The catalogue as Lua functions. They read the prefix of the script's slot from KEYS[1] rather than from the local
    `P`, because Redis creates the functions at each call, and a function without upvalues costs least."""
    lines = ["local P = KEYS[1]", f"local GROUP = '{GROUP}'", f"local CHANNEL = '{ROOT}'"]
    lines.append("local PRIORITIES = {" + ", ".join(f"'{priority}'" for priority in Priority) + "}")
    for key in (*CATALOGUE, *FLEET):
        parts = key.pattern.split("{}")
        args = [f"a{number}" for number in range(len(parts) - 1)]
        body = "KEYS[1]"
        for part, arg in zip(parts, [*args, ""], strict=True):
            body += (f" .. '{part}'" if part else "") + (f" .. {arg}" if arg else "")
        lines.append(f"local function {key.name}_key({', '.join(args)}) return {body} end")
    return "\n".join(lines) + "\n"
