"""Content rules ([content.<name>]): what texts of a tenant may not hold, and what is done about it.

The rules of one tenant and one direction are compiled together (penstock/patterns.py), once per process and only if
there are any: without rules, nothing is imported and no text is looked at.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.config import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Counter

    from penstock.patterns import Patterns

log = logging.getLogger(__name__)

Action: TypeAlias = Literal["tag", "redact", "block"]
Direction: TypeAlias = Literal["input", "output"]
Detector: TypeAlias = Literal["card", "iban", "national_id", "email", "secret", "injection"]
Phrase: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]

RULE_NAME = re.compile("[A-Za-z0-9_-]{1,40}")


class ContentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of [content.<name>]: a rule."""

    deny: Annotated[tuple[Phrase, ...], msgspec.Meta(max_length=500)] = ()
    """Words and phrases, in any case and with any white space between words."""
    detect: tuple[Detector, ...] = ()
    """What it finds besides."""
    on: tuple[Direction, ...] = ("input", "output")
    """Where it looks: requests, answers."""
    action: Action = "block"
    """tag: only count it; redact: replace it; block: refuse the request, or end the answer."""
    default: bool = False
    """Whether it holds for tenants without `content` in [tenants.<name>]."""


class Hit(NamedTuple):
    """Something that a rule found in a text."""

    start: int
    end: int
    """Where, in bytes of UTF-8 from the text's beginning."""
    rule: str
    action: Action


MAX_MATCH_BYTES = 2048
"""No match is longer: a phrase has at most 100 characters of 4 bytes, with at most 3 for each white space."""


MAX_LOOKS = 1000
"""Places of one request where a match may begin; each takes 20 to 130 us."""


class TooMuch(Exception):
    """Raised when texts have more such places than can be looked at."""


class Scanner:
    """Looks through one text as it comes."""

    def __init__(self, patterns: Patterns, shown: str = "") -> None:
        """`shown`: the text's beginning, which readers have: a match in it is none, but one may begin in it."""
        self._patterns, self.known = patterns, 0
        """`known`: bytes of what was shown."""
        self._text, self._offset = b"", 0
        """What may still be part of a match, behind the byte before it; and where that begins in the whole text."""
        self.decided = 0
        """Bytes of the text in which no further match can begin."""
        self.blocked = False
        self.looks = 0
        """Places where a match might have begun."""
        if shown:
            self.known = len(shown.encode("utf-8", "surrogatepass"))
            self.feed(shown)
            self.looks = 0

    @property
    def waiting(self) -> bytes:
        """What may be the begin of a match."""
        return self._text[self.decided - self._offset :]

    def feed(self, text: str, *, last: bool = False, looks: int = sys.maxsize) -> list[Hit]:
        """Return what was found since the last call, by place. A block is the last: what follows is not looked at.

        Args:
            last: the text ends here.
            looks: how many places there may be. Raises TooMuch.
        """
        if self.blocked:
            return []
        patterns, offset = self._patterns, self._offset
        self._text = held = self._text + text.encode("utf-8", "surrogatepass")
        at, hits = self.decided - offset, list[Hit]()
        end = len(held) if last else patterns.begun(held, at)
        while at < end and (at := patterns.next(held, at)) < end:
            self.looks += 1
            if self.looks > looks:
                raise TooMuch
            behind = at + 1
            for hit in patterns.at(held, at):
                start, stop = max(self.known, offset + hit.start), offset + hit.end
                if stop <= start:
                    continue
                hits.append(hit._replace(start=start, end=stop))
                if hit.action == "block":
                    self.blocked, self.decided = True, start
                    return hits
                if hit.action == "redact":  # what overlaps it is not looked for
                    behind = hit.end
                    break
            at = behind
            if at > end:
                end = len(held) if last else patterns.begun(held, at)
        self.decided = offset + end
        kept = max(0, end - 1)
        self._text, self._offset = held[kept:], offset + kept
        return hits


FIELDS = frozenset({"prompt", "turns", "content", "calls", "arguments", "texts", "groups", "tools", "offered",
                    "description", "parameters", "extras", "passed", "parts"})  # fmt: skip
"""Fields of a job and of its parts that hold texts for the model."""


