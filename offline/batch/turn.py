"""One turn at one batch: read its input, compute its lines, put its files together, end it; as far as the turn goes.

Whoever has the batch says so about once a second and hears what its owner wants meanwhile. A turn may be cut off at
any point: what counts is on disk and in the store, and the next turn goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from api.openai.batch_outputs import blocks, output_lines
from offline.batch.ending import Ending, note_ending, noted_ending
from offline.batch.lines import BatchTools, Lines
from offline.batch.survey import Survey, SurveyInterrupted, Terms, survey
from runtime.loops import ExpectedErrors, run_periodically, wait
from streaming.batches.batch import BatchState, LineFault
from streaming.batches.file_store import FileStore, Incoming
from streaming.batches.files import Files, StoredFile
from streaming.batches.ledger import PLAN, InputPlan, Ledger, LineOutcome, Segment
from streaming.batches.store import Batches, BatchLease, SaveResult
from streaming.errors import Fenced, Unavailable
from streaming.fleet.processes import Fleet
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.2
"""How often the queue is asked which lines have ended."""
SAY_S = 1.0
STOPPING_S = 30.0
"""How long running lines of a cancelled batch may take to stop."""
ASLEEP_MS = 24 * 3600 * 1000
"""A paused batch without a deadline is looked at again after so long."""
OUTPUT = "batch_output"
WORK_LOST = LineFault(
    0,
    "work_lost",
    "The batch's work is not on disk any more: the store was restored to an earlier moment, or the folder of files "
    "lost it. Create the batch again. Answers that were finished may lie in the quarantine.",
)

Why: TypeAlias = Literal["", "expired", "cancelled"]


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What a turn works with."""

    tools: BatchTools
    shelf: FileStore
    metrics: Metrics
    keep_s: int
    """How long files and the record are kept."""
    turn_s: float
    say_s: float = SAY_S


