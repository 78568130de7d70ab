"""Batch turn: one process's time slice on one batch: validate the input, compute lines, write the output files, end it.

The turn saves its progress about once a second, which renews its lease and returns the owner's commands (pause,
cancel). It may be killed at any point: the next turn continues from what is on disk and in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from api.openai.batch_lines import blocks, output_lines, refusal
from api.openai.errors import ApiError
from offline.batch.lines import Lines, Terms, ValidatedInput, ValidationInterrupted, validate_input
from offline.tools import OfflineTools
from penstock.loops import ExpectedErrors, run_periodically, wait
from streaming.batches.cron import Cron
from streaming.batches.file_store import FileStore
from streaming.batches.ledger import PLAN, LineOutcome, Segment
from streaming.batches.store import (
    Batches,
    BatchLease,
    BatchProgress,
    BatchState,
    Files,
    LineFault,
    StoredFile,
)
from streaming.errors import Fenced, QuotaExceeded, Unavailable
from streaming.fleet.processes import Fleet
from streaming.ids import joined

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Interval between queries for lines that have ended."""
CANCEL_TIMEOUT_S = 30.0
"""How long running lines of a cancelled batch may take to stop."""
PAUSED_RECHECK_MS = 24 * 3600 * 1000
"""A paused batch without a deadline becomes due again after this time."""
OUTPUT, TOKEN_LIMIT = "batch_output", "token_limit_exceeded"
WORK_LOST = LineFault(
    0,
    "work_lost",
    "The batch's work is not on disk any more: the store was restored to an earlier moment, or the folder of files "
    "lost it. Create the batch again. Answers that were finished may lie in the quarantine.",
)

StopReason: TypeAlias = Literal["", "expired", "cancelled"]


