"""Redaction: replaces secrets that can be told by their shape or by their name, in text and in structured values.

Logs, spans and error messages of settings go through it. It is the last barrier and not the first: prompts and answers
have no shape, and are kept out of logs and spans by not being put there. Every pattern reads a text in linear time:
what repeats is bounded, or followed by what it cannot hold.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import msgspec

HIDDEN = "***"

_NAMES = (
    r"authorization|password|passwd|passphrase|pwd|secret|api[-_]?key|private[-_]?key|idempotency[-_]?key|"
    r"requirepass|masterauth|primaryauth"
)

_SECRET_KEY = re.compile(rf"(?i)(.*[-_])?({_NAMES}|token|cookie)")
"""Names in mappings whose values are secrets; `tokens` is a number of them."""

_TIE = r"(\\*[\"']?\s{0,8}(?:[:=]|,(?=\s{0,8}b?\\*[\"']))\s{0,8}(?:b(?=\\*[\"']))?\\*[\"']?)"
"""Between a name and its value: as in JSON, also inside a JSON string, in Python's form of a mapping or of a pair of
texts or bytes, in a header, in a query."""

_VALUE = r"(?:(?<=\")[^\"\\]+|(?<=')[^'\\]+|[^\s\"',;&}\\]+)"
"""To the closing quote, or to the end of the word."""

_BREAK = r"(?:\s|\\r|\\n){1,8}"
"""Between the words of a command as it is sent, also where it is shown with escapes."""

_RULES = (
    # The password of a URL.
    ("://", r"(://[^\s/:@]*:)[^\s/]*@", rf"\1{HIDDEN}@"),
    # A private key, to its end or to the end of the text.
    (
        "-----begin",
        r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----)(?:(?!-----END )[\s\S])*"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?",
        rf"\1{HIDDEN}",
    ),
    # Credentials after their scheme.
    ("bearer basic", r"(?i)\b(bearer|basic)(\s{1,8})[a-z0-9._~+/=-]{4,}", rf"\1\2{HIDDEN}"),
    # Cookies, which go to the end of the line.
    ("cookie", rf"(?i)(?<![a-z0-9])((?:set-)?cookie){_TIE}[^\n\"'\\]+", rf"\1\2{HIDDEN}"),
    # What is named as a secret.
    (
        "authorization pass pwd secret key masterauth primaryauth",
        rf"(?i)(?<![a-z0-9])({_NAMES}){_TIE}(?!bearer|basic|\*\*\*){_VALUE}",
        rf"\1\2{HIDDEN}",
    ),
    (
        "token",
        rf"(?i)(?<![a-z0-9])((?:[a-z0-9]{{1,20}}[-_])?token)([\"']{_TIE}|[ ]?=[ ]?[\"']?){_VALUE}",
        rf"\1\2{HIDDEN}",
    ),
    ("-token _token", rf"(?i)(?<![a-z0-9])([a-z0-9]{{1,20}}[-_]token){_TIE}{_VALUE}", rf"\1\2{HIDDEN}"),
    # Redis: AUTH with or without a user, as it is sent and in words; passwords in its configuration and its users.
    ("auth", rf"(?<![A-Za-z])AUTH(?:{_BREAK}\$\d{{1,6}}{_BREAK}[^\s\\]+)+", f"AUTH {HIDDEN}"),
    ("auth", r"(?<![A-Za-z])AUTH[ \t]+(?!\*\*\*)[^\s\"']+(?:[ \t]+[^\s\"']+)?", f"AUTH {HIDDEN}"),
    (
        "pass auth",
        r"(?i)(?<![a-z0-9])(requirepass|masterauth|primaryauth|auth-pass)[ \t]+[^\s\"']+",
        rf"\1 {HIDDEN}",
    ),
    ("setuser", r"(?i)\b(acl[ \t]{1,8}setuser)[^\n\"']*", rf"\1 {HIDDEN}"),
    # Keys of providers and others, by how they begin.
    ("sk-", r"(?<![A-Za-z0-9])(sk-)(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{12,}", rf"\1{HIDDEN}"),
    (
        "hf_ ghp_ gho_ ghs_ ghu_ ghr_ npm_ glpat- xapp-",
        r"(?<![A-Za-z0-9])(hf_|gh[opsur]_|npm_|glpat-|xapp-)[A-Za-z0-9_-]{16,}",
        rf"\1{HIDDEN}",
    ),
    ("github_pat_ pypi-", r"(?<![A-Za-z0-9])(github_pat_|pypi-)[A-Za-z0-9_-]{20,}", rf"\1{HIDDEN}"),
    ("akia asia", r"(?<![A-Za-z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])", rf"\1{HIDDEN}"),
    ("aiza", r"(?<![A-Za-z0-9])(AIza)[A-Za-z0-9_-]{30,}", rf"\1{HIDDEN}"),
    ("xox", r"(?<![A-Za-z0-9])(xox[abeprs]-)[A-Za-z0-9-]{10,}", rf"\1{HIDDEN}"),
    ("whsec_", r"(?<![A-Za-z0-9])(whsec_)[A-Za-z0-9+/=_-]{16,}", rf"\1{HIDDEN}"),
    # JSON web tokens.
    ("eyj", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?", HIDDEN),
)
"""What a text must hold one of (in small letters) to be searched at all, which spares nearly every line the search;
what is searched; what takes its place."""

_PATTERNS = tuple((tuple(words.split()), re.compile(pattern), replacement) for words, pattern, replacement in _RULES)


def redact(text: str) -> str:
    """The text without the secrets that can be told by their shape or by the name before them."""
    small = text.lower()
    for words, pattern, replacement in _PATTERNS:
        for word in words:
            if word in small:
                text = pattern.sub(replacement, text)
                break
    return text


def clean(value: Any) -> Any:
    """The value with secrets replaced, also inside mappings, sequences and records; they show by name or by shape."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, bytes | bytearray):
        return redact(value.decode("utf-8", "backslashreplace"))
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    fields = _fields(value)
    if fields is None:
        return value
    return {key: HIDDEN if is_secret_name(key) else clean(item) for key, item in fields.items()}


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """What a mapping or a record holds by name; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def is_secret_name(name: object) -> bool:
    """Whether what stands under this name is a secret."""
    return isinstance(name, str) and _SECRET_KEY.fullmatch(name) is not None
