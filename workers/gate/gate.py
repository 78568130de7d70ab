"""The gate: admits a text to an engine only if the KV cache will hold it and all others until they have ended. Pure.

After LightLLM's Past-Future scheduler: the final length of every text is drawn from the history of output lengths, in a
few worlds, and the future peak of the highest world must fit. A decision draws some of the texts again, in turn, and
those that have outgrown their draws; many texts at once would cost more than the rest of the decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

from workers.gate.decision import ADMITTED, GateDecision
from workers.gate.lengths import LengthHistory, LengthWindow
from workers.gate.peak import MAX_WORLDS, Holding, future_peak, headroom, worlds
from workers.gate.reserve import Reserve

UNLIMITED = 1 << 31
"""Tokens of a request that no capacity limits."""
REDRAWN = 48
"""Texts that a decision draws again."""


class HeldText:
    """One text in the engine, or about to be. All numbers are tokens."""

    __slots__ = ("finals", "generated", "is_alone", "limit", "lowest", "prompt", "window")

    def __init__(self, prompt: int, limit: int, window: LengthWindow, random: Random, generated: int = 0) -> None:
        self.prompt = prompt
        self.limit = limit
        """The most that it may generate, with what earlier attempts generated."""
        self.window = window
        """What its final length is drawn from."""
        self.generated = generated
        """Also by earlier attempts."""
        self.is_alone = False
        """Whether the engine computes its prompt beside no other."""
        self.draw(MAX_WORLDS, random)

    def draw(self, count: int, random: Random) -> None:
        """Draw its final length in so many worlds."""
        self.finals = self.window.draws(self.generated, self.limit, count, random)
        self.lowest = min(self.finals)


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What an engine can hold."""

    slots: int
    tokens: int = 0
    """Of its KV cache; 0: only the slots limit it."""
    taken: int = 0
    """Tokens that no text may use: pinned prefixes, reserved memory."""
    reserve: float = 0.0
    """Share of the tokens that is left free."""
    evicts: bool = True
    """Whether the engine takes texts that may not fit, and evicts some when they do not. If not, it keeps each text's
    whole limit free before it begins, and so does the gate."""

    @property
    def room(self) -> int:
        """Tokens that the texts may use."""
        return int(self.tokens * (1 - self.reserve)) - self.taken


def admit(text: HeldText, held: Sequence[HeldText], capacity: KvCapacity) -> GateDecision:
    """Decide whether the engine takes one more text now. An engine that holds nothing takes any text: nothing that it
    could wait for would make room."""
    if len(held) >= capacity.slots:
        return GateDecision(False, "slots")
    if not capacity.tokens:
        return ADMITTED
    highest = peak([*held, text], capacity)
    if held and highest > capacity.room:
        return GateDecision(False, "kv", highest)
    return GateDecision(True, "", highest)


def never_fits(text: HeldText, capacity: KvCapacity) -> bool:
    """Whether the engine cannot run the text even alone: its cache does not hold what the text holds now, or, if the
    engine never evicts, what it may hold at most."""
    tokens = text.prompt + (text.generated if capacity.evicts else text.limit)
    return 0 < capacity.tokens < tokens + capacity.taken


def largest(held: Sequence[HeldText], output: int, capacity: KvCapacity) -> int:
    """Prompt and output of the largest text that the engine takes now, if its output has `output` tokens; 0: none."""
    if len(held) >= capacity.slots:
        return 0
    if not capacity.tokens:
        return UNLIMITED
    if not held:
        return capacity.tokens
    if capacity.evicts:
        count = worlds(len(held) + 1)
        prompt = min(headroom(_future(held, world), output, capacity.room) for world in range(count))
    else:
        prompt = capacity.room - _promised(held) - output
    return prompt + output if prompt > 0 else 0


def peak(held: Sequence[HeldText], capacity: KvCapacity) -> int:
    """Tokens that the texts will hold at most; of an engine that never evicts, what it keeps free for them."""
    if not capacity.evicts:
        return _promised(held)
    return max(future_peak(_future(held, world)) for world in range(worlds(len(held))))


def _future(held: Sequence[HeldText], world: int) -> list[Holding]:
    """What each text will still generate in a world, and what it holds now."""
    return [(each.finals[world] - (now := each.generated), each.prompt + now) for each in held]


def _promised(held: Sequence[HeldText]) -> int:
    """Tokens that the texts hold if all of them use their limit, and none ends before the others have."""
    return sum([each.prompt + each.limit for each in held])


class Gate:
    """The gate of one engine: the texts that it holds, the history of its model, and the reserve."""

    def __init__(self, history: LengthHistory, random: Random) -> None:
        self.history, self._random = history, random
        self.reserve = Reserve()
        self.held: dict[str, HeldText] = {}
        """By the engine's request id."""
        self._turn = 0

    def text(self, lane: str, tenant: str, prompt: int, limit: int, generated: int = 0) -> HeldText:
        """A text with its draws, for `admit`; `limit` counts what earlier attempts `generated`."""
        return HeldText(prompt, limit, self.history.window(lane, tenant), self._random, generated)

    def admit(self, text: HeldText, capacity: KvCapacity) -> GateDecision:
        """Decide whether the engine takes the text now. One that never fits is admitted at once, for the engine refuses
        it: if it waited, others would wait behind it for nothing."""
        if never_fits(text, capacity):
            return ADMITTED
        text.draw(MAX_WORLDS, self._random)
        return admit(text, self._redrawn(), capacity)

    def would_admit(self, texts: Iterable[HeldText], without: Collection[str], capacity: KvCapacity) -> bool:
        """Whether the engine would take all these texts, one after the other, if it no longer ran the requests
        `without`."""
        self._redrawn()
        held = [text for request_id, text in self.held.items() if request_id not in without]
        for text in texts:
            text.draw(MAX_WORLDS, self._random)
            if not admit(text, held, capacity).admitted:
                return False
            held.append(text)
        return True

    def largest(self, lane: str, limit: int, capacity: KvCapacity) -> int:
        """The largest request of a lane that the engine takes now, as prompt and expected output together; 0: none.

        Args:
            limit: most tokens of an answer of this lane.
        """
        return largest(self._redrawn(), self.history.window(lane).mean(limit), capacity)

    def fitting(self, text: HeldText, capacity: KvCapacity, at_most: int) -> int:
        """How many texts like this one the engine takes now, together; at most `at_most`."""
        held = self._redrawn()
        for number in range(at_most):
            if not admit(text, held, capacity).admitted:
                return number
            held.append(text)
        return at_most

    def peak(self, capacity: KvCapacity) -> int:
        """Tokens that the texts are predicted to hold at most."""
        return peak(self._redrawn(), capacity) if self.held else 0

    def _redrawn(self) -> list[HeldText]:
        """The texts that it holds, with draws above what they have generated, in as many worlds as one more needs."""
        held = list(self.held.values())
        count, start = worlds(len(held)), self._turn % max(1, len(held))
        self._turn = start + REDRAWN
        for text in islice(chain(held[start:], held[:start]), REDRAWN):
            text.draw(count, self._random)
        for text in held:
            if text.lowest <= text.generated < text.limit or len(text.finals) < count:
                text.draw(count, self._random)
        return held