class BatchTurn:
    """`stop` ends it early, in good order."""

    def __init__(self, bench: TurnContext, hold: BatchLease, stop: asyncio.Event) -> None:
        self._bench, self._hold, self._stop = bench, hold, stop
        self._batches, self._files = Batches(bench.tools.wire), Files(bench.tools.wire)
        self._folder = bench.shelf.work(hold.batch.id)
        self._state, self._progress = hold.state, hold.progress
        self._verdict = SaveResult(hold.now_ms, hold.state, hold.paused)
        self._tokens: int | None = None
        self._saying = asyncio.Lock()
        self._ended = False
        """The last word is said, or being said."""
        self._lost = False
        """The batch was taken from us: threads are to stop too."""
        self._lines: Lines | None = None

    async def run(self) -> None:
        """Raises Fenced when the batch was taken over, Unavailable, OSError."""
        saying = asyncio.create_task(self._keep_saying())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({saying, working}, return_when=asyncio.FIRST_COMPLETED)
            self._lost = not working.done()
            if not working.done():
                working.cancel()
        finally:
            self._lost = True
            for task in (saying, working):
                task.cancel()
            ends = await asyncio.gather(working, saying, return_exceptions=True)
            if self._lines is not None:
                await asyncio.to_thread(self._lines.close)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    # --- saying how far it is ----------------------------------------------------------------------------------------

    async def _keep_saying(self) -> None:
        """While the store is away nothing is said; if that lasts, another turn will have the batch."""
        write = partial(log.warning, extra={"batch": self._hold.batch.id})
        expected = ExpectedErrors(Unavailable, write, "how far a batch is could not be said: %s")
        await run_periodically(self._say, self._bench.say_s, expected, wait_first=True)

    async def _say(self, rest_ms: int | None = None) -> None:
        """`rest_ms` ends the turn. Raises Fenced, Unavailable."""
        async with self._saying:
            if self._ended:
                return
            if self._lines is not None and self._lines.opened:
                self._progress, self._tokens = self._lines.progress(), self._lines.tokens_left
            self._verdict = await self._batches.save(
                self._hold, self._state, self._progress, tokens=self._tokens, rest_ms=rest_ms
            )
            if self._lines is not None:
                self._lines.now_ms = self._verdict.now_ms

    async def _enter(self, state: BatchState, **changes: Any) -> None:
        """A new state; the owner may have wished for another meanwhile."""
        self._state = state
        self._progress = msgspec.structs.replace(self._progress, **changes)
        if self._lines is not None:
            self._lines.base = self._progress
        await self._say()

    async def _end(self, state: BatchState, files: Sequence[StoredFile] = (), **changes: Any) -> None:
        """The last word about this batch. Raises Fenced, Unavailable."""
        async with self._saying:
            changes = {"in_queue": 0, "per_second": 0.0, "ended_ms": self._verdict.now_ms, **changes}
            progress = msgspec.structs.replace(self._progress, **changes)
            self._ended = True
            ending = Ending(state, progress, tuple(files))
            await asyncio.to_thread(note_ending, self._bench.shelf, self._hold.batch.id, self._hold.epoch, ending)
            await self._batches.save(self._hold, state, progress, keep_s=self._bench.keep_s, files=files)
        self._bench.metrics.batches.labels(state.value).inc()
        log.info("batch ended as %s", state, extra={"batch": self._hold.batch.id, "lines": progress.total})
        await asyncio.to_thread(self._bench.shelf.end_work, self._hold.batch.id)

    def _go_on(self) -> bool:
        return not self._lost and not self._stop.is_set()

    # --- the work ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        if not await asyncio.to_thread((self._folder / PLAN).exists) and await self._end_again():
            return
        if self._hold.state is BatchState.VALIDATING and not await self._read_input():
            return
        if not await asyncio.to_thread((self._folder / PLAN).exists):
            await self._end_without_work()
            return
        why = await self._compute()
        if why is not None:
            await self._put_together(why)

    async def _end_again(self) -> bool:
        """End the batch as it ended before the store was restored to an earlier moment; whether it had ended."""
        ending = await asyncio.to_thread(noted_ending, self._bench.shelf, self._hold.batch.id)
        if ending is None:
            return False
        log.warning("the store had forgotten how a batch ended", extra={"batch": self._hold.batch.id})
        self._progress, now_ms = ending.progress, self._verdict.now_ms
        keep_ms = self._hold.batch.output_keep_ms
        files = [msgspec.structs.replace(file, created_ms=now_ms, expires_ms=now_ms + keep_ms) for file in ending.files]
        await self._end(ending.state, files, ended_ms=ending.progress.ended_ms)
        return True

    async def _end_without_work(self) -> None:
        """The input was never read, or the work that was done is gone."""
        lost = (WORK_LOST,) if self._progress.began_ms else ()
        if self._verdict.state is BatchState.CANCELLING:
            await self._end(BatchState.CANCELLED, faults=lost)
        else:
            await self._fail([WORK_LOST])

    async def _read_input(self) -> bool:
        """Whether there is something to compute."""
        tools, batch = self._bench.tools, self._hold.batch
        segment = Segment(self._folder, self._hold.epoch)
        terms = Terms(
            batch.endpoint,
            frozenset(tools.models),
            tools.settings.max_lines,
            max_choices=tools.max_choices,
            cards=await Fleet(tools.wire).cards(),
        )
        try:
            source = await asyncio.to_thread(self._bench.shelf.input_of, batch.id, batch.input_file)
            found = await asyncio.to_thread(survey, source, terms, segment, self._go_on)
            if not found.faults:
                await asyncio.to_thread(segment.commit)
                await asyncio.to_thread(found.plan.save, self._folder)
        except SurveyInterrupted:
            await self._say(rest_ms=0)
            return False
        except FileNotFoundError:
            await self._fail([LineFault(0, "file_not_found", "The input file is gone.", "input_file_id")])
            return False
        finally:
            segment.close()
        faults = found.faults or await self._over_quota(found)
        if faults:
            await self._fail(faults)
            return False
        await self._enter(
            BatchState.IN_PROGRESS,
            total=len(found.plan),
            failed=found.refused,
            computed=len(found.plan.order),
            model=next(iter(found.models)) if len(found.models) == 1 else "",
            tokens=found.tokens,
            began_ms=self._verdict.now_ms,
        )
        self._hold = replace(self._hold, progress=self._progress)
        return True

    async def _over_quota(self, found: Survey) -> list[LineFault]:
        room, waiting = await self._batches.reserve(self._hold, found.tokens)
        if room:
            return []
        message = (
            f"This batch has about {found.tokens} tokens and {waiting} are waiting in others; "
            f"at most {self._hold.batch.token_limit} may wait at once."
        )
        return [LineFault(0, "token_limit_exceeded", message)]

    async def _fail(self, faults: Sequence[LineFault]) -> None:
        await self._end(BatchState.FAILED, faults=tuple(faults))

    async def _compute(self) -> Why | None:
        """Why it is over for the lines, "" if all have their answer; None if only the turn is over."""
        self._lines = lines = Lines(self._bench.tools, self._hold, self._folder)
        await lines.open()
        loop = asyncio.get_running_loop()
        until, stopping = loop.time() + self._bench.turn_s, 0.0
        while True:
            self._bench.metrics.batch_lines.inc(await lines.collect())
            if lines.done:
                return ""
            if why := self._called_off():
                if not stopping:
                    stopping = loop.time() + STOPPING_S
                    await lines.give_up()
                if lines.idle or loop.time() > stopping:
                    return why
            elif self._stop.is_set() or loop.time() > until:
                await self._say(rest_ms=0)
                return None
            elif self._verdict.paused:
                await lines.withdraw()
                if lines.idle:
                    await self._say(rest_ms=self._sleep_ms())
                    return None
            else:
                self._bench.metrics.batch_lines.inc(await lines.feed())
            await wait(self._stop, LOOK_INTERVAL_S)

    def _called_off(self) -> Why:
        if self._verdict.state is BatchState.CANCELLING:
            return "cancelled"
        expires_ms = self._hold.expires_ms
        return "expired" if expires_ms and self._verdict.now_ms >= expires_ms else ""

    def _sleep_ms(self) -> int:
        expires_ms = self._hold.expires_ms
        return max(0, expires_ms - self._verdict.now_ms) if expires_ms else ASLEEP_MS

    async def _put_together(self, why: Why) -> None:
        """Output and error file, in the order of the input, and the end."""
        assert self._lines is not None
        if self._verdict.state is not BatchState.CANCELLING:
            await self._enter(BatchState.FINALIZING, finalizing_ms=self._verdict.now_ms)
        lines = self._lines
        made: list[tuple[LineOutcome, StoredFile]] = []
        try:
            for outcome in (LineOutcome.DONE, LineOutcome.FAILED):
                file = await asyncio.to_thread(self._assemble, lines.plan, lines.ledger, outcome, why)
                if file is not None:
                    made.append((outcome, file))
            self._progress = lines.progress()
            states: dict[Why, BatchState] = {"": BatchState.COMPLETED, "expired": BatchState.EXPIRED}
            named = {outcome: file.id for outcome, file in made}
            await self._end(
                states.get(why, BatchState.CANCELLED),
                [file for _, file in made],
                failed=self._progress.total - self._progress.completed,
                output_file=named.get(LineOutcome.DONE, ""),
                error_file=named.get(LineOutcome.FAILED, ""),
            )
        except Fenced:
            for _, file in made:  # whoever has the batch now makes its own
                await asyncio.to_thread(self._bench.shelf.remove, file.id)
            raise

    def _assemble(self, plan: InputPlan, ledger: Ledger, outcome: LineOutcome, why: Why) -> StoredFile | None:
        """None if it would be empty. Blocks."""
        batch, shelf = self._hold.batch, self._bench.shelf
        incoming = shelf.open_incoming()
        try:
            for block in blocks(output_lines(batch.id, self._folder, plan, ledger, outcome, why)):
                incoming.write(block)
                if self._lost:
                    raise SurveyInterrupted
            return self._keep(incoming, outcome) if incoming.size else None
        finally:
            incoming.discard()

    def _keep(self, incoming: Incoming, outcome: LineOutcome) -> StoredFile:
        batch, now_ms = self._hold.batch, self._verdict.now_ms
        file = StoredFile(
            id=self._files.new_id(batch.tenant),
            tenant=batch.tenant,
            name=f"{batch.id}_{'output' if outcome is LineOutcome.DONE else 'error'}.jsonl",
            size=incoming.size,
            purpose=OUTPUT,
            created_ms=now_ms,
            expires_ms=now_ms + batch.output_keep_ms,
        )
        self._bench.shelf.keep(incoming, file.id)
        return file
