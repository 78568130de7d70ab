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

from telemetry.secret_names import LONGEST, Kind, is_secret_name, kind_of

HIDDEN = "***"

_TIE = r"(\\*[\"']?\]?\s{0,8}(?:[:=]|,(?=\s{0,8}b?\\*[\"']))\s{0,8}(?:b(?=\\*[\"']))?\\*[\"']?)"
"""Between a name and its value: as in JSON, also inside a JSON string, in Python's form of a mapping or of a pair of
texts or bytes, in a header, in a query."""

_TIES = re.compile(rf"(?<=[A-Za-z0-9]){_TIE}")
_FLAGS = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9-]{1,40}([ \t]{1,8}[\"']?)(?![\s-])")
"""What stands between an option of a command and its value, if that is no sign."""

_BACKWARDS = re.compile(r"[A-Za-z0-9_-]+")
_SPACED_KEY = ("api ", "secret ", "access ", "private ", "signing ", "encryption ", "admin ")

_VALUE = re.compile(r"(?:(?<=(?<!\\)\")(?:[^\"\\]|\\.)+|(?<=\")[^\"\\]+|(?<=')[^'\\]+|[^\s\"',;&}\\]+)")
"""To the closing quote, or to the end of the word."""

_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|negotiate|ntlm|token|api-?key|aws4-hmac-sha256)[ \t]{1,8}(?=\S)")
_TO_QUOTE = {quote: re.compile(rf"(?:[^{quote}\n\\]|\\(?![rn\"'\\]))+") for quote in "\"'"}
_TO_LINE_END = re.compile(r"(?:[^\n\"'\\]|\\(?![rn\"'\\])|(?<==)\"[^\"\\\n]{0,1000}\")+")
"""To the end of a header that is not in quotes, which its parameters may be (`username="x"`)."""

_NOTHING = re.compile(r"(?i)(?:\d{1,3}(?:\.\d*)?[a-z%]{0,2}|none|null|nil|true|false|yes|no|on|off)")
_SECRET_LIKE = re.compile(
    r"(?=[A-Za-z._~+/=-]{0,64}[0-9]|[^\s]{16})(?![0-9.]+(?:[^A-Za-z0-9]|$))[A-Za-z0-9._~+/=-]{6,}"
)
_SIGNATURE_LIKE = re.compile(r"[A-Za-z0-9%+/_.~-]{16}")

_BREAK = r"(?:\s|\\r|\\n){1,8}"
"""Between the words of a command as it is sent, also where it is shown with escapes."""

_MIXED = r"(?=[a-z_.-]{0,64}[0-9])(?=[0-9_.-]{0,64}[a-z])[^\s\"'`,;]{8,}"
"""A word of letters and digits."""
_ALONE = r"[^\s\"'`]+(?:[ \t]{1,8}[^\s\"'`]+)?(?=[ \t]{0,8}(?:$|[\r\"'`]))"
"""One or two words to the end of the line or of a quotation."""

