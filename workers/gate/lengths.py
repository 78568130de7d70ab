"""Output lengths: a history of how long answers became, and random draws of how long a text will become. Pure.

After LightLLM's Past-Future scheduler (branch `future_past_router`). A history begins with as many answers of unknown
length as make it half full, each of which counts as long as its request allows. So at first every text is expected to
use its whole limit, as under the policy GUARANTEED_NO_EVICT. Each answer that ends replaces one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from random import Random
from typing import Annotated, TypeAlias

import msgspec

WINDOW = 200
"""Newest lengths that are kept of a lane, and of a tenant in it."""
UNKNOWN = 1 << 40
"""Stands for the length of an answer that has not been seen: longer than any limit."""
MIN_TENANT_LENGTHS = 50
"""A tenant with so many answers in a lane is predicted from its own."""
MAX_TENANTS = 64
"""Tenants with a history of their own, over all lanes; the one that has been silent for longest makes room."""
VERSION = 1
"""Of the message OutputLengths."""

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Lengths: TypeAlias = Annotated[tuple[Length, ...], msgspec.Meta(max_length=WINDOW)]


class TenantLengths(msgspec.Struct, frozen=True, array_like=True):
    """Output lengths of one tenant in one lane, oldest first."""

    lane: str
    tenant: str
    lengths: Lengths


class OutputLengths(msgspec.Struct, frozen=True, kw_only=True):
    """The history of one model as it is stored; a process of another version writes another `v`."""

    v: int = VERSION
    lanes: dict[str, Lengths] = {}
    """By lane, oldest first."""
    tenants: Annotated[tuple[TenantLengths, ...], msgspec.Meta(max_length=MAX_TENANTS)] = ()
    """The one that has been silent for longest first."""


class LengthWindow:
    """The newest output lengths of one lane or tenant, in tokens."""

    __slots__ = ("_by_age", "_known", "_sorted")

    def __init__(self, lengths: Iterable[int] = (), unknown: int = 0) -> None:
        """
        Args:
            lengths: oldest first.
            unknown: answers of unknown length that count at first; each known length replaces one.
        """
        known = tuple(lengths)[-WINDOW:]
        self._by_age = deque([UNKNOWN] * (unknown - len(known)))
        self._by_age.extend(known)
        self._sorted = sorted(self._by_age)
        self._known = len(known)

    def __len__(self) -> int:
        """Number of known lengths."""
        return self._known

    @property
    def known(self) -> tuple[int, ...]:
        """The known lengths, oldest first."""
        return tuple(length for length in self._by_age if length != UNKNOWN)

    def add(self, length: int) -> None:
        """Note the length of an answer that has ended."""
        if self._by_age and (self._by_age[0] == UNKNOWN or len(self._by_age) == WINDOW):
            gone = self._by_age.popleft()
            del self._sorted[bisect_left(self._sorted, gone)]
            self._known -= gone != UNKNOWN
        self._by_age.append(length)
        insort(self._sorted, length)
        self._known += 1

    def mean(self, limit: int) -> int:
        """The mean length of answers that may have `limit` tokens."""
        cut = bisect_right(self._sorted, limit)
        total = sum(self._sorted[:cut]) + limit * (len(self._sorted) - cut)
        return -(-total // len(self._sorted)) if self._sorted else limit

    def draws(self, generated: int, limit: int, count: int, random: Random) -> list[int]:
        """Draw `count` final lengths of a text that has `generated` tokens and may have `limit`.

        Of a text without tokens: lengths of the history. Else points between two neighbours of the lengths above
        `generated`, with `generated` itself as the lowest and `limit` as the highest.
        """
        lengths, number, finals = self._sorted, random.random, []
        size = len(lengths)
        if not generated and size:
            return [min(limit, lengths[int(number() * size)]) for _ in range(count)]
        start = bisect_right(lengths, generated) - 1
        places = size - start
        for _ in range(count):
            place = number() * places
            below = int(place)
            at = start + below
            low = lengths[at] if below else generated
            high = lengths[at + 1] if at + 1 < size else limit
            if high >= limit:
                high, low = limit, min(low, limit)
            final = int(low + (high - low) * (place - below))
            finals.append(final if final > generated else generated + 1)
        return finals


class LengthHistory:
    """Output lengths of one model, by lane, and by tenant where enough are known."""

    def __init__(self, stored: OutputLengths | None = None) -> None:
        stored = stored or OutputLengths()
        self._lanes = {lane: LengthWindow(lengths, WINDOW // 2) for lane, lengths in stored.lanes.items()}
        self._tenants: OrderedDict[tuple[str, str], LengthWindow] = OrderedDict(
            ((each.lane, each.tenant), LengthWindow(each.lengths)) for each in stored.tenants
        )
        self.added = 0
        """Answers that were noted since this object was made."""

    def add(self, lane: str, tenant: str, length: int) -> None:
        """Note an answer that has ended by itself or at its limit."""
        self.added += 1
        self._lane(lane).add(length)
        mine = self._tenants.setdefault((lane, tenant), LengthWindow())
        mine.add(length)
        self._tenants.move_to_end((lane, tenant))
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def window(self, lane: str, tenant: str = "") -> LengthWindow:
        """What a tenant's texts in a lane are drawn from; without a tenant, the lane's."""
        mine: LengthWindow | None = self._tenants.get((lane, tenant))
        return mine if mine is not None and len(mine) >= MIN_TENANT_LENGTHS else self._lane(lane)

    def message(self) -> OutputLengths:
        """What is stored of it."""
        tenants = (TenantLengths(lane, tenant, each.known) for (lane, tenant), each in self._tenants.items())
        return OutputLengths(lanes={lane: each.known for lane, each in self._lanes.items()}, tenants=tuple(tenants))

    def _lane(self, lane: str) -> LengthWindow:
        if lane not in self._lanes:
            self._lanes[lane] = LengthWindow(unknown=WINDOW // 2)
        return self._lanes[lane]
