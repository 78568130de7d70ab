"""Access control of the store: generates a Redis ACL file with one user per role, each with the least rights it needs.

A rule allows commands, key patterns and channels by name; the server refuses everything else (NOPERM). The commands,
keys and channels of each script are derived from its source; the tables here list what a role sends besides. A script
runs with the rights of the user who sent it, so a role's password allows what its own scripts need and no more
(docs/operations.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from streaming.keys import BROKER, CATALOGUE, CHANNELS, FLEET, FLEET_SLOT, REQUEUED, ROOT, prefix
from streaming.redis.scripts import load_library

ROLES = ("api", "worker", "scheduler", "offline")
SCRIPTS: Mapping[str, frozenset[str]] = {
    role: frozenset(name for name, who in load_library().roles.items() if who & {role, "any"}) for role in ROLES
}
"""The scripts that the processes of each role run."""

FIELD_KINDS: Mapping[str, str] = {"lane": "lane", "idem": "idem"}
"""Fields of a job's record that hold a key, and the kind of that key: a script that reads one may use the key."""
ARGUMENT_KINDS: Mapping[str, tuple[str, ...]] = {"waiting": ("lane", *REQUEUED)}
"""Scripts that take a key as an argument, and the kinds of that key."""

CONNECTION = frozenset(
    {*("ping", "time", "info", "fcall", "subscribe"), *("client|setinfo", "select", "cluster|slots", "command")}
)
"""Commands of every connection, redis-py's own among them."""
LOADING = frozenset({"function|load", "function|list", "function|delete"})
"""Not for workers: whoever loads a function has it run with the rights of whoever calls it, and engines run there."""

COMMON_COMMANDS: Mapping[str, set[str]] = {
    "hmget": {"store"},
    "exists": {"store"},
    "del": {"proc"},
    "zrem": {"procs"},
    "zrange": {"procs"},
    "mget": {"proc"},
}
"""Commands that every process sends without a script, and the kinds of key they are for."""

COMMANDS: Mapping[str, Mapping[str, set[str]]] = {
    "api": {
        "hvals": {"owed", "enqueued"},
        "xrange": {"log", "dead"},
        "xrevrange": {"dead", "actions", "audit"},
        "xdel": {"dead"},
        "zscore": {"jobs", "files", "batches"},
        "zrangebyscore": {"files"},
        "zcard": {"due"},
        "lrange": {"places"},
        "zrevrangebyscore": {"files", "batches", "hooks"},
        "get": {"file", "console", "api_keys_version", "usage"},
        "del": {"console"},
        "mget": {"file", "override", "leader", "leader_epoch"},
        "hset": {"api_keys_used"},
        "hget": {"api_keys"},
        "hmget": {"batch", "hook", "media"},
        "hgetall": {"card", "plan", "conversation", "api_keys", "api_keys_used"},
        "smembers": {"usage_names", "usage_tenants"},
        "expire": {"job", "media"},
    },
    "worker": {"xrange": {"log"}, "hgetall": {"card"}, "hmget": {"media"}},
    "scheduler": {"mget": {"override"}, "hgetall": {"plan", "cold"}},
    "offline": {
        "hvals": {"owed"},
        "xrange": {"log"},
        "exists": {"job", "file"},
        "expire": {"job", "media", "redelivery"},
        "zrangebyscore": {"expiring"},
        "get": {"file"},
        "hmget": {"batch"},
        "hgetall": {"card"},
        "incrby": {"redelivery"},
        "del": {"redelivery"},
    },
}
"""Further commands that a role sends without a script, and the kinds of key they are for."""

SUBSCRIBED: Mapping[str, set[str]] = {role: {role} for role in ROLES} | {"api": {"api", "pools"}}
"""The channels that the processes of a role subscribe to."""

BROKER_COMMANDS = frozenset(
    {
        *("ping", "info", "multi", "exec", "watch", "unwatch", "client|setinfo", "select", "evalsha", "script|load"),
        *("set", "get", "del", "exists", "pexpire"),
        *("lpush", "rpush", "brpop", "rpop", "llen"),
        *("sadd", "srem", "smembers"),
        *("hset", "hget", "hdel"),
        *("zadd", "zrem", "zrange", "zrevrangebyscore"),
    }
)
"""Commands that Celery sends to its broker, where that is the same Redis."""

CALL = re.compile(r"redis\.p?call\(([^,)]*)(?:, *'([A-Z]+)')?")
PUBLISH = re.compile(r"'PUBLISH', (?:CHANNEL \.\. '(\w+):)?")
WITH_SUBCOMMAND = frozenset({"xgroup", "xinfo"})