_RULES = (
    # The password of a URL.
    ("://", r"(://[^\s/:@]*:)[^\s/]*@", rf"\1{HIDDEN}@"),
    # One with a slash in it, or with other things that do not belong there: no port is behind the colon.
    (
        "://",
        r"(://[^\s/:@]{0,64}:)(?!\d{1,5}(?:[/?#]|$)|\*\*\*)[^\s@\"'<>]{1,128}@",
        rf"\1{HIDDEN}@",
    ),
    # A token in the place of a user.
    ("://", r"(://)[^\s/:@]{16,}@", rf"\1{HIDDEN}@"),
    # A private key, to its end or to the end of the text.
    (
        "-----begin",
        r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----)(?:(?!-----END )[\s\S])*"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?",
        rf"\1{HIDDEN}",
    ),
    # Credentials after their scheme.
    ("bearer basic", r"(?i)\b(bearer|basic)(\s{1,8})[a-z0-9._~+/=-]{4,}", rf"\1\2{HIDDEN}"),
    # Redis: AUTH with or without a user, as it is sent and in words; passwords in its configuration and its users.
    ("auth", rf"(?i)(?<![a-z])(AUTH)(?:{_BREAK}\$\d{{1,6}}{_BREAK}[^\s\\]+)+", rf"\1 {HIDDEN}"),
    ("auth", r"(?<![A-Za-z])AUTH[ \t]+(?!\*\*\*)[^\s\"']+(?:[ \t]+[^\s\"']+)?", f"AUTH {HIDDEN}"),
    (
        "hello",
        r"(?i)(?<![a-z])(hello[ \t]{1,8}[23][ \t]{1,8}auth)[ \t]+(?!\*\*\*)[^\s\"']+(?:[ \t]+[^\s\"']+)?",
        rf"\1 {HIDDEN}",
    ),
    # In small letters it is also a word: a command stands alone.
    ("auth", rf"(?im)(?:(?<=[\"'`>:])|(?<=[>:] )|^)(auth)[ \t]{{1,8}}(?!\*\*\*){_ALONE}", rf"\1 {HIDDEN}"),
    ("auth", rf"(?i)(?<![a-z])(auth)[ \t]{{1,8}}(?!\*\*\*){_MIXED}", rf"\1 {HIDDEN}"),
    (
        "auth",
        rf"(?i)(?<![a-z])(auth)[ \t]{{1,8}}(?!\*\*\*)[^\s\"']+[ \t]{{1,8}}{_MIXED}",
        rf"\1 {HIDDEN}",
    ),
    (
        "pass auth",
        r"(?i)(?<![a-z0-9])(requirepass|masterauth|primaryauth|auth-pass)[ \t]+[^\s\"']+",
        rf"\1 {HIDDEN}",
    ),
    ("setuser", r"(?i)\b(acl[ \t]{1,8}setuser)[^\n\"']*", rf"\1 {HIDDEN}"),
    # Addresses whose path lets in whoever knows it.
    ("hooks.slack.com/", r"(?i)(hooks\.slack\.com/[a-z]{1,16}/)[^\s\"'<>\\]+", rf"\1{HIDDEN}"),
    ("/api/webhooks/", r"(?i)(/api/webhooks/)[^\s\"'<>\\]+", rf"\1{HIDDEN}"),
    # Keys of providers and others, by how they begin.
    ("sk-", r"(?<![A-Za-z0-9])(sk-)(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{12,}", rf"\1{HIDDEN}"),
    (
        "hf_ ghp_ gho_ ghs_ ghu_ ghr_ npm_ glpat- xapp-",
        r"(?<![A-Za-z0-9])(hf_|gh[opsur]_|npm_|glpat-|xapp-)[A-Za-z0-9_-]{16,}",
        rf"\1{HIDDEN}",
    ),
    ("github_pat_ pypi-", r"(?<![A-Za-z0-9])(github_pat_|pypi-)[A-Za-z0-9_-]{20,}", rf"\1{HIDDEN}"),
    ("akia asia", r"(?<![A-Za-z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])", rf"\1{HIDDEN}"),
    ("gsk_ nvapi- xai- hvs.", r"(?<![A-Za-z0-9])(gsk_|nvapi-|xai-|hvs\.)[A-Za-z0-9_-]{16,}", rf"\1{HIDDEN}"),
    ("ya29.", r"(?<![A-Za-z0-9])(ya29\.)[A-Za-z0-9_-]{16,}", rf"\1{HIDDEN}"),
    ("_live_ _test_", r"(?<![A-Za-z0-9])([sr]k_(?:live|test)_)[A-Za-z0-9]{12,}", rf"\1{HIDDEN}"),
    ("aiza", r"(?<![A-Za-z0-9])(AIza)[A-Za-z0-9_-]{30,}", rf"\1{HIDDEN}"),
    ("xox", r"(?<![A-Za-z0-9])(xox[abeprs]-)[A-Za-z0-9-]{10,}", rf"\1{HIDDEN}"),
    ("whsec_", r"(?<![A-Za-z0-9])(whsec_)[A-Za-z0-9+/=_-]{16,}", rf"\1{HIDDEN}"),
    # JSON web tokens.
    ("eyj", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?", HIDDEN),
)
"""What a text must hold one of (in small letters) to be searched at all, which spares nearly every line the search;
what is searched; what takes its place."""

