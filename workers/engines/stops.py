"""Stop-string matcher for streamed text: cuts the text before a match and holds back what may become one.

Engines differ in how they treat stop strings at a step boundary; this does it the same way for all of them. The result
does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from penstock.engine import Logprob, Piece, token_bytes, token_text
from penstock.extras import merged


class StopMatcher:
    """Takes text as it is generated and returns what may be shown. After a match `hit` is True and nothing follows."""

    def __init__(self, stops: Sequence[str], past: str = "") -> None:
        """`past` was shown by an earlier attempt: a stop string may begin in it, but it is not shown again."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._seen = 0
        """Characters at the beginning of the held text that the earlier attempt has shown."""
        self.hit = False
        if past:
            self.feed(past)
            self._seen = len(self._held)

    def feed(self, text: str) -> str:
        """Return the text that is now safe to show; empty while a stop string may still be forming."""
        if not self._stops:
            return text
        if self.hit:
            return ""
        self._held += text
        cut = self._first_match()
        if cut is not None:
            self.hit = True
            return self._release(cut)
        return self._release(len(self._held) - self._longest_partial())

    def flush(self) -> str:
        """Return the text held back, once the generation ended for another reason."""
        return "" if self.hit else self._release(len(self._held))

    def _release(self, length: int) -> str:
        shown = self._held[self._seen : length]
        self._held, self._seen = self._held[length:], max(0, self._seen - length)
        return shown

    def _first_match(self) -> int | None:
        """Where the stop string begins that ends first (the longest, if several end there), or None."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _longest_partial(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TokenGate:
    """A StopMatcher for whole tokens: a token passes once all of its text is safe to show.

    The tokens that have passed are always a prefix of those generated, so another attempt can continue after them.
    """

    def __init__(self, stops: Sequence[str], past: str = "") -> None:
        self._matcher = StopMatcher(stops, past)
        self._open = not any(stops)
        self._waiting: deque[Piece] = deque()
        self._safe = ""

    @property
    def hit(self) -> bool:
        return self._matcher.hit

    def feed(self, piece: Piece) -> Piece:
        """Return what may pass now as one piece, which may be empty. On a match that is all that was generated, with
        the text cut before the stop string and without log-probabilities for tokens that show no text."""
        if self._open:
            return piece
        self._waiting.append(piece)
        self._safe += self._matcher.feed(piece.text)
        return joined(piece.id, self._cut() if self.hit else self._whole())

    def flush(self, request_id: str) -> Piece:
        """Return what was held back, once the generation ended for another reason."""
        self._safe += self._matcher.flush()
        return joined(request_id, self._whole())

    def _whole(self) -> list[Piece]:
        passed = []
        while self._waiting and len(self._waiting[0].text) <= len(self._safe):
            piece = self._waiting.popleft()
            self._safe = self._safe[len(piece.text) :]
            passed.append(piece)
        return passed

    def _cut(self) -> list[Piece]:
        passed = []
        while self._waiting:
            piece = self._waiting.popleft()
            text, self._safe = self._safe[: len(piece.text)], self._safe[len(piece.text) :]
            passed.append(replace(piece, text=text, logprobs=RowGate().feed(text, piece.logprobs, last=True)))
        return passed


class RowGate:
    """Holds back the log-probabilities of tokens whose text is not shown yet, so that both have the same bytes."""

    def __init__(self) -> None:
        self._waiting: deque[Logprob] = deque()
        self._shown = 0
        """Bytes of the shown text whose rows have not passed."""

    def feed(self, text: str, rows: Iterable[Logprob], *, last: bool = False) -> tuple[Logprob, ...]:
        """Return the rows that pass with `text`. `last`: no text follows; the row of a token that it cuts is cut."""
        self._waiting += rows
        self._shown += len(text.encode())
        passed = list[Logprob]()
        while self._waiting:
            row = self._waiting[0]
            data = token_bytes(row.token)
            if len(data) > self._shown:
                if last and self._shown > 0:
                    passed.append(replace(row, token=token_text(data[: self._shown])))
                break
            self._shown -= len(data)
            passed.append(self._waiting.popleft())
        return tuple(passed)


def joined(request_id: str, pieces: Iterable[Piece]) -> Piece:
    """Merge consecutive pieces of one request into one."""
    pieces = tuple(pieces)
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1] if pieces else Piece(request_id)
    counted = next((piece for piece in pieces if piece.prompt_tokens), last)
    return replace(
        last,
        prompt_tokens=counted.prompt_tokens,
        cached_tokens=counted.cached_tokens,
        text="".join(piece.text for piece in pieces),
        ids=tuple(number for piece in pieces for number in piece.ids),
        n=sum(piece.n for piece in pieces),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        extras=merged([piece.extras for piece in pieces if piece.extras]),
    )
