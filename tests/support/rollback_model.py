"""Model of one job on a store that may go back to any earlier state: who wrote what, and what its reader notices.

A run is one begin of the job by a worker. Its id is made of the worker's lease and a number that the worker counts,
so it is never given twice, whatever the store forgets. A run begins behind a row of another run, its parent; so a run
and a number say everything that came before. A reader compares both where the run changes, in the terminal record and
in the cursor it comes back with; a mismatch is a reset.

What holds: what a reader shows is always the beginning of one run's text (else it is spliced), in the end the stored
result. A reset is told only if the store went back. A run ends the job at most once, so an event id, which names
epoch, number and run, never stands for two ends. A job that the store knows ends. "One end in an epoch" alone does
not hold: until a sweep notices that the store went back, another run may end the job again under the old epoch.

Published rows may be lost, workers may crash or be fenced while they live, a reader may come back at any time, and
once the store becomes what it was at an earlier moment. Each rule can be taken away, to see what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Rule(StrEnum):
    """What a reader of a store that may forget stands on."""

    RUN_NOT_WORKER = "an author is a run, not only its worker"
    COUNTED_BY_WORKER = "a worker counts its own runs; the store does not"
    HAND_OVER = "where the run changes, the new one must have begun behind what the reader has"
    TERMINAL = "the terminal record's rows are compared with those the reader has"
    CURSOR = "a cursor names the run of its row"


TODAY = frozenset({Rule.RUN_NOT_WORKER, Rule.HAND_OVER, Rule.TERMINAL, Rule.CURSOR})
"""What was missing before: authors were workers, and only rows that a reader had were compared."""


class Run(NamedTuple):
    """A begin of the job. What it says is fixed when it begins."""

    worker: int
    number: int
    """What tells it from the worker's other runs."""
    parent: int
    """The run of the row it goes on behind, as its place in `World.runs`; -1: from the beginning."""
    behind: int


class Store(NamedTuple):
    """What may be forgotten."""

    state: str = "queued"
    owner: int = -1
    """The run that may end the job."""
    runs: tuple[int, ...] = ()
    """Named in the job's record."""
    log: frozenset[tuple[int, int]] = frozenset()
    """Rows: run and sequence number."""
    live: frozenset[int] = frozenset()
    """Workers that are not fenced."""
    begins: int = 0
    rows: tuple[int, ...] = ()
    """Of the terminal record: the run of each row."""


class Reader(NamedTuple):
    """One client. `rows`: the run of each row since it was last told to begin anew."""

    rows: tuple[int, ...] = ()
    known: bool = True
    """Its API process knows the run of its last row."""
    told: bool = False


class World(NamedTuple):
    """Everything there is."""

    store: Store
    runs: tuple[Run, ...]
    """All that ever began."""
    held: tuple[tuple[int, int], ...]
    """By worker: the run it is at and the last row it gave; (-1, 0): none, (-2, 0): the process is gone."""
    reader: Reader
    copy: Store | None = None
    lost: bool = False
    """The store has gone back."""
    ended: frozenset[int] = frozenset()
    """Runs that have ended the job: more than one only if the store forgot an end."""


class Step(NamedTuple):
    label: str
    world: World
    breaks: str = ""
    fault: bool = False


IDLE, GONE = (-1, 0), (-2, 0)