class BatchTurn:
    """One turn under one lease. Setting `stop` ends it early and cleanly."""

    def __init__(self, tools: OfflineTools, lease: BatchLease, stop: asyncio.Event) -> None:
        self._tools, self._lease, self._stop = tools, lease, stop
        self._batches, self._files = Batches(tools.store_client), Files(tools.store_client)
        self._folder = tools.file_store.work(lease.batch.id)
        self._save_lock = asyncio.Lock()
        self._ended = False
        """The final state is being saved, or is saved: no further save."""
        self._lost = False
        """The lease is lost or the turn is over: its threads must stop too."""
        self._lines: Lines | None = None

    async def run(self) -> None:
        """Work the turn. Raises Fenced when another process has taken the batch over, Unavailable, OSError."""
        saving = asyncio.create_task(self._save_periodically())
        processing = asyncio.create_task(self._process())
        try:
            await asyncio.wait({saving, processing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._lost = True
            for task in (saving, processing):
                task.cancel()
            results = await asyncio.gather(processing, saving, return_exceptions=True)
            if self._lines is not None:
                await asyncio.to_thread(self._lines.close)
        for result in results:
            if isinstance(result, Exception):
                raise result

    # --- saving progress ---------------------------------------------------------------------------------------------

    async def _save_periodically(self) -> None:
        """Save periodically; skip it while the store is away. If the lease expires, another turn takes the batch."""
        write = partial(log.warning, extra={"batch": self._lease.batch.id})
        expected = ExpectedErrors(Unavailable, write, "the progress of a batch could not be saved: %s")
        await run_periodically(self._save, self._tools.save_interval_s, expected, wait_first=True)

    async def _save(self, state: BatchState | None = None, *, rest_ms: int | None = None, **changes: Any) -> None:
        """Save the progress; with `rest_ms` end the turn until then. A command of the owner overrides `state`. Raises
        Fenced, Unavailable."""
        async with self._save_lock:
            if self._ended:
                return
            tokens = None if self._lines is None else self._lines.tokens_left
            progress = msgspec.structs.replace(self._progress(), **changes)
            self._lease = await self._batches.save(
                self._lease, state or self._lease.state, progress, tokens=tokens, rest_ms=rest_ms
            )

    def _progress(self) -> BatchProgress:
        return self._lease.progress if self._lines is None else self._lines.progress(self._lease.progress)

    async def _finish(
        self, state: BatchState, files: Sequence[StoredFile] = (), known: BatchProgress | None = None, **changes: Any
    ) -> None:
        """Save the final state of the batch and remove its work. `known`: its progress, if not the present one. Raises
        Fenced, Unavailable."""
        batch_id = self._lease.batch.id
        async with self._save_lock:
            changes = {"in_queue": 0, "per_second": 0.0, "ended_ms": self._lease.now_ms, **changes}
            progress = msgspec.structs.replace(known or self._progress(), **changes)
            self._ended = True
            # Before the store gets the outcome. Each epoch has a note of its own, so a turn that lost its lease cannot
            # overwrite the note of the next one.
            note = msgspec.json.encode(Ending(state, progress, tuple(files)))
            await asyncio.to_thread(self._tools.file_store.note, batch_id, self._lease.epoch, note)
            await self._batches.save(self._lease, state, progress, keep_s=self._tools.keep_s, files=files)
        self._tools.metrics.batches.labels(state.value).inc()
        log.info("batch ended as %s", state, extra={"batch": batch_id, "lines": progress.total})
        await asyncio.to_thread(self._tools.file_store.end_work, batch_id)

    def _should_continue(self) -> bool:
        return not self._lost and not self._stop.is_set()

    # --- the stages of a batch ---------------------------------------------------------------------------------------

    async def _process(self) -> None:
        if not await asyncio.to_thread((self._folder / PLAN).exists) and await self._restore_ending():
            return
        if self._lease.state is BatchState.SCHEDULED:
            await self._keep_schedule()
            return
        if self._is_to_read and not await self._read_input():
            return
        if not await asyncio.to_thread((self._folder / PLAN).exists):
            await self._finish_without_work()
            return
        reason = await self._compute()
        if reason is not None:
            await self._write_outputs(reason)

    @property
    def _is_to_read(self) -> bool:
        """Whether the input is to be read. Requests that came as a batch have a result each, though it is cancelled."""
        lease, state = self._lease, self._lease.state
        unread = state is BatchState.CANCELLING and lease.batch.lines and not lease.progress.began_ms
        return state is BatchState.VALIDATING or bool(unread)

    async def _restore_ending(self) -> bool:
        """End a batch again that had ended before the store was restored from a backup; return whether it had."""
        ending = await asyncio.to_thread(noted_ending, self._tools.file_store, self._lease.batch.id)
        if ending is None:
            return False
        log.warning("the store had lost a batch's outcome; its note restores it", extra={"batch": self._lease.batch.id})
        now_ms, keep_ms = self._lease.now_ms, self._lease.batch.output_keep_ms
        files = [msgspec.structs.replace(file, created_ms=now_ms, expires_ms=now_ms + keep_ms) for file in ending.files]
        await self._finish(ending.state, files, ending.progress, ended_ms=ending.progress.ended_ms)
        return True

    async def _finish_without_work(self) -> None:
        """End a batch whose input was never read or whose work folder is lost."""
        is_cancelled = self._lease.state is BatchState.CANCELLING
        lost = (WORK_LOST,) if self._lease.progress.began_ms or not is_cancelled else ()
        await self._finish(BatchState.CANCELLED if is_cancelled else BatchState.FAILED, faults=lost)

    async def _keep_schedule(self) -> None:
        """Begin a batch if its time has come, however many times have; then rest until the next one. The batch's id
        follows from its time, so another turn begins the same one. Raises Fenced, Unavailable."""
        lease, plan, known = self._lease, self._lease.batch, self._lease.progress
        cron = Cron(plan.cron, plan.timezone)
        due_ms, faults, last = known.next_ms or cron.after(lease.created_ms), known.faults, known.last_batch
        if lease.now_ms >= due_ms and not lease.paused:
            new_id = self._batches.new_id(plan.tenant, joined("schedule", f"{plan.id}:{due_ms}"))
            metadata = plan.metadata | {"schedule": plan.id}
            batch = msgspec.structs.replace(plan, id=new_id, cron="", timezone="", metadata=metadata)
            store = self._tools.file_store
            try:
                await asyncio.to_thread(store.begin_work, new_id, plan.input_file, plan.id)
                size = (await asyncio.to_thread(store.input_of(new_id, plan.input_file).stat)).st_size
                await self._batches.create(batch, str(due_ms), plan.file_limit, size)
                faults, last = (), new_id
            except FileNotFoundError:
                await self._finish(BatchState.FAILED, faults=(WORK_LOST,))
                return
            except QuotaExceeded as error:
                await asyncio.to_thread(store.end_work, new_id)
                faults = (LineFault(0, "quota_exceeded", f"The last batch was not begun: {error}."),)
        next_ms = due_ms if lease.now_ms < due_ms else cron.after(lease.now_ms)
        rest_ms = max(0, next_ms - lease.now_ms)
        await self._save(rest_ms=rest_ms, next_ms=next_ms, faults=faults, last_batch=last)

    async def _read_input(self) -> bool:
        """Validate the input; return whether there are lines to compute."""
        tools, batch = self._tools, self._lease.batch
        segment = Segment(self._folder, self._lease.epoch)
        cards = await Fleet(tools.store_client).cards()
        terms = Terms(
            *(batch.endpoint, tools.models, tools.batch.max_lines, tools.max_choices, cards),
            tenant=batch.tenant,
            aliases=tools.aliases,
        )
        try:
            source = await asyncio.to_thread(self._tools.file_store.input_of, batch.id, batch.input_file)
            found = await asyncio.to_thread(validate_input, source, terms, segment, self._should_continue)
            await self._reserve(found, segment)
            if not found.faults:
                await asyncio.to_thread(segment.commit)
                await asyncio.to_thread(found.plan.save, self._folder)
        except ValidationInterrupted:
            await self._save(rest_ms=0)
            return False
        except FileNotFoundError:
            gone = LineFault(0, "file_not_found", "The input file is gone.", "input_file_id")
            await self._finish(BatchState.FAILED, faults=(gone,))
            return False
        finally:
            segment.close()
        if found.faults:
            await self._finish(BatchState.FAILED, faults=tuple(found.faults))
            return False
        await self._save(
            BatchState.IN_PROGRESS,
            total=len(found.plan),
            failed=found.refused,
            distinct=len(found.plan.order),
            model=next(iter(found.models)) if len(found.models) == 1 else "",
            tokens=found.tokens,
            began_ms=self._lease.now_ms,
        )
        return True

    async def _reserve(self, found: ValidatedInput, segment: Segment) -> None:
        """Reserve the tokens of an input. Without room for them it has a fault, or its requests, if they came as a
        batch, have an error each. Raises Fenced, Unavailable."""
        batch = self._lease.batch
        if found.faults or self._lease.state is BatchState.CANCELLING:
            return
        has_room, waiting = await self._batches.reserve(self._lease, found.tokens)
        if has_room:
            return
        message = (
            f"This batch has about {found.tokens} tokens and {waiting} are waiting in others; "
            f"at most {batch.token_limit} may wait at once."
        )
        if not batch.lines:
            found.faults.append(LineFault(0, TOKEN_LIMIT, message))
            return
        for place in found.plan.order:
            segment.add(place, LineOutcome.FAILED, answer=refusal(ApiError(429, TOKEN_LIMIT, message)))
        found.refused = len(found.plan)

    async def _compute(self) -> StopReason | None:
        """Compute lines. Returns why the batch stops ("": every line has an answer); None if only the turn is over."""
        self._lines = lines = await Lines.open(self._tools, self._lease, self._folder)
        loop = asyncio.get_running_loop()
        turn_end, cancel_by = loop.time() + self._tools.turn_s, 0.0
        while True:
            self._tools.metrics.batch_lines.inc(await lines.collect())
            if lines.done:
                return ""
            if reason := self._stop_reason():
                if not cancel_by:
                    cancel_by = loop.time() + CANCEL_TIMEOUT_S
                    await lines.give_up()
                if lines.idle or loop.time() > cancel_by:
                    return reason
            elif self._stop.is_set() or loop.time() > turn_end:
                await self._save(rest_ms=0)
                return None
            elif self._lease.paused:
                await lines.withdraw()
                if lines.idle:
                    left_ms = self._left_ms()
                    await self._save(rest_ms=PAUSED_RECHECK_MS if left_ms is None else max(0, left_ms))
                    return None
            else:
                self._tools.metrics.batch_lines.inc(await lines.feed(self._left_ms()))
                if rest_ms := lines.held_ms:
                    await self._save(rest_ms=rest_ms)
                    return None
            await wait(self._stop, POLL_INTERVAL_S)

    def _stop_reason(self) -> StopReason:
        if self._lease.state is BatchState.CANCELLING:
            return "cancelled"
        left_ms = self._left_ms()
        return "" if left_ms is None or left_ms > 0 else "expired"

    def _left_ms(self) -> int | None:
        """Milliseconds until the batch expires, as of the last save; None: never."""
        return self._lease.expires_ms - self._lease.now_ms if self._lease.expires_ms else None

    async def _write_outputs(self, reason: StopReason) -> None:
        """Write the output and error files, in the order of the input, and end the batch."""
        assert self._lines is not None
        if self._lease.state is not BatchState.CANCELLING:
            await self._save(BatchState.FINALIZING, finalizing_ms=self._lease.now_ms)
        lines = self._lines
        made: list[tuple[LineOutcome, StoredFile]] = []
        try:
            for outcome in (LineOutcome.DONE, LineOutcome.FAILED):
                file = await asyncio.to_thread(self._assemble, lines, outcome, reason)
                if file is not None:
                    made.append((outcome, file))
            progress = lines.progress(self._lease.progress)
            states: dict[StopReason, BatchState] = {"": BatchState.COMPLETED, "expired": BatchState.EXPIRED}
            named = {outcome: file.id for outcome, file in made}
            await self._finish(
                states.get(reason, BatchState.CANCELLED),
                [file for _, file in made],
                failed=progress.total - progress.completed,
                not_run=progress.total - progress.completed - progress.failed,
                output_file=named.get(LineOutcome.DONE, ""),
                error_file=named.get(LineOutcome.FAILED, ""),
            )
        except Fenced:
            for _, file in made:  # the process that has the batch now writes its own
                await asyncio.to_thread(self._tools.file_store.remove, file.id)
            raise

    def _assemble(self, lines: Lines, outcome: LineOutcome, reason: StopReason) -> StoredFile | None:
        """Write the file of the lines with this outcome; None if it would be empty. Blocks."""
        batch, file_store, now_ms = self._lease.batch, self._tools.file_store, self._lease.now_ms
        incoming = file_store.open_incoming()
        try:
            for block in blocks(output_lines(batch.id, self._folder, lines.plan, lines.ledger, outcome, reason)):
                incoming.write(block)
                if self._lost:
                    raise ValidationInterrupted
            if not incoming.size:
                return None
            file = StoredFile(
                id=self._files.new_id(batch.tenant),
                tenant=batch.tenant,
                name=f"{batch.id}_{'output' if outcome is LineOutcome.DONE else 'error'}.jsonl",
                size=incoming.size,
                purpose=OUTPUT,
                created_ms=now_ms,
                expires_ms=now_ms + batch.output_keep_ms,
            )
            file_store.keep(incoming, file.id)
            return file
        finally:
            incoming.discard()


class Ending(msgspec.Struct, frozen=True):
    """Ending note: final state of a batch, with its counts and its output files, on disk.

    Once a batch has ended, its work folder is removed and only the store knows the outcome. A store restored from an
    older backup may list the batch as unfinished; the note then gives it the outcome again.
    """

    state: BatchState
    progress: BatchProgress
    files: tuple[StoredFile, ...] = ()


def noted_ending(file_store: FileStore, batch_id: str) -> Ending | None:
    """Return the newest ending whose files exist, and bring them back from quarantine if needed. Blocks. Raises
    OSError."""
    for data in file_store.notes(batch_id):
        try:
            ending = msgspec.json.decode(data, type=Ending)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the note of a batch's end cannot be read: %s", error, extra={"batch": batch_id})
            continue
        if all(file_store.bring_back(file.id) for file in ending.files):
            return ending
    return None