_PATTERNS = tuple((tuple(words.split()), re.compile(pattern), replacement) for words, pattern, replacement in _RULES)


_NAMED = ("auth", "pass", "pwd", "secret", "key", "token", "cookie", "credential", "sig", "bearer")
"""What a text must hold one of to be searched for names."""


def redact(text: str) -> str:
    """The text without the secrets that can be told by their shape or by the name before them."""
    small = text.lower()
    for words, pattern, replacement in _PATTERNS:
        for word in words:
            if word in small:
                text = pattern.sub(replacement, text)
                break
    if any(name in small for name in _NAMED):
        text = _without_named(text, _TIES)
        if "--" in text:
            text = _without_named(text, _FLAGS)
    if "user " in small and " >" in small:
        text = _ACL_USER.sub(lambda line: _ACL_PASSWORD.sub(rf"\1{HIDDEN}", line[0]), text)
    return text


_ACL_USER = re.compile(
    r"(?im)(?<![^\s\"'])user[ \t]{1,8}\S{1,200}[ \t]{1,8}(?:on|off|reset|sanitize-payload|nopass)\b.*"
)
_ACL_PASSWORD = re.compile(r"((?<=[ \t])>)[^\s\"']+")
"""A user as ACL LIST and its file show it, and a password in it."""


def _without_named(text: str, ties: re.Pattern[str]) -> str:
    """The text without the values whose names say that they are secrets. Each part of it is read a bounded number of
    times: what stands between name and value is looked for, and only then the name before it."""
    parts, done, at = [], 0, 0
    while (tie := ties.search(text, at)) is not None:
        at = tie.end()
        name = _name_before(text, tie.start(1))
        value = _secret_behind(text, kind_of(name), tie)
        if value is not None:
            parts += [text[done : value[0]], HIDDEN]
            done = at = value[1]
    return "".join([*parts, text[done:]]) if parts else text


def _name_before(text: str, end: int) -> str:
    found = _BACKWARDS.match(text[max(0, end - LONGEST) : end][::-1])
    name = found[0][::-1] if found else ""
    if name.lower() == "key":
        begin = end - len(name)
        for word in _SPACED_KEY:
            if text[max(0, begin - len(word)) : begin].lower() == word:
                return word + name
    return name


def _secret_behind(text: str, kind: Kind, tie: re.Match[str]) -> tuple[int, int] | None:
    """Where the secret begins and ends that a name of this kind has behind its tie; None if there is none."""
    if kind is Kind.PLAIN:
        return None
    begin, quote = tie.end(), tie[1][-1]
    if kind is Kind.LINE:
        scheme = _SCHEME.match(text, begin)
        begin = scheme.end() if scheme else begin
        found = _TO_QUOTE.get(quote, _TO_LINE_END).match(text, begin)
        return found.span() if found else None
    head = _VALUE.match(text, begin, begin + LONGEST)  # enough to judge by, and no more: the rest may be long
    if head is None or not _is_secret(head[0], kind, tie[1]):
        return None
    found = _VALUE.match(text, begin)
    return found.span() if found else None


def _is_secret(value: str, kind: Kind, tie: str) -> bool:
    if kind is Kind.VALUE:
        return True
    if kind is Kind.SIGNATURE:
        return tie == "=" and _SIGNATURE_LIKE.match(value) is not None
    if _NOTHING.fullmatch(value):
        return False
    said = kind is Kind.WEAK or "=" in tie or "'" in tie or '"' in tie or not tie.strip()
    return said or _SECRET_LIKE.match(value) is not None


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