@dataclass(frozen=True)
class Model:
    """`tokens` rows end the job; at most `begins` runs."""

    workers: int = 2
    tokens: int = 3
    begins: int = 3
    without: frozenset[Rule] = frozenset()

    def start(self) -> World:
        return World(Store(live=frozenset(range(self.workers))), (), (IDLE,) * self.workers, Reader())

    def has(self, rule: Rule) -> bool:
        return rule not in self.without

    # --- what is true ----------------------------------------------------------------------------------------------

    def past(self, world: World, run: int, seq: int) -> tuple[int, ...]:
        """The runs of rows 1 to `seq` of a run's text."""
        if seq == 0:
            return ()
        each = world.runs[run]
        if seq <= each.behind:
            return self.past(world, each.parent, seq)
        return (*self.past(world, each.parent, each.behind), *(run,) * (seq - each.behind))

    def stored(self, store: Store) -> tuple[int, ...]:
        """The rows of a running job as its record and the logs have them; a later run's take the place of others'."""
        rows: dict[int, int] = {}
        for run in store.runs:
            rows |= {seq: run for each, seq in sorted(store.log) if each == run}
        found: list[int] = []
        while len(found) + 1 in rows:
            found.append(rows[len(found) + 1])
        return tuple(found)

    def same(self, world: World, one: int, other: int) -> bool:
        """Whether two runs are the same author, as far as anybody can tell."""
        if one < 0 or other < 0:
            return one == other
        a, b = world.runs[one], world.runs[other]
        return a.worker == b.worker and (not self.has(Rule.RUN_NOT_WORKER) or a.number == b.number)

    # --- what may happen -------------------------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[Step]:
        for worker in range(self.workers):
            yield from self._work(world, worker)
        if not world.reader.told:
            yield self._look(world)
            yield self._come_back(world)
        if world.copy is None and not world.lost:
            yield Step("this moment is remembered", world._replace(copy=world.store), fault=True)
        if world.copy is not None and world.copy != world.store:
            yield Step("the store goes back", world._replace(store=world.copy, copy=None, lost=True), fault=True)

    def _work(self, world: World, worker: int) -> Iterator[Step]:
        store, (run, seq) = world.store, world.held[worker]
        if worker in store.live and (store.owner < 0 or world.runs[store.owner].worker != worker or run != store.owner):
            stray = store.state == "running" and store.owner >= 0 and world.runs[store.owner].worker == worker
            if stray and run != -2:
                back = store._replace(state="queued", owner=-1)
                yield Step(f"w{worker} hands back what it does not run", world._replace(store=back))
        if worker in store.live:
            yield Step(f"w{worker} is fenced", self._reap(world, worker), fault=run != -2)
        if run == -2:
            return
        if store.live - {worker} or world.lost:  # somebody is left
            yield Step(f"w{worker} crashes", _hold(world, worker, GONE), fault=True)
        if worker not in store.live:
            yield Step(f"w{worker} hears that it is fenced", _hold(world, worker, GONE))
            return
        if store.state == "queued" and len(world.runs) < self.begins:
            yield self._begin(world, worker)
        if run >= 0 and seq < self.tokens:
            yield from self._append(world, worker)
        elif run >= 0:
            yield from self._finish(world, worker)

    def _begin(self, world: World, worker: int) -> Step:
        """Claim. A worker that still runs the job lets go of it first."""
        store = world.store
        rows = self.stored(store)
        mine = sum(run.worker == worker for run in world.runs)
        number = mine if self.has(Rule.COUNTED_BY_WORKER) else store.begins
        run = len(world.runs)
        world = world._replace(runs=(*world.runs, Run(worker, number, rows[-1] if rows else -1, len(rows))))
        after = store._replace(state="running", owner=run, runs=(*store.runs, run), begins=store.begins + 1)
        return Step(
            f"w{worker} begins run {run} behind {len(rows)}",
            _hold(world._replace(store=after), worker, (run, len(rows))),
        )

    def _append(self, world: World, worker: int) -> Iterator[Step]:
        """Log one row, and those before it that the store has forgotten; it does not ask whose the job is."""
        run, seq = world.held[worker]
        first = world.runs[run].behind + 1
        rows = [(run, each) for each in range(first, seq + 2)]
        new = [row for row in rows if row not in world.store.log]
        store = world.store._replace(log=world.store.log | set(rows))
        after = _hold(world._replace(store=store), worker, (run, seq + 1))
        label = f"w{worker} logs row {seq + 1} of run {run}"
        yield Step(f"{label}, unheard", after)
        reader, breaks = after.reader, ""
        for row in new:
            if not reader.told:
                reader, broken = self._take(after, reader, *row)
                breaks = breaks or broken
        yield Step(label, after._replace(reader=reader), breaks)

    def _finish(self, world: World, worker: int) -> Iterator[Step]:
        run, seq = world.held[worker]
        store, left = world.store, _hold(world, worker, IDLE)
        mine = store.state == "running" and self.same(world, store.owner, run)
        if not mine:
            yield Step(f"w{worker} ends run {run}: refused", left)
            return
        ended = store._replace(state="completed", owner=-1, rows=self.past(world, run, seq))
        after = left._replace(store=ended, ended=world.ended | {run})
        if run in world.ended or (world.ended and not world.lost):
            yield Step(f"w{worker} ends run {run} again", after, "two ends")
        yield Step(f"w{worker} ends run {run}, unheard", after)
        yield self._ended(after, f"w{worker} ends run {run}")

    def _reap(self, world: World, worker: int) -> World:
        store = world.store._replace(live=world.store.live - {worker})
        if store.state == "running" and store.owner >= 0 and world.runs[store.owner].worker == worker:
            store = store._replace(state="queued", owner=-1)
        return world._replace(store=store)

    # --- what the reader does --------------------------------------------------------------------------------------

    def _take(self, world: World, reader: Reader, run: int, seq: int) -> tuple[Reader, str]:
        """One row. Also whether that breaks something."""
        have = len(reader.rows)
        if seq <= have:
            # No rule of its own: hand-overs, ends and cursors would show the difference too, only later.
            differs = not self.same(world, reader.rows[seq - 1], run)
            return self._reset(world) if differs and reader.known else (reader, "")
        if seq > have + 1:
            return reader, ""  # it waits until the gap is filled
        last = reader.rows[-1] if have else -1
        each = world.runs[run]
        fits = self.same(world, last, run) if seq > each.behind + 1 else self.same(world, last, each.parent)
        if not fits and self.has(Rule.HAND_OVER) and reader.known:
            return self._reset(world)
        taken = reader._replace(rows=(*reader.rows, run), known=True)
        return taken, "" if taken.rows == self.past(world, run, seq) else "spliced"

    def _reset(self, world: World) -> tuple[Reader, str]:
        return Reader(), "" if world.lost else "reset for no reason"

    def _look(self, world: World) -> Step:
        """Read record and log, as a reader does that misses something."""
        if world.store.state == "completed":
            return self._ended(world, "the reader finds the end")
        reader, breaks = world.reader, ""
        for seq, run in enumerate(self.stored(world.store), 1):
            before = reader
            reader, broken = self._take(world, reader, run, seq)
            breaks = breaks or broken
            if before.rows and not reader.rows:
                break
        return Step("the reader looks into the log", world._replace(reader=reader), breaks)

    def _ended(self, world: World, label: str) -> Step:
        """The terminal record: what is missing is taken from its rows."""
        reader, rows = world.reader, world.store.rows
        have = len(reader.rows)
        fits = not have or not reader.known or self.same(world, reader.rows[-1], rows[have - 1])
        if self.has(Rule.TERMINAL) and not fits:
            reader, breaks = self._reset(world)
            return Step(f"{label}: reset", world._replace(reader=reader), breaks)
        shown = (*reader.rows, *rows[have:])
        after = world._replace(reader=Reader(shown, told=True))
        return Step(label, after, "" if shown == rows else "spliced")

    def _come_back(self, world: World) -> Step:
        """With its cursor, at a process that knows nothing of it."""
        reader, have = world.reader, len(world.reader.rows)
        if not have:
            return Step("the reader comes back", world)
        rows = world.store.rows if world.store.state == "completed" else self.stored(world.store)
        unknown = have > len(rows)
        if not unknown and self.has(Rule.CURSOR):
            unknown = not self.same(world, rows[have - 1], reader.rows[-1])
        if unknown:
            after, breaks = self._reset(world)
            return Step("the reader comes back: reset", world._replace(reader=after), breaks)
        known = self.has(Rule.CURSOR)
        return Step("the reader comes back", world._replace(reader=reader._replace(known=known)))

    # --- what must hold at rest ------------------------------------------------------------------------------------

    def broken_at_rest(self, world: World) -> str:
        """With a worker that may claim, the job ends and its reader is told."""
        able = any(held != GONE and worker in world.store.live for worker, held in enumerate(world.held))
        if not able or len(world.runs) >= self.begins:
            return ""
        return "" if world.store.state == "completed" and world.reader.told else "lost"


