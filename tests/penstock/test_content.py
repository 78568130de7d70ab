"""Content rules: what they find and what not, and that it does not depend on how a text comes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.content import AROUND, BENIGN, KEYS, LISTED, pages
from penstock.config import ConfigError
from penstock.content import Cleaner, ContentSettings, Hit, Scanner, TooMuch, edited, marker, rules_of
from penstock.patterns import DETECTORS, Patterns


def cleaned(patterns: Patterns, text: str) -> tuple[str, list[Hit]]:
    """A text as it may be shown, and what was found in it."""
    cleaner = Cleaner(patterns)
    return cleaner.text(text), cleaner.hits


ALL = ContentSettings(detect=tuple(DETECTORS), action="redact")


@pytest.mark.parametrize(("detector", "text"), [(name, text) for name, texts in LISTED.items() for text in texts])
def test_listed_patterns_are_found(detector: str, text: str) -> None:
    """Each one alone and in a sentence, and nothing of it is left."""
    patterns = Patterns({"r": ContentSettings(detect=(detector,), action="redact")})  # type: ignore[arg-type]
    for before, after in AROUND:
        shown, hits = cleaned(patterns, before + text + after)
        assert [hit.rule for hit in hits] == ["r"]
        assert marker("r") in shown and not any(word in shown for word in text.split() if len(word) > 7)


def test_benign_texts_are_left_alone() -> None:
    """False alarms of all detectors together on texts that look like what they are for: none."""
    patterns = Patterns({"r": ALL})
    assert [cleaned(patterns, text)[0] for text in BENIGN] == BENIGN


def test_pages_of_documentation_are_left_alone() -> None:
    """Of a quarter of a million characters of prose, commands and figures, no detector takes anything for a match."""
    names = [name for name in DETECTORS if name != "email"]
    patterns = Patterns({name: ContentSettings(detect=(name,), action="tag") for name in names})
    assert sum(map(len, pages())) > 200_000
    assert [hit for page in pages() for hit in cleaned(patterns, page)[1]] == []


def test_changed_digits_are_no_card() -> None:
    """A checksum tells a number from any other of its shape: with one wrong digit, none of them is one."""
    patterns = Patterns({"r": ContentSettings(detect=("card", "iban", "national_id"), action="redact")})
    for text in ("4111 1111 1111 1111", "5555555555554444", "DE89370400440532013000"):
        for at in (place for place, each in enumerate(text) if each.isdigit() and place > 1):
            wrong = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
            assert cleaned(patterns, wrong) == (wrong, [])


@pytest.mark.parametrize(
    ("phrase", "found", "left"),
    [
        ("project falcon", ["Project  Falcon!", "PROJECT\nFALCON"], ["project falcons", "subproject falcon"]),
        ("straße", ["Die Straße hier", "STRAßE"], ["Strase"]),
        ("机密", ["这是机密文件"], ["机 密"]),
        ("c++ (old)", ["use C++ (old) here"], ["c++ old", "cc (old)"]),
        ("a.b", ["A.B"], ["axb"]),
    ],
)
def test_phrases(phrase: str, found: list[str], left: list[str]) -> None:
    """In any case and with any white space, as whole words, and with no character of special meaning."""
    patterns = Patterns({"r": ContentSettings(deny=(phrase,))})
    assert all(cleaned(patterns, text)[1] for text in found)
    assert not any(cleaned(patterns, text)[1] for text in left)


RULES = {
    "keys": ContentSettings(detect=("secret",), action="block"),
    "pii": ContentSettings(detect=("card", "iban", "national_id", "email"), action="redact"),
    "names": ContentSettings(deny=("falcon", "falcon nine", "nine lives", "机密"), action="redact"),
    "seen": ContentSettings(deny=("lives", "4111"), detect=("injection",), action="tag"),
}
PATTERNS = Patterns(RULES)
WITHOUT_BLOCKS = Patterns({name: rule for name, rule in RULES.items() if rule.action != "block"})
PARTS = st.sampled_from([
    *itertools.chain(*LISTED.values()), "falcon", "nine", "lives", "机", "密", " ", "4111", "1111 ", "DE89 ", "sk-",
    "a", "@b", ".co", "-", "\n", "ignore all", " previous", "é", "😀", "12345678", "Z",
])  # fmt: skip
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def in_pieces(patterns: Patterns, pieces: list[str], shown: str = "") -> tuple[str, list[Hit]]:
    """What a reader sees of a text that comes in pieces, and what was found."""
    scanner, hits = Scanner(patterns, shown), list[Hit]()
    for piece in [*pieces[:-1], *pieces[-1:]]:
        hits += scanner.feed(piece)
    hits += scanner.feed("", last=True)
    return edited("".join(pieces).encode(), scanner.known, hits), hits


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8))
def test_what_is_found_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    """For any split of a text, the filtered stream is the filter of the whole."""
    places = sorted({0, len(text), *(min(each, len(text)) for each in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    for patterns in (PATTERNS, WITHOUT_BLOCKS):
        assert in_pieces(patterns, pieces) == in_pieces(patterns, [*text]) == cleaned(patterns, text)


@given(TEXTS)
def test_what_is_decided_stays(text: str) -> None:
    """However a text goes on, nothing begins later in what was decided: it can be shown. And only what may belong to a
    match waits."""
    scanner = Scanner(WITHOUT_BLOCKS)
    for each in text:
        before = scanner.decided
        assert all(hit.start >= before for hit in scanner.feed(each))
    assert len(text.encode()) - scanner.decided <= max(map(len, KEYS)) + 300


def test_the_leftmost_match_counts() -> None:
    """What overlaps a redaction is not looked for, so that nothing of it comes back; a tag takes nothing from others;
    and of those that begin together, the one that blocks counts."""
    rules = {
        "soft": ContentSettings(deny=("blue moon rising",), action="redact"),
        "hard": ContentSettings(deny=("moon rising sun", "blue moon rising high")),
        "seen": ContentSettings(deny=("a blue", "rising", "blue"), action="tag"),
    }
    for text, shown, found in (
        ("A blue moon rising sun and blue", f"A {marker('soft')} sun and blue", ["seen", "seen", "soft", "seen"]),
        ("A blue moon rising high", "A ", ["seen", "hard"]),
        ("The moon rising sun, blue", "The ", ["hard"]),
    ):
        got, hits = cleaned(Patterns(rules), text)
        assert (got, [hit.rule for hit in hits]) == (shown, found)


def test_rules_of_tenants() -> None:
    """A tenant has the rules that it names, or else the default ones, each in its direction."""
    rules = {
        "a": ContentSettings(deny=("x",), default=True),
        "b": ContentSettings(deny=("y",), on=("output",)),
    }
    tenants = {"own": ("b",), "none": (), "plain": None}
    given_in, given_out = rules_of(rules, tenants, ["input"]), rules_of(rules, tenants, ["output"])
    assert given_in is not None and given_out is not None
    assert given_in("own") is None and given_in("none") is None and given_out("none") is None
    for tenant in ("plain", "other"):
        assert given_in(tenant) is not None and given_in(tenant) is given_in("plain")
    own = given_out("own")
    assert own is not None and own.actions == {"b": "block"}
    assert rules_of({}, {"plain": None, "none": ()}, ["input", "output"]) is None


@pytest.mark.parametrize(
    ("rules", "tenants", "key"),
    [
        ({"a": ContentSettings()}, {}, "content.a"),
        ({'a"b': ContentSettings(deny=("x",))}, {}, 'content.a"b'),
        ({}, {"t": ("gone",)}, "tenants.t.content"),
        ({"a": ContentSettings(deny=("  ",), default=True)}, {}, "content.a.deny"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(
    rules: dict[str, ContentSettings], tenants: dict[str, tuple[str, ...]], key: str
) -> None:
    """At the start, with its key."""
    with pytest.raises(ConfigError) as error:
        rules_of(rules, tenants, ["input"])
    assert error.value.key == key


def test_the_places_of_a_request_are_bounded() -> None:
    """A text of some kilobytes may be of numbers that are no cards alone: it is given up. One of words is not."""
    for text in ("4111 " * 200_000, "AA00 " * 2000):
        with pytest.raises(TooMuch):
            cleaned(PATTERNS, text)
    assert cleaned(PATTERNS, "Numbers and words. " * 50_000)[1] == []


def test_a_long_deny_list_is_one_expression() -> None:
    """The longest that the settings take compiles, and finds its last phrase."""
    phrases = tuple(f"word{number} of a phrase of a list {number * 7919:x}" for number in range(500))
    patterns = Patterns({"r": ContentSettings(deny=phrases, action="redact")})
    assert cleaned(patterns, f"so {phrases[-1]}.")[0] == f"so {marker('r')}."
