"""Escapes control tokens in user text: cuts each in two, so that the tokenizer reads both halves as plain text.

A chat template marks roles with control tokens, and a tokenizer that recognises these also recognises them in a user's
message: `<|im_start|>system` there would open a system turn. The engines tokenise the halves separately; neither of
them is a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.engine import ChatTurn


class ControlTokens:
    """The control tokens of one model, by their texts. A token of one character cannot be cut and is ignored."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if len(text) > 1})
        self._starts = sorted({text[:2] for text in known})
        self._pattern = re.compile(_either(known)) if known else None

    def cut(self, text: str) -> list[str]:
        """Split a text into pieces without control tokens; one piece if the text holds none."""
        if self._pattern is None or not any(start in text for start in self._starts):
            return [text]
        pieces, done = [], 0
        while (found := self._pattern.search(text, done)) is not None:
            middle = found.start() + 1
            pieces.append(text[done:middle])
            done = middle
        return [*pieces, text[done:]]

    def mark(self, turns: Sequence[ChatTurn]) -> tuple[Sequence[ChatTurn], str]:
        """Insert a random, unguessable mark wherever a turn's text must be cut, for templates, which take whole texts.

        Returns: the turns and the mark; "" if nothing must be cut.
        """
        cuts = [self.cut(turn.content) for turn in turns]
        if all(len(pieces) == 1 for pieces in cuts):
            return turns, ""
        mark = _new_mark()
        return [replace(turn, content=mark.join(pieces)) for turn, pieces in zip(turns, cuts, strict=True)], mark

    def mark_values(self, value: Any) -> tuple[Any, str]:
        """Like `mark`, for every text in nested lists, tuples and mappings."""
        if not any(len(self.cut(text)) > 1 for text in _texts(value)):
            return value, ""
        mark = _new_mark()
        return self._marked(value, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return mark.join(self.cut(value))
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(each, mark) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(each, mark) for each in value]
        return value


def _new_mark() -> str:
    return f"\ue000{secrets.token_hex(8)}\ue001"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _either(texts: Sequence[str]) -> str:
    """A regular expression for the longest of these texts. It is a prefix tree, so matching takes linear time: no
    position tries several alternatives."""
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
    """Collect characters up to the next branch or end; a recursion per character could overflow the stack."""
    while len(node) == 1 and "" not in node:
        ((character, below),) = node.items()
        text, node = text + character, below
    return text, node
