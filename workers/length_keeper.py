"""Length keeper: stores the history of a model's output lengths, and reads it when a worker starts."""

from __future__ import annotations

import logging

import msgspec

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.fleet.lengths import LengthStore
from workers.gate import VERSION, LengthHistory, OutputLengths
from workers.gatekeeper import Gatekeeper

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 5.0


class LengthKeeper:
    """Keeps the history of one worker. Workers of the same model see the same kind of load, so the last one that writes
    wins, and each has begun with what was stored."""

    def __init__(self, store: LengthStore, model: str, gate: Gatekeeper) -> None:
        self._store, self._model, self._gate = store, model, gate
        self._written = 0

    async def load(self) -> None:
        """Begin with the stored history. Without one, or with one of a newer version, begin with none. Raises
        Unavailable."""
        stored = await self._store.read(self._model)
        if stored is None:
            return
        version, data = stored
        if version > VERSION:
            log.warning("output lengths of version %d are left to newer workers; this one begins without", version)
            return
        try:
            lengths = msgspec.msgpack.decode(data, type=OutputLengths)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the stored output lengths cannot be read and are replaced: %s", error)
            return
        self._gate.load(LengthHistory(lengths))

    async def keep(self) -> None:
        """Write the history while it changes; one write has at most about 50 kB."""
        expected = ExpectedErrors(Unavailable, log.warning, "output lengths are not stored until Redis answers: %s")
        await run_periodically(self._write, WRITE_INTERVAL_S, expected, wait_first=True)

    async def _write(self) -> None:
        history = self._gate.gate.history
        if history.added != self._written:
            written = history.added
            await self._store.write(self._model, VERSION, msgspec.msgpack.encode(history.message()))
            self._written = written
