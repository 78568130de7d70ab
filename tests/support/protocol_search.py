"""Breadth-first search through every state of the protocol's model; what it finds is the shortest way to it.

Workers are alike and so are jobs: states that differ only in their order count as one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Generic, TypeVar

from protocol_model import NOTHING, Job, Move, Protocol, Worker, weight

State = tuple[int, ...]
"""Numbers of the workers, then of the jobs."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Violation:
    """A broken invariant and the shortest way to break it."""

    invariant: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.invariant} is broken:", *(f"  {i}. {step}" for i, step in enumerate(self.trace, 1))])


@dataclass(frozen=True)
class Found:
    """How many different states there are up to the first violation, or in all."""

    states: int
    steps: int
    ends: frozenset[str]
    """The final states that jobs reached."""
    violation: Violation | None


class Numbers(Generic[T]):
    """A number for every value met, and back."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._known: dict[T, int] = {}

    def of(self, value: T) -> int:
        number = self._known.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Turned(dict[int, int]):
    """By a worker's number, that of the same worker when the jobs stand in another order; filled as it is asked."""

    def __init__(self, workers: Numbers[Worker], order: tuple[int, ...]) -> None:
        super().__init__()
        self._workers, self._order = workers, order

    def __missing__(self, worker: int) -> int:
        value = self._workers.values[worker]
        cells = tuple(value.cells[at] for at in self._order)
        return self.setdefault(worker, self._workers.of(value._replace(cells=cells)))


