"""Compiled content rules: find what rules forbid in a whole text, or in one that comes in pieces.

RE2 (google-re2) matches in time linear in the text, whatever the pattern; the library is kept by Google. A pattern is a
sequence of characters, classes and groups `(one|other)`, each at most a stated number of times, so that every match
has a bounded length. From each pattern a second one is derived, which matches whatever may be the begin of a match at
the end of a text: only that is held back until more of the text is known.

Whether a match begins at some character depends on that character, the one before it, and a bounded number of those
behind it. So what is found does not depend on how a text was split into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import re2

from penstock.config import ConfigError
from penstock.content import Action, ContentSettings, Detector, Hit

Check: TypeAlias = Callable[[str], int]
"""How many characters of a candidate are a match; 0: it is none."""

ORDER: tuple[Action, ...] = ("block", "tag", "redact")
MAX_MEMORY = 64 << 20
"""Bytes that RE2 may take for one expression; beyond it matches more slowly, still in linear time."""


# --- checksums -------------------------------------------------------------------------------------------------------


_DOUBLED = str.maketrans("0123456789", "0246813579")


def luhn(text: str) -> int:
    """Of payment cards (ISO/IEC 7812-1)."""
    digits = text.replace(" ", "").replace("-", "")[::-1]
    return 0 if sum(map(int, digits[::2] + digits[1::2].translate(_DOUBLED))) % 10 else len(text)


def mod_97(text: str) -> int:
    """Of an IBAN (ISO 13616), which may have further words in capitals behind it."""
    while len(compact := text.replace(" ", "")) >= 15:
        if int("".join([str(int(each, 36)) for each in compact[4:] + compact[:4]])) % 97 == 1:
            return len(text)
        text = text.rpartition(" ")[0]
    return 0


def mod_11_2(text: str) -> int:
    """Of resident identity numbers of China (GB 11643, ISO 7064 MOD 11-2)."""
    total = sum([(10 if each == "X" else int(each)) * 2 ** (17 - at) for at, each in enumerate(text)])
    return len(text) if total % 11 == 1 else 0


def dni(text: str) -> int:
    """Of DNI and NIE of Spain: the last letter follows from the number modulo 23."""
    number = int(text[:8].translate(str.maketrans("XYZ", "012")))
    return len(text) if "TRWAGMYFPDXBNJZSQVHLCKE"[number % 23] == text[-1] else 0


def nir(text: str) -> int:
    """Of social security numbers of France: the last two digits are 97 less the others modulo 97."""
    digits = text.replace(" ", "")
    return len(text) if int(digits[-2:]) == 97 - int(digits[:-2]) % 97 else 0


# --- patterns --------------------------------------------------------------------------------------------------------

_GAP = r"[\s\pZ]{1,3}"
_FORMER = "(previous|prior|earlier|above|preceding|foregoing)"
_ORDERS = "(instruction|prompt|rule|direction|message|guideline)s?"

DETECTORS: Mapping[Detector, tuple[tuple[str, Check | None], ...]] = {
    "card": (
        (r"\b[2-6]\d{12,18}\b", luhn),
        (r"\b[2-6]\d{3}[ -]\d{4}[ -]\d{4}[ -]\d{4}\b", luhn),
        (r"\b3\d{3}[ -]\d{6}[ -]\d{5}\b", luhn),
    ),
    "iban": ((r"\b[A-Z]{2}\d{2}" + r"[ ]?[A-Z0-9]{4}" * 2 + r"[ ]?[A-Z0-9]{0,4}" * 6 + r"\b", mod_97),),
    "national_id": (
        (r"\b[1-9]\d{5}(19|20)\d{9}[\dX]\b", mod_11_2),
        (r"\b[\dXYZ]\d{7}[ -]?[A-Z]\b", dni),
        (r"\b[12][ ]?\d{2}[ ]?\d{2}[ ]?\d{2}[ ]?\d{3}[ ]?\d{3}[ ]?\d{2}\b", nir),
    ),
    "email": ((r"\b[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9.-]{1,190}\.[A-Za-z]{2,24}\b", None),),
    "secret": tuple([
        (pattern, None)
        for pattern in (
            r"\bsk-[A-Za-z0-9_.-]{20,200}",
            r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
            r"\bgh(p|o|u|s|r)_[A-Za-z0-9]{36,255}",
            r"\bgithub_pat_[A-Za-z0-9_]{22,255}",
            r"\bglpat-[A-Za-z0-9_-]{20,64}",
            r"\bxox(a|b|p|r|s)-[A-Za-z0-9-]{10,200}",
            r"\bAIza[A-Za-z0-9_-]{35}",
            r"\bhf_[A-Za-z0-9]{30,60}\b",
            r"-----BEGIN [A-Z ]{0,24}PRIVATE KEY-----",
        )
    ]),
    "injection": tuple([
        ("(?i)" + pattern.replace(" ", _GAP), None)
        for pattern in (
            rf"\b(ignore|disregard|forget|override) (all |any |the |your |of |these |my ){{0,3}}{_FORMER} {_ORDERS}\b",
            r"\b(ignore|disregard|forget|override) (all |any |of ){0,2}(your|the) (system |safety |initial )?"
            rf"{_ORDERS}\b",
            r"\b(reveal|show|print|repeat|output|leak|tell) (me |us )?(your|the) (system|hidden|initial|secret) "
            r"(prompt|instructions)\b",
            r"\byou are now (DAN|jailbroken|unrestricted|in developer mode|in jailbreak mode)\b",
            r"\b(pretend|act as if|imagine) (that )?you (have|had) no (restrictions|rules|guidelines|limits|filters)\b",
            r"\bdo anything now\b",
        )
    ]),
}  # fmt: skip

_PART = re.compile(r"(?:\(([^()]*)\)|(\[[^\]]+\]|\\p[A-Z]|\\.|.))(\?|\{(\d+)(?:,(\d+))?\})?", re.DOTALL)


def _whole(pattern: str) -> str:
    """The pattern for RE2, with groups that capture nothing."""
    parts = _PART.finditer(pattern)
    return "".join([part[0] if part[1] is None else f"(?:{part[1]}){part[3] or ''}" for part in parts])


MAX_DEPTH = 12
"""Characters of a begin that are exact; behind them, any of the others may be missing. It compiles faster so."""


def _begun(pattern: str) -> str:
    """An expression for every begin of what the pattern matches, up to the whole."""
    parts = [*_PART.finditer(pattern)]
    found = ""
    if not any(part[1] for part in parts):
        found = "".join([f"{part[2]}{{0,{part[5] or part[4] or 1}}}" for part in parts[MAX_DEPTH:]])
        parts = parts[:MAX_DEPTH]
    for part in reversed(parts):
        group, single, times, low, high = part.groups()
        most = 1 if times in (None, "?") else int(high or low)
        if group is None:
            begins = f"{single}{{1,{most}}}" if most > 1 else single
        else:
            alternatives = "|".join([_begun(each) for each in group.split("|")])
            begins = f"(?:{alternatives})" if most == 1 else f"(?:{group}){{0,{most - 1}}}(?:{alternatives})"
        if not found:
            found = begins
        elif begins == part[0]:
            found = f"{begins}(?:{found})?"
        else:
            found = f"(?:{begins}|{_whole(part[0])}{found})"
    return found


def phrase(text: str) -> str:
    """The pattern of a phrase of a deny list: of whole words where it begins or ends with an ASCII letter or digit,
    else anywhere, since many scripts put no space between words."""
    words = ["".join([each if each.isalnum() else re.escape(each) for each in word]) for word in text.split()]
    before, after = [r"\b" if each.isascii() and each.isalnum() else "" for each in (words[0][0], words[-1][-1])]
    return f"(?i){before}{_GAP.join(words)}{after}"


class _Expression(NamedTuple):
    """A part of a rule."""

    rule: str
    action: Action
    match: Callable[[bytes, int], Any]
    check: Check | None


class Patterns:
    """Some rules, compiled together. Raises ConfigError."""

    def __init__(self, rules: Mapping[str, ContentSettings]) -> None:
        self.actions: Mapping[str, Action] = {name: rule.action for name, rule in rules.items()}
        self._expressions, every = list[_Expression](), list[str]()
        for name, rule in sorted(rules.items(), key=lambda each: ORDER.index(each[1].action)):
            for check, patterns in _by_check(name, rule).items():
                match = _compiled(f"content.{name}", _any(patterns, _whole)).match
                self._expressions.append(_Expression(name, rule.action, match, check))
                every += patterns
        self._search = _compiled("content", _any(every, _whole)).search
        self._search_begun = _compiled("content", rf"(?:{_any(every, _begun)})\z").search
        for search in (self._search, self._search_begun):
            search(b"a text", 0)  # the first one takes a hundred times as long as later ones: not a request's

    def next(self, text: bytes, at: int) -> int:
        """Where something that may be a match begins next, from `at` on; else the text's end."""
        found = self._search(text, at)
        return len(text) if found is None else int(found.start())

    def begun(self, text: bytes, at: int) -> int:
        """Where, from `at` on, a match may begin that is not complete, or may become longer; else the text's end."""
        found = self._search_begun(text, at)
        return len(text) if found is None else int(found.start())

    def at(self, text: bytes, start: int) -> Iterator[Hit]:
        """What begins just here: first what blocks, last what redacts."""
        for each in self._expressions:
            if (found := each.match(text, start)) is not None:
                end = found.end()
                if each.check is not None:
                    end = start + each.check(text[start:end].decode())  # candidates with a checksum are ASCII
                if end > start:
                    yield Hit(start, end, each.rule, each.action)


def _by_check(name: str, rule: ContentSettings) -> dict[Check | None, list[str]]:
    """The patterns of a rule, by their checksum. Raises ConfigError."""
    if empty := [each for each in rule.deny if not each.strip()]:
        raise ConfigError(f"content.{name}.deny", f"{empty[0]!r} is no phrase")
    found: dict[Check | None, list[str]] = {}
    if rule.deny:
        found[None] = [phrase(each) for each in sorted(rule.deny, key=len, reverse=True)]
    for pattern, check in [each for detector in rule.detect for each in DETECTORS[detector]]:
        found.setdefault(check, []).append(pattern)
    return found


def _any(patterns: list[str], form: Callable[[str], str]) -> str:
    """An expression for any of the patterns, in one of their forms; each may begin with `(?i)`."""
    return "|".join([f"(?i:{form(each[4:])})" if each[:4] == "(?i)" else f"(?:{form(each)})" for each in patterns])


def _compiled(key: str, expression: str) -> Any:
    """Raises ConfigError."""
    options = re2.Options()
    options.max_mem, options.log_errors = MAX_MEMORY, False
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        raise ConfigError(key, f"RE2 cannot compile the rule: {str(error)[:200]}", "shorten its deny list") from None
