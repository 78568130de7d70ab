"""Stop strings: cut exactly before the match, whatever the chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import Logprob, Piece, token_bytes, token_text
from workers.engines.text import StopMatcher, TokenGate, joined

TEXT = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def chunks(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[left:right] for left, right in pairwise(edges)]


def before_match(text: str, stops: list[str]) -> str:
    """The plain definition: read letter by letter until a stop string is complete; the longest one wins."""
    for end in range(1, len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(ended)]
    return text


@given(TEXT, STOPS, st.lists(st.integers(0, 14), max_size=5))
def test_the_cut_does_not_depend_on_the_chunking(text: str, stops: list[str], cuts: list[int]) -> None:
    """All that is shown is the text before the first complete match."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(chunk) for chunk in chunks(text, cuts)) + matcher.flush()
    assert shown == before_match(text, stops)
    assert bool(matcher.hit) == any(stop in text for stop in stops)
    assert not matcher.hit or (shown + matcher.hit == text[: len(shown + matcher.hit)] and matcher.hit in stops)


@given(TEXT, TEXT, STOPS)
def test_a_stop_string_across_a_resumption_is_found_and_nothing_is_shown_twice(
    past: str, text: str, stops: list[str]
) -> None:
    """A matcher that was told the past shows what one that saw it all would, less the past."""
    if any(stop in past for stop in stops):
        assert StopMatcher(stops, past).hit
        return
    matcher = StopMatcher(stops, past)
    shown = matcher.feed(text) + matcher.flush()
    assert shown == before_match(past + text, stops)[len(past) :]
    assert bool(matcher.hit) == any(stop in past + text for stop in stops)


@given(st.lists(st.text("ab", max_size=3), max_size=8), STOPS)
def test_the_gate_lets_only_whole_tokens_through(tokens: list[str], stops: list[str]) -> None:
    """Until the end, the text that passed is exactly the text of the tokens that passed."""
    gate = TokenGate(stops)
    text, ids = "", list[int]()
    for number, token in enumerate(tokens):
        passed = gate.feed(Piece("r", token, (number,), 1))
        text, ids = text + passed.text, [*ids, *passed.ids]
        assert passed.n == len(passed.ids)
        if gate.hit:
            assert len(ids) == number + 1, "with the match comes all that was generated"
            break
        assert text == "".join(tokens[: len(ids)])
    rest = gate.flush("r")
    assert text + rest.text == before_match("".join(tokens), stops)
    assert gate.hit or [*ids, *rest.ids] == list(range(len(tokens)))


def test_tokens_behind_the_cut_show_no_logprobs() -> None:
    """Log-probabilities stand only for what is shown: the last token is cut as the text is."""
    gate = TokenGate(["END"])
    first = gate.feed(Piece("r", "a E", (1,), 1, logprobs=(Logprob("a E", -1.0),)))
    last = gate.feed(Piece("r", "ND b", (2,), 1, logprobs=(Logprob("ND b", -2.0),)))
    cut = TokenGate(["🎉"]).feed(
        Piece("r", " 🎉", (1,), 1, logprobs=(Logprob(" 🎉", -1.0, ((" 🎉", -1.0), ("a", -2.0))),))
    )
    assert cut.logprobs == (Logprob(" ", -1.0, ((" ", -1.0), ("a", -2.0))),)
    assert (first.text, first.n) == ("", 0)
    assert (last.text, last.n, last.ids) == ("a ", 2, (1, 2))
    assert [row.token for row in last.logprobs] == ["a "]
    gate = TokenGate(["é!"])
    halves = (Logprob("bytes:\\xc3", -1.0), Logprob("bytes:\\xa9", -2.0))
    rows = {"x": (Logprob("x", -1.0),), "é": halves, "!z": (Logprob("!z", -3.0),)}
    parts = [Piece("r", text, (1,), 1, logprobs=each) for text, each in rows.items()]
    whole = joined("r", [gate.feed(part) for part in parts])
    assert (whole.text, whole.n, [row.token for row in whole.logprobs]) == ("x", 3, ["x"])


HARD = (b"a", b" \xf0\x9f", b"\x98", "é".encode(), b"\xef\xbf\xbd", b"bytes:\\xf0", b"a\\\xff\n", b"")


@pytest.mark.parametrize("data", HARD)
def test_the_text_of_a_token_leads_back_to_its_bytes(data: bytes) -> None:
    text = token_text(data)
    assert token_bytes(text) == data and (text == data.decode(errors="replace") or text.startswith("bytes:"))