class Cleaner:
    """Cleans the whole texts of one request, or those beside an answer. Raises TooMuch."""

    def __init__(self, patterns: Patterns, looks: int = MAX_LOOKS) -> None:
        self._patterns, self.looks = patterns, looks
        """`looks`: how many places there may still be."""
        self.hits: list[Hit] = []

    def text(self, text: str) -> str:
        """A text as it may be shown, up to where it is blocked."""
        return self.part(Scanner(self._patterns), text, last=True)

    def part(self, scanner: Scanner, text: str, *, last: bool = False) -> str:
        """What may be shown now of a text that comes in parts."""
        begin, before = max(scanner.known, scanner.decided), scanner.looks
        data = scanner.waiting + text.encode("utf-8", "surrogatepass")
        data = data[begin - scanner.decided :]
        found = scanner.feed(text, last=last, looks=before + self.looks)
        self.looks -= scanner.looks - before
        self.hits += found
        return edited(data[: max(0, scanner.decided - begin)], begin, found)

    def value(self, value: Any) -> Any:
        """A job, a part of one, or JSON, with each of its texts as it may be shown."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.value(key): self.value(each) for key, each in value.items()}
            case list():
                return [self.value(each) for each in value]
            case tuple():
                return tuple([self.value(each) for each in value])
            case msgspec.Struct():
                names = [name for name in value.__struct_fields__ if name in FIELDS]
                return msgspec.structs.replace(value, **{name: self.value(getattr(value, name)) for name in names})
        return value


def edited(data: bytes, offset: int, hits: list[Hit]) -> str:
    """A part of a text, which begins at `offset` of the whole, as it may be shown: redacted, and cut at a block. A
    redaction stands where its match begins."""
    shown, at, end = "", offset, offset + len(data)
    for hit in hits:
        if hit.action == "block" and hit.start < end:
            return shown + _decoded(data[at - offset : max(at, hit.start) - offset])
        if hit.action != "redact" or hit.end <= offset or hit.start >= end:
            continue
        shown += _decoded(data[at - offset : max(at, hit.start) - offset])
        shown += marker(hit.rule) if hit.start >= offset else ""
        at = min(hit.end, end)
    return shown + _decoded(data[at - offset :])


def marker(rule: str) -> str:
    """What stands for a redacted text; it may stand inside JSON."""
    return f"[redacted: {rule}]"


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def note(hits: Iterable[Hit], counter: Counter, job_id: str, logged: set[str]) -> None:
    """Count what was found in a job, and log the names of rules that are not `logged` yet; never the text."""
    for hit in hits:
        counter.labels(hit.rule, hit.action).inc()
        if hit.rule not in logged:
            logged.add(hit.rule)
            log.info("a content rule matches", extra={"rule": hit.rule, "action": hit.action, "job": job_id})


TenantRules: TypeAlias = "Callable[[str], Patterns | None]"
"""Returns the compiled rules of a tenant; None if it has none."""


def rules_of(
    rules: Mapping[str, ContentSettings],
    tenants: Mapping[str, Sequence[str] | None],
    directions: Sequence[Direction],
) -> TenantRules | None:
    """Compile the rules for one direction, or for both; None if no tenant has any.

    Args:
        rules: by name.
        tenants: names of rules, by tenant; None: the default ones.

    Raises:
        ConfigError: a name that is no rule's, or a rule that cannot be used.
    """
    for name, rule in rules.items():
        if not RULE_NAME.fullmatch(name):
            raise ConfigError(f"content.{name}", "the name is not 1 to 40 letters, digits, _ and -")
        if not rule.deny and not rule.detect:
            raise ConfigError(f"content.{name}", "the rule finds nothing", "set deny or detect")
    compiled: dict[tuple[str, ...], Patterns | None] = {}

    def of(names: Sequence[str]) -> Patterns | None:
        used = tuple([name for name in rules if name in names and set(directions).intersection(rules[name].on)])
        if used and used not in compiled:
            from penstock.patterns import Patterns  # noqa: PLC0415 - RE2 is loaded only where rules are

            compiled[used] = Patterns({name: rules[name] for name in used})
        return compiled.get(used)

    for tenant, names in tenants.items():
        if unknown := [name for name in names or () if name not in rules]:
            raise ConfigError(f"tenants.{tenant}.content", f"there is no [content.{unknown[0]}]", "add it")
    default = of([name for name, rule in rules.items() if rule.default])
    own = {tenant: of(names) for tenant, names in tenants.items() if names is not None}
    return (lambda tenant: own.get(tenant, default)) if default is not None or any(own.values()) else None
