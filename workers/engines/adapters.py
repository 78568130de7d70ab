"""Which adapters an engine has loaded, where it keeps some of those that it serves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class LoadedAdapters:
    """At most so many adapters; of those that no text needs, the one that was used longest ago makes room."""

    def __init__(self, most: int) -> None:
        self._most, self._names = most, OrderedDict[str, None]()
        self.names: tuple[str, ...] = ()
        self.swaps = 0
        """How often one was loaded."""

    def has_place(self, name: str, needed: Collection[str]) -> bool:
        """Whether it is loaded or can be, while running texts need others."""
        return name in self._names or len(self._names) < self._most or self._unneeded(needed) is not None

    def use(self, name: str, needed: Collection[str] = ()) -> bool:
        """Begin a text with an adapter that has a place. Returns whether it had to be loaded."""
        is_new = name not in self._names
        if is_new:
            self.swaps += 1
            if len(self._names) == self._most and (gone := self._unneeded(needed)) is not None:
                del self._names[gone]
        self._names[name] = None
        self._names.move_to_end(name)
        self.names = tuple(self._names)
        return is_new

    def _unneeded(self, needed: Collection[str]) -> str | None:
        return next((each for each in self._names if each not in needed), None)
