"""Reasoning marker: the split of an answer into reasoning and text, however its text comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.engine import Piece
from penstock.tools import REASONED, REASONING, TEXT, CallReader, read_answer
from workers.engines.reasoning import ReasoningMarker, ReasoningWriter, as_written

TEXTS = [
    "<think>a b</think>c", "<think>\n\n</think>\n\nc", "  <think> a<b </thin </think> c </think> d",
    "c <think>a</think>", "<thinking>a", "<think>a </thi", "<thi", "", "  ", "\n", "<think></think>", "a",
    "</think>a", "<think>a</think>",
]  # fmt: skip


def passed(texts: Sequence[str], *, past: Sequence[Piece] = (), opened: bool = False) -> list[Piece]:
    """The pieces of an answer that comes in these texts, one token each."""
    gate = ReasoningMarker("".join(piece.text for piece in past), opened=opened)
    pieces = [gate.feed(Piece("r", text, (number,), 1)) for number, text in enumerate(texts)]
    return [piece for piece in (*pieces, gate.flush("r")) if piece.n or piece.text]


def marked(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_the_split_does_not_depend_on_the_pieces(text: str, opened: bool) -> None:
    """Nor is a token lost or the text changed: the marks stand for the tags."""
    whole = marked(passed([text], opened=opened)) if text else ""
    for size in (1, 2, 3, 7):
        pieces = passed([text[at : at + size] for at in range(0, len(text), size)], opened=opened)
        assert marked(pieces) == whole and as_written(whole, opened=opened) == text
        assert sum(piece.n for piece in pieces) == len(range(0, len(text), size))


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ("<think>a b</think>c", "a b", "c"), ("<think>\n\n</think>\n\nc", "", "c"),
        ("c <think>a</think>", "", "c <think>a</think>"),
        ("<think>a </thi", "a </thi", ""), ("<thi", "", "<thi"), ("<think> a</think> b</think>", "a", "b</think>"),
    ],
)  # fmt: skip
def test_what_is_reasoning_and_what_is_text(text: str, reasoning: str, said: str) -> None:
    """Only at the begin of an answer; white space around a tag is of neither."""
    answer = read_answer([marked(passed(list(text)))])
    assert (answer.reasoning, answer.text) == (reasoning, said)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "</", " ", "\n", "a", "\x1c", "\x1d"])),
    st.booleans(),
)
@example(texts=["</think>", "<think>"], opened=True)
def test_another_attempt_continues_after_any_piece(texts: list[str], opened: bool) -> None:
    """Tokens that have passed are a prefix of those generated, and what comes after them is split as without a cut."""
    pieces = passed(texts, opened=opened)
    for cut in range(len(pieces) + 1):
        before = pieces[:cut]
        count = sum(piece.n for piece in before)
        assert [number for piece in before for number in piece.ids] == list(range(count))
        assert marked(before) + marked(passed(texts[count:], past=before, opened=opened)) == marked(pieces)


def test_what_a_server_tells_apart_is_marked() -> None:
    writer = ReasoningWriter()
    chunks = [("a", ""), (" b\x1d", ""), ("", "c"), ("", " d"), ("e", "f")]
    text = "".join(writer.write(*chunk) for chunk in chunks)
    assert text == f"{REASONING}a b{TEXT}c d{REASONING}e{TEXT}f"
    reader = CallReader()
    parts = [part for char in text for part in reader.feed(char)]
    assert "".join(part.text for part in parts if part.call == REASONED) == "a be"
