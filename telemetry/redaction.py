"""Secret redaction: replaces the configured secrets of this process, and well-known forms of others, in logs and spans.

It is the last line of defence: prompts and answers have no form to recognise, and callers must not log them at all.
Every pattern takes linear time: repetitions are bounded, or followed by a character that they cannot contain.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.config import hidden

HIDDEN = "***"

_QUOTE = r"\\{0,8}[\"']?"
_TIE = rf"{_QUOTE}\]?\s{{0,8}}(?:[:=]|,(?=\s{{0,8}}b?\\{{0,8}}[\"']))\s{{0,8}}(?:b(?=\\{{0,8}}[\"']))?{_QUOTE}"
"""Between a name and its value: in JSON (also inside a JSON string), in the repr of a Python mapping or of a pair of
texts or bytes, in a header, in a query string."""
_VALUE = r"(?:(?<=(?<!\\)\")(?:[^\"\\]|\\.)+|(?<=\")[^\"\\]+|(?<=')[^'\\]+|[^\s\"',;&}\\]+)"
"""Up to the closing quote, or to the end of the word."""
_HEADERS = r"(?:authorization|cookie)"
_SCHEME = r"(?:(?:bearer|basic|digest|token|api-?key)[ \t]{1,8})?"
_COUNT = r"[\"']\]?\s?[:=]\s?\d{1,12}(?![^\s,;}\])])"
"""A quoted "token" before a bare number counts tokens; secrets are texts there."""
_NAMES = (
    r"(?:passw(?:or)?d|secret|api[_ -]?key|(?:access|admin|auth|bearer|session)[_-]?token"
    rf"|(?<=[?&])token|(?<=[\"'])token(?!{_COUNT}))"
)

_FORMS = (
    # The password of a URL, also one with a slash or other illegal characters: then what follows the colon is no port.
    ("://", r"(://[^\s/:@]*:)[^\s/]*(?=@)"),
    ("://", r"(://[^\s/:@]{0,64}:)(?!\d{1,5}(?:[/?#]|$)|\*\*\*)[^\s@\"'<>]{1,128}(?=@)"),
    # Headers, up to the closing quote or to the end of the line; and credentials after their scheme.
    ("authorization cookie", rf"(?i)({_HEADERS}{_TIE}(?<=[\"']){_SCHEME})[^\"'\\\n]+"),
    ("authorization cookie", rf"(?i)({_HEADERS}{_TIE}(?<![\"']){_SCHEME})(?!b?[\"'\\])\S[^\n]*"),
    ("bearer basic", r"(?i)(\b(?:bearer|basic)\s{1,8})[a-z0-9._~+/=-]{4,}"),
    # Values behind the names of secrets.
    ("passw secret key token", rf"(?i)({_NAMES}{_TIE}){_VALUE}"),
    # API keys, and secrets of webhooks.
    ("sk-", r"(?<![A-Za-z0-9])(p?sk-)(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{12,}"),
    ("whsec_", r"(?<![A-Za-z0-9])(whsec_)[A-Za-z0-9+/=_-]{16,}"),
)
"""A text is searched only if it contains one of the words in lower case, which skips nearly every line. What the
pattern matches behind its group is replaced."""

_PATTERNS = tuple((tuple(words.split()), re.compile(pattern)) for words, pattern in _FORMS)
_SECRET_NAME = re.compile(rf"(?i)(?:{_NAMES}|{_HEADERS}|^token)$")


def redact(text: str) -> str:
    """Replace the configured secrets, and what has the form of one."""
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    small = text.lower()
    for words, pattern in _PATTERNS:
        for word in words:  # cheaper than `any`
            if word in small:
                text = pattern.sub(rf"\1{HIDDEN}", text)
                break
    return text


_NUMBERS = (int, float, type(None))


def clean(value: Any) -> Any:
    """Replace secrets in a value, also inside mappings, sequences and records."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, bytes | bytearray):
        return redact(value.decode("utf-8", "backslashreplace"))
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(key) else clean(item) for key, item in value.items()}
    return value


@lru_cache(maxsize=1024)
def is_secret(name: object) -> bool:
    """Whether a value with this name is a secret, whatever its form."""
    return isinstance(name, str) and _SECRET_NAME.search(name) is not None
