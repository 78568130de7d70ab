"""Secret-name classifier: decides from the name of a value, in a text or in a mapping, whether the value is a secret.

It splits a name into words, however they are joined: `aws_secret_access_key`, `clientSecret`, `X-Auth-Token`.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

MAX_NAME_CHARS = 64
"""Characters of a name that are examined, from its end."""


class Kind(Enum):
    """What a name implies about its value."""

    PLAIN = "no secret"
    VALUE = "a secret"
    WEAK = "a secret, unless it is a small number or says that there is none"
    BARE = "a secret, if it is quoted, or follows `=`, or looks like one"
    SIGNATURE = "a signature, which in an address lets in whoever has it"
    LINE = "a header whose secrets go to the end of the line"


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_HEADERS = ("authorization", "cookie")
_SECRETS: tuple[str, ...] = (
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "credential",
    "credentials",
    "requirepass",
)
_SECRETS += ("masterauth", "primaryauth", "apikey", "secretkey", "privatekey", "accesskey", "accesstoken", "authtoken")
"""A name denotes a secret if one of its words is, or ends with, one of these."""
_ABOUT = frozenset(
    {"file", "path", "dir", "folder", "name", "id", "type", "kind", "length", "count", "version", "policy", "age"}
)
"""As the last word: the value describes a secret but is none."""
_LAST = frozenset({"key", "token", "auth", "pass"})
"""As the last of several words: the value is a secret."""
_FORMS = frozenset({"base", "bytes", "data", "hex", "pem", "text", "value", "b"})
"""Suffixes that do not change what a name denotes."""
# By last word, the words before it that make an ordinary name: `cache_key` and `max_token` are no secrets.
_ORDINARY = {
    "key": frozenset(
        {
            *("cache", "column", "field", "file", "first", "foreign", "group", "hash", "job", "label", "lane", "last"),
            *("lookup", "map", "metric", "next", "object", "partition", "primary", "public", "redis", "routing", "row"),
            *("shard", "sort", "store", "unknown"),
        }
    ),
    "token": frozenset(
        {
            *("any", "bos", "each", "end", "eos", "first", "inter", "kv", "last", "max", "min", "next", "pad", "per"),
            *("special", "start", "stop", "time", "unk"),
        }
    ),
    "auth": frozenset({"no"}),
    "pass": frozenset({"first", "second", "forward", "last", "next", "one"}),
}
"""By last word: words before it that denote no secret, such as keys of tables and tokens of a model."""

_ALONE = {
    **dict.fromkeys(_HEADERS, Kind.LINE),
    **dict.fromkeys(("sig", "signature"), Kind.SIGNATURE),
    **dict.fromkeys(("auth", "bearer", "pass", "token"), Kind.BARE),
}
"""Kinds of other last words."""


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """Classify a name of at most MAX_NAME_CHARS characters; pass the end of a longer one."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1] in _FORMS:
        words.pop()
    if not words:
        return Kind.PLAIN
    last = words[-1]
    if any(word.endswith(_SECRETS) for word in words) and last not in _HEADERS:
        return Kind.PLAIN if last in _ABOUT else Kind.VALUE
    if last in _LAST and len(words) > 1:
        return Kind.PLAIN if words[-2] in _ORDINARY[last] else Kind.WEAK
    return _ALONE.get(last, Kind.PLAIN)


def is_secret_name(name: object) -> bool:
    """Whether the value under this name in a mapping is a secret."""
    return isinstance(name, str) and kind_of(name[-MAX_NAME_CHARS:]) is not Kind.PLAIN