def _hold(world: World, worker: int, what: tuple[int, int]) -> World:
    return world._replace(held=(*world.held[:worker], what, *world.held[worker + 1 :]))


class Found(NamedTuple):
    """How many states there are, and the first violation with the shortest way to it."""

    states: int
    resets: int
    violation: str = ""
    trace: tuple[str, ...] = ()


def search(model: Model) -> Found:
    """Every state, nearest first, until one is wrong."""
    start = model.start()
    parents: dict[World, tuple[World, str] | None] = {start: None}
    layer, resets = [start], 0

    def way(world: World, *last: str) -> tuple[str, ...]:
        trace: list[str] = list(last)
        here = parents[world]
        while here is not None:
            trace.insert(0, here[1])
            here = parents[here[0]]
        return tuple(trace)

    while layer:
        ahead: list[World] = []
        for world in layer:
            rests = True
            for step in model.steps(world):
                if step.breaks:
                    return Found(len(parents), resets, step.breaks, way(world, step.label))
                if step.world == world:
                    continue
                rests &= step.fault
                resets += bool(world.reader.rows) and not step.world.reader.rows
                if step.world not in parents:
                    parents[step.world] = (world, step.label)
                    ahead.append(step.world)
            if rests and (wrong := model.broken_at_rest(world)):
                return Found(len(parents), resets, wrong, way(world))
        layer = ahead
    return Found(len(parents), resets)