def acl_file() -> str:
    """The ACL file: one user per line. All but `probe` are off and without a password: the deployment sets these.

    `default` stays off, so that a connection without a login may do nothing. `probe` needs no password, for health
    checks, and may only ping. `operator` is for operators: `penstock ps`, `store` and `doctor`, and `penstock up`.
    """
    users = [_user("default", ["off"], (), (), ()), _user("probe", ["on", "nopass"], ("ping",), (), ())]
    users += [_role_user(role) for role in ROLES]
    # Further commands of the command line, and of the scripts that it and the pools of `penstock up` run.
    own = {"eval", "scan", "xlen", "scard", "zcard", "hset", "unlink", "zrangebyscore", "config|get"}
    everything = script_commands("share").union(own, *map(_commands, ROLES))
    users.append(_user("operator", ["off"], everything, [f"{ROOT}*"], [f"{ROOT}*"]))
    return "".join(f"{user}\n" for user in users)


def _role_user(role: str) -> str:
    kinds = frozenset().union(*COMMON_COMMANDS.values(), *COMMANDS[role].values(), *map(script_kinds, SCRIPTS[role]))
    keys = {_pattern(kind) for kind in kinds}
    # FCALL names one key: the common prefix of all keys of the partition, or of the fleet.
    keys |= {ANY_PARTITION, prefix(FLEET_SLOT)}
    channels = SUBSCRIBED[role].union(*map(script_channels, SCRIPTS[role]))
    user = _user(role, ["off"], _commands(role), keys, {_star(CHANNELS[kind]) for kind in channels})
    # A first start checks whether an earlier version has used the store: EXISTS on keys of other roles too.
    fixed = {_pattern(key.name) for key in (*CATALOGUE, *FLEET) if "{}" not in key.pattern}
    user += f" (+exists {_words('~', fixed)})"
    if role == "offline":
        user += f" ({_words('+', BROKER_COMMANDS)} ~{BROKER}* &{BROKER}*)"
    return user


def _user(name: str, state: list[str], commands: Iterable[str], keys: Iterable[str], channels: Iterable[str]) -> str:
    words = ["user", name, "reset", *state, "sanitize-payload", "-@all"]
    words += [_words("+", commands), _words("~", keys), _words("&", channels)]
    return " ".join(filter(None, words))


def _words(sign: str, names: Iterable[str]) -> str:
    return " ".join(sign + name for name in sorted(names))


# --- what a role needs -----------------------------------------------------------------------------------------------


def _commands(role: str) -> frozenset[str]:
    """Every command that the role's processes send, or that their scripts run."""
    loading = LOADING if role != "worker" else ()
    at_d3 = {"wait"} if SCRIPTS[role] & load_library().promises else ()
    return CONNECTION.union(COMMON_COMMANDS, COMMANDS[role], loading, at_d3, *map(script_commands, SCRIPTS[role]))


@cache
def _sources() -> dict[str, str]:
    """Each script behind the shared functions that it uses, without comments."""
    return {name: re.sub(r"--.*", "", source) for name, source in load_library().sources.items()}


def script_commands(script: str) -> frozenset[str]:
    """The commands a script runs."""
    found = set()
    for first, second in CALL.findall(_sources()[script]):
        for name in re.findall(r"'([A-Z]+)'", first):
            command = name.lower()
            found.add(f"{command}|{second.lower()}" if command in WITH_SUBCOMMAND else command)
    return frozenset(found)


def script_kinds(script: str) -> frozenset[str]:
    """The kinds of key that a script uses: by their functions, by fields of a record, or as an argument."""
    source = _sources()[script]
    found = {key.name for key in (*CATALOGUE, *FLEET) if f"local function {key.name}_key(" in source}
    found.update(ARGUMENT_KINDS.get(script, ()))
    found.update(kind for field, kind in FIELD_KINDS.items() if f"'{field}'" in source)
    return frozenset(found)


def script_channels(script: str) -> frozenset[str]:
    """The kinds of channel that a script publishes on. An address without a kind is a reader's: an API process's."""
    return frozenset(kind or "api" for kind in PUBLISH.findall(_sources()[script]))


# --- patterns --------------------------------------------------------------------------------------------------------


ANY_PARTITION = prefix(0).replace("0", "[0-9]*")


def _pattern(kind: str) -> str:
    """All keys of a kind, in every partition or in the fleet's slot."""
    for keys, start in ((FLEET, prefix(FLEET_SLOT)), (CATALOGUE, ANY_PARTITION)):
        for key in keys:
            if key.name == kind:
                return start + _star(key.pattern)
    raise ValueError(kind)


def _star(pattern: str) -> str:
    return pattern.replace("{}", "*")
