"""Output filter: applies content rules to the tokens of one text before they are logged.

So whoever reads the log (a replay, another API process, the worker that takes over) sees the same text.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.content import MAX_LOOKS, MAX_MATCH_BYTES, Cleaner, Hit, Scanner, TooMuch, edited
from penstock.engine import RETURNED, Piece
from penstock.extras import Extras
from workers.engines.constraint import FILTERED
from workers.engines.text import joined

if TYPE_CHECKING:
    from penstock.patterns import Patterns

log = logging.getLogger(__name__)

LOOKS_PER_TOKEN = 2
"""Places where a match may begin that each token may bring, besides MAX_LOOKS. Tables of numbers have one for two."""
CONTINUED = frozenset({"reasoning_content", "reasoning", "refusal"})
"""Texts of a server's chunks that are continued by the next one's."""


class OutputFilter:
    """Holds back the tokens whose text may belong to a match.

    The tokens that have passed are always a prefix of those generated, and end in no match, so another attempt can
    continue after them. A token loses its id and its log-probabilities if its text or its extras are changed, or if it
    has no text (as a part of a character) and stands in a changed range or at its edge. A blocked text ends.
    """

    def __init__(self, patterns: Patterns, shown: str = "") -> None:
        """`shown`: what earlier attempts have shown. A match may begin in it, but it is not shown again."""
        self._patterns, self._scanner = patterns, Scanner(patterns, shown[-MAX_MATCH_BYTES:])
        self._edits, self._end = list[Hit](), self._scanner.known
        """Matches that change the text, and bytes of the text."""
        self._held, self._data = deque[tuple[Piece, int]](), b""
        """Pieces that have not passed, each with the end of its text; and that text."""
        self._fields, self._tails = dict[str, Scanner](), dict[str, str]()
        """Of CONTINUED, those that may go on; and how others ended, which may be the begin of a match."""
        self._looks = MAX_LOOKS
        """How many places there may still be."""
        self.rules: set[str] = set()
        """Rules that have matched."""

    def feed(self, piece: Piece, hits: list[Hit]) -> Piece:
        """Return what may pass now as one piece, which may be empty; the last one if a rule ends the text. What was
        found is added to `hits`."""
        if piece.finish == RETURNED:  # another attempt generates again what is held back
            return replace(piece, text="", ids=(), n=0, logprobs=(), extras=None)
        data = piece.text.encode("utf-8", "surrogatepass")
        self._end += len(data)
        self._data += data
        self._looks = min(MAX_LOOKS, self._looks + LOOKS_PER_TOKEN * piece.n)
        extras, found, blocked = None, list[Hit](), False
        try:
            if piece.extras or self._fields:
                extras = self._clean(piece, hits)
                blocked = any(hit.action == "block" for hit in hits)
            if not blocked:
                looks = self._scanner.looks
                found = self._scanner.feed(piece.text, last=piece.last, looks=looks + self._looks)
                self._looks -= self._scanner.looks - looks
        except TooMuch:
            what = "an answer has too many places that look like a match: it ends"
            log.warning(what, extra={"job": piece.id.partition("/")[0]})
            blocked = True
        if extras != (piece.extras or None):
            piece = replace(piece, extras=extras, ids=(), logprobs=())
        self._held.append((piece, self._end))
        hits += found
        blocked = blocked or self._scanner.blocked
        self._edits += [hit for hit in found if hit.action != "tag"]
        if blocked:  # what comes behind may be the begin of another match
            self._edits.append(Hit(self._scanner.decided, self._end, "", "block"))
        passed = [self._next() for _ in range(len(self._held) if blocked else self._passable())]
        self._edits = [hit for hit in self._edits if hit.end >= self._end - len(self._data)]
        shown = joined(piece.id, passed)
        return replace(shown, finish=FILTERED, failure=None) if blocked else shown

    def _clean(self, piece: Piece, hits: list[Hit]) -> Extras | None:
        """What may be shown now of a piece's extras, and of those held back. Raises TooMuch."""
        cleaner = Cleaner(self._patterns, self._looks)
        extras: Extras = {"delta": {}} | (piece.extras or {})
        said = {name: each for name, each in extras["delta"].items() if name in CONTINUED and isinstance(each, str)}
        clean = {
            place: {
                name if place == "calls" else cleaner.text(name): cleaner.value(value)
                for name, value in fields.items()
                if place != "delta" or name not in said
            }
            for place, fields in extras.items()
        }
        for name in {**self._fields, **said}:
            scanner = self._fields.pop(name, None) or Scanner(self._patterns, self._tails.pop(name, ""))
            shown = cleaner.part(scanner, said.get(name, ""))
            if piece.last or (piece.text and name not in said):  # it has ended, or text has begun behind it
                self._tails[name] = scanner.waiting.decode("utf-8", "surrogatepass")
                shown += cleaner.part(scanner, "", last=True)
            else:
                self._fields[name] = scanner
            if shown:
                clean["delta"][name] = shown
        self._looks = cleaner.looks
        hits += cleaner.hits
        return {place: fields for place, fields in clean.items() if fields} or None

    def _passable(self) -> int:
        """How many pieces may pass: all of their text is decided, and the last one does not end in a match. A token of
        no text waits for the one that completes its character."""
        count, decided = 0, self._scanner.decided
        is_over = self._held[-1][0].last
        for number, (piece, end) in enumerate(self._held, 1):
            if end > decided or (end == decided and piece.ids and not piece.text and not is_over):
                break
            if not any(hit.start < end < hit.end for hit in self._edits):
                count = number
        return count

    def _next(self) -> Piece:
        """Take the next piece, as it may be shown."""
        piece, end = self._held.popleft()
        begin = self._end - len(self._data)
        data, self._data = self._data[: end - begin], self._data[end - begin :]
        low, high = (begin, end) if data else (begin - 1, end + 1)
        if not any(hit.start < high and hit.end > low for hit in self._edits):
            return piece
        return replace(piece, text=edited(data, begin, self._edits), ids=(), logprobs=())