class Search:
    """One search of one protocol."""

    def __init__(self, protocol: Protocol, workers: int, jobs: int) -> None:
        self._protocol, self._count = protocol, workers
        self._workers: Numbers[Worker] = Numbers()
        self._jobs: Numbers[Job] = Numbers()
        self._orders = [(order, Turned(self._workers, order)) for order in permutations(range(jobs))]
        self._sorted: dict[State, tuple[State, bool, list[Turned]]] = {}
        self._moves: dict[State, list[tuple[str, int, State, bool, str]]] = {}
        self._cancels: dict[State, list[tuple[str, State]]] = {}
        start = self._workers.of(Worker((NOTHING,) * jobs))
        self._start: State = (start,) * workers + (self._jobs.of(Job()),) * jobs

    def run(self) -> Found:
        """Every state, nearest first, until one is wrong."""
        parents: dict[State, State | None] = {self._start: None}
        layer, steps = [self._start], 0
        while layer:
            ahead: list[State] = []
            for state in layer:
                rests = True
                for after, progress, breaks in self._steps(state):
                    steps += 1
                    rests &= not progress
                    if breaks:
                        return self._found(parents, steps, self._violation(parents, state, breaks))
                    if after not in parents:
                        parents[after] = state
                        ahead.append(after)
                if wrong := self._wrong(state, rests):
                    return self._found(parents, steps, self._violation(parents, state, wrong, last=True))
            layer = ahead
        return self._found(parents, steps, None)

    def _found(self, parents: dict[State, State | None], steps: int, violation: Violation | None) -> Found:
        ends = frozenset(job.state for job in self._jobs.values if job.final)
        return Found(len(parents), steps, ends, violation)

    # --- one state ---------------------------------------------------------------------------------------------------

    def _steps(self, state: State) -> Iterator[tuple[State, bool, str]]:
        """The successors of a canonical state, in the same order: canonical, and without labels."""
        workers, jobs = state[: self._count], state[self._count :]
        for at, worker in enumerate(workers):
            if at and worker == workers[at - 1]:
                continue
            others = (*workers[:at], *workers[at + 1 :])
            for _, after, new_jobs, progress, breaks in self._moves_of(worker, jobs):
                yield self._least((*others, after), new_jobs), progress, breaks
        for _, new_jobs in self._cancels_of(jobs):
            yield self._least(workers, new_jobs), False, ""

    def _successors(self, state: State) -> Iterator[tuple[str, int, State, bool, str]]:
        """In a label, `{w}` is the worker at the place that stands behind it."""
        workers, jobs = state[: self._count], state[self._count :]
        for at, worker in enumerate(workers):
            if worker in workers[:at]:
                continue
            for label, after, new_jobs, progress, breaks in self._moves_of(worker, jobs):
                yield label, at, (*workers[:at], after, *workers[at + 1 :], *new_jobs), progress, breaks
        for label, new_jobs in self._cancels_of(jobs):
            yield label, 0, (*workers, *new_jobs), False, ""

    def _moves_of(self, worker: int, jobs: State) -> list[tuple[str, int, State, bool, str]]:
        """Remembered: there are few workers and jobs that differ, and very many states."""
        key = (worker, *jobs)
        if key not in self._moves:
            before = self._workers.values[worker], self._values(jobs)
            moves = [move for move in self._protocol.moves(*before) if _tells(move, *before)]
            self._moves[key] = [
                (m.label, self._workers.of(m.worker), self._numbers(m.jobs), m.progress, m.breaks) for m in moves
            ]
        return self._moves[key]

    def _cancels_of(self, jobs: State) -> list[tuple[str, State]]:
        if jobs not in self._cancels:
            cancels = self._protocol.cancels(self._values(jobs))
            self._cancels[jobs] = [(label, self._numbers(after)) for label, after in cancels]
        return self._cancels[jobs]

    def _wrong(self, state: State, rests: bool) -> str:
        workers = tuple(self._workers.values[number] for number in state[: self._count])
        jobs = self._values(state[self._count :])
        return self._protocol.broken(workers, jobs) or (rests and self._protocol.broken_at_rest(workers, jobs)) or ""

    def _values(self, jobs: State) -> tuple[Job, ...]:
        return tuple(self._jobs.values[number] for number in jobs)

    def _numbers(self, jobs: tuple[Job, ...]) -> State:
        return tuple(self._jobs.of(job) for job in jobs)

    # --- symmetry ----------------------------------------------------------------------------------------------------

    def _canonical(self, state: State) -> State:
        """The least of all states that differ from this one only in the order of workers and jobs."""
        return self._least(state[: self._count], state[self._count :])

    def _least(self, workers: State, jobs: State) -> State:
        if (found := self._sorted.get(jobs)) is None:
            least = tuple(sorted(jobs))
            fitting = [turned for order, turned in self._orders if tuple(jobs[at] for at in order) == least]
            if jobs == least:  # the first order changes nothing
                fitting = fitting[1:]
            found = self._sorted[jobs] = (least, jobs == least, fitting)
        least, as_it_is, fitting = found
        candidates = [sorted(workers)] if as_it_is else []
        candidates += [sorted([turned[worker] for worker in workers]) for turned in fitting]
        return (*(min(candidates) if len(candidates) > 1 else candidates[0]), *least)

    # --- the way there -----------------------------------------------------------------------------------------------

    def _violation(
        self, parents: dict[State, State | None], state: State, invariant: str, *, last: bool = False
    ) -> Violation:
        way, here = [state], parents[state]
        while here is not None:
            way.append(here)
            here = parents[here]
        way.reverse()
        concrete, trace = self._start, []
        for following in way[1:]:
            step, concrete = next(
                (self._named(label, worker), after)
                for label, worker, after, _, _ in self._successors(concrete)
                if self._canonical(after) == following
            )
            trace.append(step)
        if not last:
            steps = self._successors(concrete)
            trace.append(next(self._named(label, worker) for label, worker, _, _, wrong in steps if wrong == invariant))
        return Violation(invariant, tuple(trace))

    def _named(self, label: str, worker: int) -> str:
        """`{w}` is the worker, `{0}` a request."""
        return label.format(*(f"r{at}" for at in range(len(self._start) - self._count)), w=f"w{worker}")


def _tells(move: Move, worker: Worker, jobs: tuple[Job, ...]) -> bool:
    """Whether a move changes anything. A step of progress must also bring the worker nearer to rest."""
    if (move.worker, move.jobs) == (worker, jobs):
        return bool(move.breaks)
    assert not move.progress or move.breaks or weight(move.worker, move.jobs) < weight(worker, jobs), move
    return True
