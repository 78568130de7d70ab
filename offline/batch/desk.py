"""Where the tasks' work is done: one turn at one batch for each message, and the tidying up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from offline.batch.turn import BatchTurn, TurnContext
from runtime.config import ConfigError
from runtime.loops import ExpectedErrors, run_periodically
from streaming.batches.files import Files
from streaming.batches.store import Batches
from streaming.errors import DecodeError, Fenced, Superseded, Unavailable
from streaming.store.identity import check_identity, disagreement, read_identity

log = logging.getLogger(__name__)

MAX_EXPIRED = 100
"""Files or batches forgotten in one round."""


class BatchRunner:
    """One per process. `stop` ends its turns early, in good order."""

    def __init__(self, bench: TurnContext, quarantine_s: float) -> None:
        self._bench, self._quarantine_s = bench, quarantine_s
        self._batches, self._files = Batches(bench.tools.wire), Files(bench.tools.wire)
        self._problem = ""
        """Why nothing is tidied up, as it was logged last."""
        self.stop = asyncio.Event()
        self.running = 0

    async def look_at_batch(self, batch_id: str, telling: int) -> None:
        """A turn, if there is something to do for whoever was told by this number. Never raises: a batch whose turn
        failed is told of again."""
        turns = self._bench.metrics.batch_turns
        self.running += 1
        try:
            hold = await self._batches.hold(batch_id, telling)
            log.info("turn %d at a batch", hold.epoch, extra={"batch": batch_id, "state": hold.state})
            await BatchTurn(self._bench, hold, self.stop).run()
            turns.labels("done").inc()
        except Superseded as error:
            log.debug("nothing to do: %s", error)
        except Fenced:
            turns.labels("taken").inc()
            log.warning("another process has the batch now", extra={"batch": batch_id})
        except Unavailable as error:
            turns.labels("failed").inc()
            log.warning("the turn ends, the store is away: %s", error, extra={"batch": batch_id})
        except Exception:
            # The boundary of one batch: a full disk, a file somebody removed, or a fault of ours must not stop others.
            turns.labels("failed").inc()
            log.exception("a turn failed; there will be another", extra={"batch": batch_id})
        finally:
            self.running -= 1

    async def tidy(self) -> None:
        """Forget what has expired, remove what killed processes left, and move what the store has no record of into
        quarantine; nothing of it if store and folder are not of the same deployment. Raises Unavailable, OSError."""
        shelf = self._bench.shelf
        if not await self._agreed():
            return
        while files := await self._files.expired(MAX_EXPIRED):
            for file_id, tenant in files:
                await asyncio.to_thread(shelf.remove, file_id)
                await self._files.forget(file_id, tenant)
        for batch_id in await self._batches.forget_expired(MAX_EXPIRED):
            await asyncio.to_thread(shelf.end_work, batch_id)
        await asyncio.to_thread(shelf.drop_incoming)
        await asyncio.to_thread(shelf.end_notes, self._bench.keep_s)
        strays = await asyncio.to_thread(shelf.strays, "files")
        await self._set_aside("files", set(strays) - await self._files.known(strays))
        works, old = await asyncio.to_thread(shelf.works), await asyncio.to_thread(shelf.strays, "batches")
        states = await self._batches.states(works)
        for name, state in states.items():
            if state is not None and state.final:
                await asyncio.to_thread(shelf.end_work, name)
        await self._set_aside("batches", {name for name, state in states.items() if state is None} & set(old))
        for day in await asyncio.to_thread(shelf.end_quarantine, self._quarantine_s):
            log.warning("removed the files that were quarantined on %s", day)

    async def _agreed(self) -> bool:
        """Whether the store and the folder of files are of the same deployment, as far as can be known now. Raises
        Unavailable, OSError."""
        identity = await read_identity(self._bench.tools.wire)
        if identity is None:  # emptied this moment; the monitor writes a new one
            return False
        wire, shelf = self._bench.tools.wire, self._bench.shelf
        try:
            check_identity(identity, wire.settings)
        except ConfigError as error:
            problem = str(error)
        else:
            owner = await asyncio.to_thread(shelf.claim, identity.deployment)
            problem = disagreement(identity.deployment, owner, shelf.folder)
        if problem and problem != self._problem:
            log.warning("%s; nothing is tidied up until then", problem)
        self._problem = problem
        return not problem

    async def _set_aside(self, part: str, names: Collection[str]) -> None:
        """Move what the store does not know into quarantine, unless the store was emptied while it was asked. Raises
        Unavailable, OSError."""
        if not names or not await self._agreed():
            return
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                place = await asyncio.to_thread(self._bench.shelf.set_aside, part, name)
                log.warning("the store has no record of a file or batch; quarantined it: %s", place)

    async def keep_tidy(self, every_s: float) -> None:
        """For ever, whatever happens."""
        errors = (Unavailable, DecodeError, OSError)
        expected = ExpectedErrors(errors, log.warning, "files could not be tidied up, trying again later: %s")
        await run_periodically(self.tidy, every_s, expected)
