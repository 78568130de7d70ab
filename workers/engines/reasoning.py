"""Reasoning marker: marks the part of an answer that a model puts between tags such as <think>. Pure.

Models write `<think>...</think>` at the begin of an answer; some chat templates write the first tag themselves. The
marks are those of penstock/tools.py, and each stands for exactly one tag, so that a text can be turned back
(`as_written`). The result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.engine import Piece
from penstock.tools import REASONING, TEXT, without_marks
from workers.engines.text import begun_length, joined

BEGIN, END = "<think>", "</think>"
EFFORT_NAMES = ("enable_thinking", "reasoning_effort")
"""Variables by which chat templates are told how much to reason."""


class ReasoningMarker:
    """Passes whole tokens: those that may be the begin of a tag are held back until that is known, so that another
    attempt can continue after those that have passed."""

    def __init__(self, past: str = "", *, opened: bool = False) -> None:
        """
        Args:
            past: what earlier attempts wrote, with marks.
            opened: the prompt ends with the first tag, so that the answer begins inside.
        """
        self.inside = REASONING in past and TEXT not in past.partition(REASONING)[2]
        """What comes next is reasoning."""
        self._settled = not self.inside and (REASONING in past or bool(past.strip()))
        """The answer is text from here on. Python takes the marks for white space."""
        self._just_ended = past.endswith(TEXT)
        """Further end tags right here belong to no text: an engine that limits reasoning may write several."""
        self._opens = opened and not past
        self._held = ""
        self._kept: list[Piece] = []

    def feed(self, piece: Piece) -> Piece:
        """What may pass now, as one piece, which may be empty."""
        if self._settled and not self._kept and not self._just_ended:
            text = without_marks(piece.text)
            return piece if text == piece.text else replace(piece, text=text)
        self._held += without_marks(piece.text)
        shown = self._marked()
        if self._held:
            self._kept.append(replace(piece, text=shown))
            return Piece(piece.id)
        return self._passed(replace(piece, text=shown))

    def flush(self, request_id: str) -> Piece:
        """What was held back, once the generation has ended."""
        rest, self._held = self._held, ""
        return self._passed(Piece(request_id, rest)) if rest or self._kept else Piece(request_id)

    def _passed(self, piece: Piece) -> Piece:
        kept, self._kept = self._kept, []
        return joined(piece.id, [*kept, piece]) if kept else piece

    def _marked(self) -> str:
        """The held text as far as it is certain, with marks for tags."""
        out = ""
        if self._opens:
            self._opens, self.inside, out = False, True, REASONING
        if not self.inside and not self._settled:
            out += self._begun()
        if self.inside:
            before, found, after = self._held.partition(END)
            if found:
                self.inside, self._settled, self._just_ended = False, True, True
                out, self._held = out + before + TEXT, after
            else:
                keep = begun_length(self._held, END)
                out, self._held = out + self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        while self._just_ended and self._held.startswith(END):
            self._held = self._held[len(END) :]
        self._just_ended = self._just_ended and END.startswith(self._held)
        if self._settled and not self._just_ended:
            out, self._held = out + self._held, ""
        return out

    def _begun(self) -> str:
        """The begin of an answer: white space, perhaps a tag."""
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            space = self._held[: len(self._held) - len(start)]
            self.inside, self._held = True, start[len(BEGIN) :]
            return space + REASONING
        self._settled = not BEGIN.startswith(start)
        return ""


def as_written(text: str, *, opened: bool = False) -> str:
    """A text with marks as the model wrote it. `opened`: the prompt holds the first tag already."""
    return text.replace(REASONING, "" if opened else BEGIN, 1).replace(TEXT, END, 1)


class ReasoningWriter:
    """Marks the reasoning of a server that streams it apart from the text."""

    def __init__(self) -> None:
        self._inside = False

    def write(self, reasoning: str, said: str) -> str:
        """The text of a chunk; `said` may hold calls."""
        out = ""
        if reasoning:
            out = ("" if self._inside else REASONING) + without_marks(reasoning)
            self._inside = True
        if said:
            out += (TEXT if self._inside else "") + said
            self._inside = False
        return out
