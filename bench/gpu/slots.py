"""Slots of an engine that batches in flight: which tokens the next step computes, and what they mean. Pure.

A step computes rows, each one token of one text at one place: the newest token of every text that generates, and
behind them the next tokens of prompts, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SlotText:
    """One request. `limit`: tokens of its answer."""

    prompt: Sequence[int]
    limit: int
    slot: int = -1
    """-1: it waits, or has ended."""
    computed: int = 0
    """Tokens of its prompt in the cache."""
    made: int = 0
    """Tokens of its answer."""
    newest: int = 0
    """The last of them."""
    has_left: bool = False
    """Whether nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step: rows of the batch, and those whose outcome is a token of an answer."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    heard: list[tuple[int, SlotText]] = field(default_factory=list)

    def add(self, tokens: Sequence[int], slot: int, place: int) -> None:
        """Tokens of one slot that stand from a place on."""
        self.tokens.extend(tokens)
        self.slots.extend([slot] * len(tokens))
        self.places.extend(range(place, place + len(tokens)))


class SlotTable:
    """Texts in so many slots. `rows`: most rows of a step; `prompt_rows`: most of them that are of prompts."""

    def __init__(self, slots: int, rows: int, prompt_rows: int) -> None:
        """Raises ValueError if a step could not give every slot a token and a prompt one more."""
        if rows <= slots or prompt_rows < 1:
            raise ValueError(f"{rows} rows leave no room for prompts beside {slots} slots")
        self._rows, self._prompt_rows = rows, prompt_rows
        self._free = deque(range(slots))
        self._waiting: deque[SlotText] = deque()
        self._running: list[SlotText] = []

    def submit(self, text: SlotText) -> None:
        """Its prompt has at least one token."""
        self._waiting.append(text)

    def next_step(self) -> StepRows | None:
        """The rows of the next step; None: there is nothing to do."""
        for text in [each for each in self._running if each.has_left]:
            self._end(text)
        while self._waiting and self._free:
            text = self._waiting.popleft()
            if not text.has_left:
                text.slot = self._free.popleft()
                self._running.append(text)
        step = StepRows()
        for text in self._running:
            if text.made:
                step.heard.append((len(step.tokens), text))
                step.add([text.newest], text.slot, len(text.prompt) + text.made - 1)
        left = min(self._prompt_rows, self._rows - len(step.tokens))
        for text in self._running:
            if left and not text.made:
                part = text.prompt[text.computed : text.computed + left]
                step.add(part, text.slot, text.computed)
                text.computed += len(part)
                left -= len(part)
                if text.computed == len(text.prompt):
                    step.heard.append((len(step.tokens) - 1, text))
        return step if step.tokens else None

    def took(self, step: StepRows, outcome: Sequence[int]) -> list[tuple[SlotText, int, bool]]:
        """What the step made: texts with their next token, and whether it is the last. `outcome`: of each row."""
        found = []
        for row, text in step.heard:
            text.newest, text.made = outcome[row], text.made + 1
            is_last = text.made >= text.limit
            if is_last:
                self._end(text)
            found.append((text, text.newest, is_last))
        return found

    def _end(self, text: SlotText) -> None:
        self._running.remove(text)
        self._free.append(text.slot)
        text.slot = -1
