"""Stream wrapper: writes a text that comes in pieces to a terminal, and ends its lines between words.

A word is held back until its end is there. Colours and control characters are the business of the caller.
"""

from __future__ import annotations

from collections.abc import Callable

from cli.tables import cells


class StreamWrapper:
    """Wraps one text. `write` gets what may be shown now; `width` tells the terminal's columns, which may change."""

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._word, self._gap = "", ""
        self._column = 0
        self._after_wide = False

    def feed(self, text: str) -> None:
        """Take a piece, and write what is complete."""
        for char in text:
            if char == "\n":
                self.flush()
                self._put("\n")
                self._column = 0
            elif char.isspace():
                self._end_word()
                self._gap += char
            else:
                self._word += char
                # A wide character may stand at the end of a line, and a word without room is broken by the terminal.
                if cells(char) > 1 or cells(self._word) >= self._width():
                    self._end_word()

    def flush(self) -> None:
        """Write what was held back."""
        self._end_word()
        self._put(self._gap)
        self._gap = ""

    def begin_line(self) -> None:
        """Note that something else was written, and that the text goes on in a new line."""
        self.flush()
        self._column = 0

    def _end_word(self) -> None:
        if not self._word:
            return
        width, gap, word = self._width(), self._gap, self._word
        # Else it is the rest of a word that has no room in any line. Beside a wide character a line may end.
        may_break = gap or cells(word[0]) > 1 or self._after_wide
        self._after_wide = cells(word[-1]) > 1
        if may_break and self._column and self._column + cells(gap.expandtabs() + word) > width:
            gap = ""
            self._put("\n")
            self._column = 0
        self._put(gap + word)
        self._column = (self._column + cells(gap.expandtabs() + word) - 1) % width + 1
        self._gap = self._word = ""

    def _put(self, text: str) -> None:
        if text:
            self._write(text)
