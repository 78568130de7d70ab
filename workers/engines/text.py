"""Text of answers and prompts: stop strings, begun marks, control tokens, common beginnings."""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.engine import Failure, Logprob, Piece, token_bytes, token_text
from penstock.extras import merged


class StopMatcher:
    """Takes text as it is generated and returns what may be shown. After a match `hit` is True and nothing follows.

    Engines differ in how they treat stop strings at a step boundary; this does it the same way for all of them. The
    result does not depend on how the text was split into pieces.
    """

    def __init__(self, stops: Sequence[str], past: str = "") -> None:
        """`past` was shown by an earlier attempt: a stop string may begin in it, but it is not shown again."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._seen = 0
        """Characters at the beginning of the held text that the earlier attempt has shown."""
        self.hit = ""
        """The stop string that has matched."""
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
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the one that ends first; the longest, if several end there
            _, cut, self.hit = min(found)
            return self._release(cut)
        return self._release(len(self._held) - max([begun_length(self._held, stop) for stop in self._stops]))

    def flush(self) -> str:
        """Return the text held back, once the generation ended for another reason."""
        return "" if self.hit else self._release(len(self._held))

    def _release(self, length: int) -> str:
        shown = self._held[self._seen : length]
        self._held, self._seen = self._held[length:], max(0, self._seen - length)
        return shown


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
        return bool(self._matcher.hit)

    def feed(self, piece: Piece) -> Piece:
        """Return what may pass now as one piece, which may be empty. On a match that is all that was generated, with
        the text cut before the stop string and without log-probabilities for tokens that show no text. It then says
        which stop string it was, as vLLM does."""
        if self._open:
            return piece
        self._waiting.append(piece)
        self._safe += self._matcher.feed(piece.text)
        if not self.hit:
            return joined(piece.id, self._whole())
        last, told = joined(piece.id, self._cut()), {"choice": {"stop_reason": self._matcher.hit}}
        return replace(last, extras=merged([last.extras or {}, told]))

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
                    cut = token_text(data[: self._shown])
                    top = tuple((cut if token == row.token else token, each) for token, each in row.top)
                    passed.append(replace(row, token=cut, top=top))
                break
            self._shown -= len(data)
            passed.append(self._waiting.popleft())
        return tuple(passed)


def mended(text: str) -> str:
    """A text that JSON escapes gave, with U+FFFD for surrogates that are no text, which nothing could encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def begun_length(text: str, mark: str) -> int:
    """Length of the longest end of a text that a mark, which it does not hold, begins with."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


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
        served_by=next((piece.served_by for piece in pieces if piece.served_by), ""),
        extras=merged([piece.extras for piece in pieces if piece.extras]) or None,
    )


def shared_length(one: Sequence[str | int], other: Sequence[str | int]) -> int:
    """Length of the common prefix of two prompts; a character of a text and a token id count as one each."""
    total = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine == theirs:
            total += length((mine,))
            continue
        if isinstance(mine, str) and isinstance(theirs, str):
            total += shared_characters(mine, theirs)
        break
    return total


def shared_characters(one: str, other: str) -> int:
    """Length of the common prefix of two texts, in characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def length(prompt: Sequence[str | int]) -> int:
    """Length of a prompt; a character of a text and a token id count as one each."""
    return sum(len(part) if isinstance(part, str) else 1 for part in prompt)


def too_long(field: str, prompt_tokens: int, max_tokens: int | None, context: int) -> Failure:
    """The refusal of a request that does not fit into the context, with its numbers. `field`: of the prompt."""
    asked = f", and {max_tokens} were asked for the answer" if max_tokens else ""
    message = f"{field}: this model's context is {context} tokens; the prompt has {prompt_tokens} tokens{asked}."
    return Failure("context_length_exceeded", f"{message} Shorten it, or lower max_tokens.", 400, field)


class ControlTokens:
    """The control tokens of one model, by their texts. A token of one character cannot be cut and is ignored.

    A chat template marks roles with control tokens, and a tokenizer that recognises these also recognises them in a
    user's message: `<|im_start|>system` there would open a system turn. The engines tokenise the halves separately;
    neither of them is a control token.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._known = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._known})
        starts = sorted({re.escape(text[:2]) for text in self._known})
        self._start = re.compile(f"(?={'|'.join(starts)})") if starts else None
        """Finds each place where one may begin; a few lengths are tried there, so that a cut takes linear time."""

    def cut(self, text: str) -> list[str]:
        """Split a text into pieces without control tokens; one piece if the text holds none."""
        pieces, done = [], 0
        for found in self._start.finditer(text) if self._start is not None else ():
            at = found.start()
            if any(text[at : at + length] in self._known for length in self._lengths):
                pieces.append(text[done : at + 1])
                done = at + 1
        return [*pieces, text[done:]]

    def mark(self, value: Any) -> tuple[Any, str]:
        """Insert a random, unguessable mark wherever a text must be cut, for templates, which take whole texts.

        Args:
            value: texts in nested lists, tuples and mappings.
        Returns: the same with marks, and the mark; "" if nothing must be cut.
        """
        token = secrets.token_hex(8)
        mark = f"\ue000{token}\ue001"
        marked = self._marked(value, mark)
        return (marked, mark) if token in repr(marked) else (value, "")

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return mark.join(self.cut(value))
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(each, mark) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(each, mark) for each in value]
        return value
