"""Where the tasks' work is done: one turn at one batch for each message, and the tidying up."""

from __future__ import annotations

import asyncio
import logging

from offline.turn import Bench, Turn
from streaming.batches import Batches
from streaming.errors import DecodeError, Fenced, Stale, Unavailable
from streaming.files import Files

log = logging.getLogger(__name__)

MOST = 100
"""Files or batches forgotten in one round."""


class Desk:
    """One per process. `stop` ends its turns early, in good order."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._batches, self._files = Batches(bench.tools.wire), Files(bench.tools.wire)
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
            await Turn(self._bench, hold, self.stop).run()
            turns.labels("done").inc()
        except Stale as error:
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
        """Forget what has expired, and remove what killed processes left. Raises Unavailable, OSError."""
        shelf = self._bench.shelf
        while files := await self._files.expired(MOST):
            for file in files:
                await asyncio.to_thread(shelf.remove, file.id)
                await self._files.forget(file)
        for batch_id in await self._batches.forget_expired(MOST):
            await asyncio.to_thread(shelf.end_work, batch_id)
        await asyncio.to_thread(shelf.drop_incoming)
        strays = await asyncio.to_thread(shelf.strays, "files")
        for name in set(strays) - await self._files.known(strays):
            log.info("removing a file nobody has a record of", extra={"file": name})
            await asyncio.to_thread(shelf.remove, name)
        works, old = await asyncio.to_thread(shelf.works), await asyncio.to_thread(shelf.strays, "batches")
        for name, state in (await self._batches.states(works)).items():
            if state.final if state is not None else name in old:
                await asyncio.to_thread(shelf.end_work, name)

    async def keep_tidy(self, every_s: float) -> None:
        """For ever, whatever happens."""
        while True:
            try:
                await self.tidy()
            except (Unavailable, DecodeError, OSError) as error:
                log.warning("files could not be tidied up, trying again later: %s", error)
            await asyncio.sleep(every_s)
