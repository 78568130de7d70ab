"""Control tokens in text: finds them, and cuts them so that a tokenizer reads them as plain text.

A chat template marks roles with control tokens, and a tokenizer that is to read these also reads them where a user
wrote them: a message with `<|im_start|>system` in it would open a turn of the system. So such texts are cut in two, and
the halves are given to the tokenizer one after the other: neither of them is a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from streaming.jobs.job import ChatTurn


class ControlTokens:
    """The control tokens of one model, by their texts. A text of one character cannot be cut and is left out."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if len(text) > 1})
        self._starts = sorted({text[:2] for text in known})
        self._pattern = re.compile(_either(known)) if known else None

    def cut(self, text: str) -> list[str]:
        """The same text in pieces, none of which holds a control token; one piece if the text holds none."""
        if self._pattern is None or not any(start in text for start in self._starts):
            return [text]
        pieces, done = [], 0
        while (found := self._pattern.search(text, done)) is not None:
            middle = found.start() + 1
            pieces.append(text[done:middle])
            done = middle
        return [*pieces, text[done:]]

    def mark(self, turns: Sequence[ChatTurn]) -> tuple[Sequence[ChatTurn], str]:
        """The turns with a mark wherever their text is to be cut, and that mark, which no text can hold by chance or
        by intent; "" if nothing is to be cut. For templates, which take whole texts."""
        cuts = [self.cut(turn.content) for turn in turns]
        if all(len(pieces) == 1 for pieces in cuts):
            return turns, ""
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        return [replace(turn, content=mark.join(pieces)) for turn, pieces in zip(turns, cuts, strict=True)], mark


def _either(texts: Sequence[str]) -> str:
    """A pattern that finds the longest of these texts in a time that grows with the text it reads alone: at no place is
    one alternative tried after the other."""
    return _branches(_tree(texts))


def _tree(texts: Sequence[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _branches(node: dict[str, Any]) -> str:
    branches = []
    for character in sorted(filter(None, node)):
        run, below = _run(character, node[character])
        branches.append(re.escape(run) + _branches(below))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def _run(text: str, node: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """All characters up to the next branch or end: tokens may be longer than the interpreter's stack is deep."""
    while len(node) == 1 and "" not in node:
        ((character, below),) = node.items()
        text, node = text + character, below
    return text, node
