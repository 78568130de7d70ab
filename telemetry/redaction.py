"""Secret redaction: replaces secrets, recognised by their format or their name, in text and in structured values.

Logs, spans and error messages of settings pass through it. It is the last line of defence: prompts and answers have no
format to recognise, and callers must not log them at all. Every pattern takes linear time: repetitions are bounded, or
followed by a character that they cannot contain.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec

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


HIDDEN = "***"

_TIE = r"(\\*[\"']?\]?\s{0,8}(?:[:=]|,(?=\s{0,8}b?\\*[\"']))\s{0,8}(?:b(?=\\*[\"']))?\\*[\"']?)"
"""Separator of a name and its value: in JSON (also inside a JSON string), in the repr of a Python mapping or of a pair
of texts or bytes, in a header, in a query string."""

_TIES = re.compile(rf"(?<=[A-Za-z0-9]){_TIE}")
_FLAGS = re.compile(r"(?<![\w-])--[A-Za-z][A-Za-z0-9-]{1,40}([ \t]{1,8}[\"']?)(?![\s-])")
"""A command-line option, with its separator from the value as the group."""

_BACKWARDS = re.compile(r"[A-Za-z0-9_-]+")
_SPACED_KEY = ("api ", "secret ", "access ", "private ", "signing ", "encryption ", "admin ")

_VALUE = re.compile(r"(?:(?<=(?<!\\)\")(?:[^\"\\]|\\.)+|(?<=\")[^\"\\]+|(?<=')[^'\\]+|[^\s\"',;&}\\]+)")
"""A value: up to the closing quote, or to the end of the word."""

_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|negotiate|ntlm|token|api-?key|aws4-hmac-sha256)[ \t]{1,8}(?=\S)")
_TO_QUOTE = {quote: re.compile(rf"(?:[^{quote}\n\\]|\\(?![rn\"'\\]))+") for quote in "\"'"}
_TO_LINE_END = re.compile(r"(?:[^\n\"'\\]|\\(?![rn\"'\\])|(?<==)\"[^\"\\\n]{0,1000}\")+")
"""Up to the end of an unquoted header, whose parameters may be quoted (`username="x"`)."""

_NOTHING = re.compile(r"(?i)(?:\d{1,3}(?:\.\d*)?[a-z%]{0,2}|none|null|nil|true|false|yes|no|on|off)")
_SECRET_LIKE = re.compile(
    r"(?=[A-Za-z._~+/=-]{0,64}[0-9]|[^\s]{16})(?![0-9.]+(?:[^A-Za-z0-9]|$))[A-Za-z0-9._~+/=-]{6,}"
)
_SIGNATURE_LIKE = re.compile(r"[A-Za-z0-9%+/_.~-]{16}")

_BREAK = r"(?:\s|\\r|\\n){1,8}"
"""Separator of words in a Redis command on the wire, raw or with escapes."""

_MIXED = r"(?=[a-z_.-]{0,64}[0-9])(?=[0-9_.-]{0,64}[a-z])[^\s\"'`,;]{8,}"
"""A word of letters and digits."""
_ALONE_redaction = r"[^\s\"'`]+(?:[ \t]{1,8}[^\s\"'`]+)?(?=[ \t]{0,8}(?:$|[\r\"'`]))"
"""One or two words to the end of the line or of a quotation."""

_RULES = (
    # The password of a URL.
    ("://", r"(://[^\s/:@]*:)[^\s/]*@", rf"\1{HIDDEN}@"),
    # A password with a slash or other illegal characters: what follows the colon is not a port.
    (
        "://",
        r"(://[^\s/:@]{0,64}:)(?!\d{1,5}(?:[/?#]|$)|\*\*\*)[^\s@\"'<>]{1,128}@",
        rf"\1{HIDDEN}@",
    ),
    # A token in place of the user name.
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
    # Redis: AUTH with or without a user, on the wire and as text; passwords in its configuration and in ACL commands.
    ("auth", rf"(?i)(?<![a-z])(AUTH)(?:{_BREAK}\$\d{{1,6}}{_BREAK}[^\s\\]+)+", rf"\1 {HIDDEN}"),
    ("auth", r"(?<![A-Za-z])AUTH[ \t]+(?!\*\*\*)[^\s\"']+(?:[ \t]+[^\s\"']+)?", f"AUTH {HIDDEN}"),
    (
        "hello",
        r"(?i)(?<![a-z])(hello[ \t]{1,8}[23][ \t]{1,8}auth)[ \t]+(?!\*\*\*)[^\s\"']+(?:[ \t]+[^\s\"']+)?",
        rf"\1 {HIDDEN}",
    ),
    # In lower case "auth" is also a word: match it only as a whole command.
    ("auth", rf"(?im)(?:(?<=[\"'`>:])|(?<=[>:] )|^)(auth)[ \t]{{1,8}}(?!\*\*\*){_ALONE_redaction}", rf"\1 {HIDDEN}"),
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
    # URLs whose path is a secret.
    ("hooks.slack.com/", r"(?i)(hooks\.slack\.com/[a-z]{1,16}/)[^\s\"'<>\\]+", rf"\1{HIDDEN}"),
    ("/api/webhooks/", r"(?i)(/api/webhooks/)[^\s\"'<>\\]+", rf"\1{HIDDEN}"),
    # Keys with known prefixes.
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
"""(keywords, pattern, replacement). A text is searched only if it contains one of the keywords in lower case, which
skips the search for nearly every line."""

_PATTERNS = tuple((tuple(words.split()), re.compile(pattern), replacement) for words, pattern, replacement in _RULES)


_NAMED = ("auth", "pass", "pwd", "secret", "key", "token", "cookie", "credential", "sig", "bearer")
"""A text is searched for names of secrets only if it contains one of these."""

_ALL_WORDS = {word for words, *_ in _PATTERNS for word in words} | {*_NAMED, "user "}
_WORDS = tuple(sorted(word for word in _ALL_WORDS if not any(other in word for other in _ALL_WORDS - {word})))
"""A text without any of these has nothing to replace. One loop over them is what nearly every text costs."""


def redact(text: str) -> str:
    """Replace secrets in a text, recognised by their format or by the name before them."""
    small = text.lower()
    for word in _WORDS:
        if word in small:
            return _redacted(text, small)
    return text


def _redacted(text: str, small: str) -> str:
    """Apply every rule. `small`: the text in lower case."""
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
"""A user in the format of ACL LIST and of ACL files, and a password in it."""


def _without_named(text: str, ties: re.Pattern[str]) -> str:
    """Replace the values whose names denote secrets. Linear time: it searches for separators of name and value, and
    only then reads the name before each."""
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
    found = _BACKWARDS.match(text[max(0, end - MAX_NAME_CHARS) : end][::-1])
    name = found[0][::-1] if found else ""
    if name.lower() == "key":
        begin = end - len(name)
        for word in _SPACED_KEY:
            if text[max(0, begin - len(word)) : begin].lower() == word:
                return word + name
    return name


def _secret_behind(text: str, kind: Kind, tie: re.Match[str]) -> tuple[int, int] | None:
    """Start and end of the secret after the separator `tie` of a name of this kind; None if there is none."""
    if kind is Kind.PLAIN:
        return None
    begin, quote = tie.end(), tie[1][-1]
    if kind is Kind.LINE:
        scheme = _SCHEME.match(text, begin)
        begin = scheme.end() if scheme else begin
        found = _TO_QUOTE.get(quote, _TO_LINE_END).match(text, begin)
        return found.span() if found else None
    head = _VALUE.match(text, begin, begin + MAX_NAME_CHARS)  # a prefix is enough to decide, and the value may be long
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
    fields = _fields(value)
    if fields is None:
        return value
    return {key: HIDDEN if is_secret_name(key) else clean(item) for key, item in fields.items()}


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The fields of a mapping or record by name; None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None
