"""The queue's protocol as a small model: what each script does to a job, and what workers, clients and faults may do.

One engine step gives one token. A worker may crash before and after every step, or lose its lease while it is alive
(a zombie, which goes on writing); answers may be lost and writes repeated. Redis runs scripts one at a time and
forgets nothing: a store that loses data is not modelled, nor is time (deadlines, the expiry of the runner's key). A
claim may be interrupted between its writes, for the server may refuse one of them.
Each rule of the protocol can be taken away, to see what it is for. `protocol_search` looks at every state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Rule(StrEnum):
    """What the protocol stands on; a model may be built without some of it."""

    APPEND_FENCED = "append refuses a worker that was fenced"
    APPEND_NUMBERED = "append knows a repeated frame by its number"
    FINISH_FENCED = "finish refuses a worker that was fenced"
    FINISH_OWNED = "finish refuses whoever does not hold this attempt"
    FINISH_ONCE = "finish refuses a job that has ended"
    DROP_NOT_FIRST = "the job does not leave its lane and its worker's claims in a step before the terminal record"
    DROP_NOT_LAST = "the job does not leave its lane and its worker's claims in a step after the terminal record"
    CLAIM_TAKES = "claim takes the job from the place where it waits"
    CLAIM_NOTED = "a claim that is interrupted notes in the worker's claims what it has taken"
    CANCEL_ENDS = "cancel ends a waiting job at once"
    LEAVE_WAITS = "leave is refused while jobs are held"
    STRAYS_ONLY = "a job is handed back as a stray only when no claim is under way"
    RELEASE_QUARANTINED = "release puts a suspect back where it will run alone"
    RELEASE_OF_ATTEMPT = "release refuses what was sent in an earlier attempt"


class Job(NamedTuple):
    """One request, as the store has it."""

    state: str = "queued"
    entry: bool = True
    """In its lane, from acceptance to end."""
    waits: bool = True
    """In the index of its lane, or in a queue of jobs that were put back."""
    twice: bool = False
    """A place where it waited was left behind."""
    tokens: int = 0
    """Logged, and with that shown."""
    losses: int = 0
    suspect: bool = False
    """It is put back to those that are run alone."""
    cancel: str = ""
    """asked: its worker is to stop; told: the client heard that it has ended."""

    @property
    def final(self) -> bool:
        return self.state not in ("queued", "running")


class Cell(NamedTuple):
    """What lies between one worker and one job."""

    claimed: bool = False
    """In the worker's set of claims."""
    owner: bool = False
    """Named in the job's record."""
    phase: str = ""
    """What the process is doing: claiming (no answer yet), running, unanswered (a step was logged), refused (a step
    was not, its finish is sent), between (the two steps of a finish), ended (finish not answered yet)."""
    seq: int = 0
    """The last token the process knows."""
    late: str = ""
    """A hand-back that is still on its way: of this attempt, or of an earlier one."""


NOTHING = Cell()


class Worker(NamedTuple):
    """One life of a worker process and its lease."""

    cells: tuple[Cell, ...]
    status: str = "live"
    """live | draining | crashed (its lease still stands) | zombie (fenced, and does not know) | gone"""

    @property
    def works(self) -> bool:
        return self.status in ("live", "draining")


class Move(NamedTuple):
    """One step of one worker or client: what it leaves behind, and which invariant it breaks."""

    label: str
    worker: Worker
    jobs: tuple[Job, ...]
    progress: bool = True
    """It will happen if nothing else does; False: a fault, or somebody's wish."""
    breaks: str = ""


@dataclass(frozen=True)
class Protocol:
    """`tokens` are generated for each job; one that lost `attempts` workers is given up. `delays`: what is handed back
    may arrive at any later time, after a repetition that has arrived already. `interruptions`: of claims."""

    tokens: int = 2
    attempts: int = 2
    without: frozenset[Rule] = frozenset()
    delays: bool = False
    interruptions: bool = True

    def has(self, rule: Rule) -> bool:
        return rule not in self.without

    # --- whatever a worker may do, or suffer -------------------------------------------------------------------------

    def moves(self, worker: Worker, jobs: tuple[Job, ...]) -> Iterator[Move]:
        """Every next step that concerns this worker. It depends on no other worker: they meet only in the jobs."""
        if worker.status == "gone":
            return
        if worker.status == "zombie":
            yield Move("{w} hears that it is fenced and stops", _gone(worker), jobs)
        else:
            yield self._reap(worker, jobs)
        if worker.works:
            yield from self._life(worker, jobs)
        for at in range(len(jobs)):
            if worker.works:
                yield from self._holding(worker, jobs, at)
            if worker.cells[at].phase:
                yield from self._writing(worker, jobs, at)
            if worker.cells[at].late and worker.status != "zombie":
                yield self._arrival(worker, jobs, at)

    def cancels(self, jobs: tuple[Job, ...]) -> Iterator[tuple[str, tuple[Job, ...]]]:
        """Script cancel, by a client: a waiting job ends, a running one is marked."""
        for at, job in enumerate(jobs):
            if job.final or job.cancel:
                continue
            if job.state == "running":
                after = job._replace(cancel="asked")
            else:
                after = _end(job, "cancelled") if self.has(Rule.CANCEL_ENDS) else job._replace(cancel="told")
            yield f"a client cancels {{{at}}} ({job.state})", _put(jobs, at, after)

    def _life(self, worker: Worker, jobs: tuple[Job, ...]) -> Iterator[Move]:
        crashed = tuple(cell._replace(owner=cell.owner and cell.claimed, phase="", seq=0) for cell in worker.cells)
        yield Move("{w} crashes", Worker(crashed, "crashed"), jobs, progress=False)
        if worker.status == "live":
            yield Move("{w} begins to drain", worker._replace(status="draining"), jobs, progress=False)
        elif not any(cell.phase for cell in worker.cells):
            held = any(cell.claimed for cell in worker.cells)
            if not held or not self.has(Rule.LEAVE_WAITS):
                yield Move("{w} leaves", worker._replace(status="gone"), jobs)

    def _reap(self, worker: Worker, jobs: tuple[Job, ...]) -> Move:
        """Script reap: the fence and what it does to the jobs. Of a worker that is alive it makes a zombie."""
        for at, (job, cell) in enumerate(zip(jobs, worker.cells, strict=True)):
            if cell.claimed and cell.owner and job.state == "running":
                jobs = _put(jobs, at, self._lost(job))
            elif cell.claimed and job.state == "queued":  # its claim was interrupted
                jobs = _put(jobs, at, self._requeue(job, job.suspect))
        cells = tuple(cell._replace(claimed=False, owner=False) for cell in worker.cells)
        alive = worker.works and any(cell.phase for cell in cells)
        after = Worker(cells, "zombie") if alive else _gone(worker)
        what = "is fenced while alive" if worker.works else "is fenced"
        return Move(f"{{w}} {what}", after, jobs, progress=not worker.works)

    def _lost(self, job: Job) -> Job:
        losses = job.losses + 1
        if job.cancel:
            return _end(job, "cancelled")
        if job.suspect or losses >= self.attempts:
            return _end(job, "failed")
        return self._requeue(job._replace(losses=losses), losses == self.attempts - 1)

    def _requeue(self, job: Job, suspect: bool) -> Job:
        return job._replace(state="queued", waits=True, suspect=suspect)

    # --- taking and handing back -------------------------------------------------------------------------------------

    def _holding(self, worker: Worker, jobs: tuple[Job, ...], at: int) -> Iterator[Move]:
        job, cell = jobs[at], worker.cells[at]
        free = worker.status == "live" and not cell.phase
        if free and job.state == "queued" and job.waits and self._may_claim(worker, jobs, at):
            claimed = Cell(True, True, "claiming", late="earlier" if cell.late else "")
            taken = job._replace(waits=False, twice=not self.has(Rule.CLAIM_TAKES))
            after = taken._replace(state="running")
            yield Move(f"{{w}} claims {{{at}}}", _with(worker, at, claimed), _put(jobs, at, after))
            if self.interruptions:
                noted = cell._replace(claimed=self.has(Rule.CLAIM_NOTED), owner=False)
                label = f"{{w}}'s claim of {{{at}}} is interrupted"
                yield Move(label, _with(worker, at, noted), _put(jobs, at, taken), progress=False)
        if cell.phase == "claiming":
            yield Move(
                f"{{w}} never hears that it claimed {{{at}}}", _with(worker, at, cell._replace(phase="")), jobs, False
            )
        if cell.claimed and not cell.owner and not cell.phase:
            # The claim was interrupted. Since then, a client may have cancelled the job.
            after = self._requeue(job, job.suspect) if job.state == "queued" else job
            label = f"{{w}} hands {{{at}}} back, whose claim was interrupted"
            yield Move(label, _with(worker, at, cell._replace(claimed=False)), _put(jobs, at, after))
        if cell.claimed and cell.owner and job.state == "running":
            claiming = any(other.phase == "claiming" for other in worker.cells)
            stray = not cell.phase and not claiming
            stray |= cell.phase == "claiming" and not self.has(Rule.STRAYS_ONLY)
            if stray or (worker.status == "draining" and cell.phase == "running"):
                yield self._release(worker, jobs, at)
                if self.delays and not cell.late:
                    sent = cell._replace(phase="", seq=0, late="this")
                    yield Move(f"{{w}} sends {{{at}}} back", _with(worker, at, sent), jobs, False)

    @staticmethod
    def _may_claim(worker: Worker, jobs: tuple[Job, ...], at: int) -> bool:
        """One claim at a time; a suspect only by a worker that does nothing else, and nothing beside it."""
        busy = [other for other, cell in zip(jobs, worker.cells, strict=True) if cell.phase]
        if jobs[at].suspect:
            return not busy
        return not any(job.suspect for job in busy) and not any(cell.phase == "claiming" for cell in worker.cells)

    def _release(self, worker: Worker, jobs: tuple[Job, ...], at: int) -> Move:
        """Script release. The process forgets the job first, but for a claim whose answer is still to come."""
        job, cell = jobs[at], worker.cells[at]
        suspect = job.suspect and self.has(Rule.RELEASE_QUARANTINED)
        after = _end(job, "cancelled") if job.cancel == "asked" else self._requeue(job, suspect)
        left = Cell(phase="claiming" if cell.phase == "claiming" else "", late=cell.late)
        return Move(
            f"{{w}} hands {{{at}}} back", _with(worker, at, left), _put(jobs, at, after), cell.phase != "claiming"
        )

    def _arrival(self, worker: Worker, jobs: tuple[Job, ...], at: int) -> Move:
        """Script release, late. The process may have claimed the job again, and does not notice."""
        job, cell = jobs[at], worker.cells[at]
        label = f"what {{w}} sent of {{{at}}} arrives"
        mine = cell.claimed and cell.owner and job.state == "running"
        if not mine or (cell.late == "earlier" and self.has(Rule.RELEASE_OF_ATTEMPT)):
            return Move(f"{label}: refused", _with(worker, at, cell._replace(late="")), jobs)
        after = self._release(worker, jobs, at).jobs
        return Move(label, _with(worker, at, cell._replace(claimed=False, owner=False, late="")), after)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _writing(self, worker: Worker, jobs: tuple[Job, ...], at: int) -> Iterator[Move]:
        """What a process does about a job it believes to be its own, whatever the store thinks."""
        job, cell = jobs[at], worker.cells[at]
        alive = worker.works
        if cell.phase == "claiming":
            begun = cell._replace(phase="running", seq=job.tokens)
            yield Move(f"{{w}} hears that it claimed {{{at}}}", _with(worker, at, begun), jobs, alive)
        elif cell.phase == "running" and cell.seq < self.tokens:
            yield self._append(worker, jobs, at, cell.seq + 1)
        elif cell.phase == "unanswered":
            heard = cell._replace(phase="running")
            yield Move(
                f"{{w}} hears that token {cell.seq} of {{{at}}} is logged", _with(worker, at, heard), jobs, alive
            )
            if not self.has(Rule.APPEND_NUMBERED):
                yield self._append(worker, jobs, at, cell.seq)
        if cell.phase in ("refused", "between") or (cell.phase == "running" and cell.seq == self.tokens):
            yield from self._finish(worker, jobs, at, "completed")
        if cell.phase == "running" and job.cancel == "asked":
            yield from self._finish(worker, jobs, at, "cancelled")
        if cell.phase == "ended":
            left = Cell(late=cell.late)
            yield Move(f"{{w}} hears that {{{at}}} has ended", _with(worker, at, left), jobs, alive)
            yield from self._finish(worker, jobs, at, job.state)

    def _append(self, worker: Worker, jobs: tuple[Job, ...], at: int, seq: int) -> Move:
        """Script append. It asks whether the worker lives, not whether the job is its own."""
        job, cell = jobs[at], worker.cells[at]
        label = f"{{w}} logs token {seq} of {{{at}}}"
        if not worker.works and self.has(Rule.APPEND_FENCED):
            # Its finish travels in the same round trip, behind the refused step.
            left = cell._replace(phase="refused", seq=seq) if seq == self.tokens else Cell(late=cell.late)
            return Move(f"{label}: refused", _with(worker, at, left), jobs, False)
        breaks = "" if seq == job.tokens + 1 and not job.final else "I3"
        after = _put(jobs, at, job._replace(tokens=seq))
        return Move(label, _with(worker, at, cell._replace(phase="unanswered", seq=seq)), after, worker.works, breaks)

    def _finish(self, worker: Worker, jobs: tuple[Job, ...], at: int, state: str) -> Iterator[Move]:
        """Script finish: it writes the terminal record and drops the job from its lane and from the worker's claims, in
        one step or, by a lesser protocol, in two."""
        job, cell = jobs[at], worker.cells[at]
        label = f"{{w}} ends {{{at}}} as {state}"
        refused = (
            (not worker.works and self.has(Rule.FINISH_FENCED))
            or (not cell.owner and self.has(Rule.FINISH_OWNED))
            or (job.final and self.has(Rule.FINISH_ONCE) and cell.phase != "between")
            or (job.state == "queued" and self.has(Rule.FINISH_ONCE))
        )
        if refused:
            yield Move(
                f"{label}: refused", _with(worker, at, cell._replace(owner=False, phase="", seq=0)), jobs, worker.works
            )
            return
        drop_first, drop_last = not self.has(Rule.DROP_NOT_FIRST), not self.has(Rule.DROP_NOT_LAST)
        half = cell.phase != "between" and (drop_first or drop_last)
        drops = not (half and drop_last) and not (cell.phase == "between" and drop_first)
        records = not (half and drop_first) and not (cell.phase == "between" and drop_last)
        breaks = self._broken_by_end(job, cell, state) if records else ""
        after, left = job, cell._replace(phase="between" if half else "ended")
        if records:
            after = after._replace(state=state, tokens=0, losses=0, suspect=False, cancel="")
        if drops:
            after, left = after._replace(entry=False), left._replace(claimed=False)
        what = label if drops and records else f"{label}: {'drops it' if drops else 'writes the record'}"
        yield Move(what, _with(worker, at, left), _put(jobs, at, after), worker.works, breaks)

    @staticmethod
    def _broken_by_end(job: Job, cell: Cell, state: str) -> str:
        if job.final or (job.cancel == "told" and state != "cancelled"):
            return "I2"
        return "I4" if cell.phase == "refused" or cell.seq != job.tokens else ""

    # --- what must hold ----------------------------------------------------------------------------------------------

    def broken(self, workers: tuple[Worker, ...], jobs: tuple[Job, ...]) -> str:
        """The invariant a state breaks by itself: a lost job (I1), or a suspect that is not alone (quarantine)."""
        for at, job in enumerate(jobs):
            if job.state == "queued" and not job.waits and not any(_will_hand_back(worker, at) for worker in workers):
                return "I1"
            if job.state == "running" and not any(_will_end(worker, at) for worker in workers):
                return "I1"
        for worker in workers:
            run = [job for job, cell in zip(jobs, worker.cells, strict=True) if cell.owner and cell.phase]
            if len(run) > 1 and any(job.state == "running" and job.losses == self.attempts - 1 for job in run):
                return "quarantine"
        return ""

    @staticmethod
    def broken_at_rest(workers: tuple[Worker, ...], jobs: tuple[Job, ...]) -> str:
        """The invariant broken by a state in which nothing more happens by itself."""
        if any(worker.status == "live" for worker in workers) and not all(job.final for job in jobs):
            return "I1"
        leaked = any(job.final and job.entry for job in jobs) or any(job.twice for job in jobs)
        claimed = any(cell.claimed for worker in workers for cell in worker.cells)
        return "I7" if leaked or claimed else ""


def weight(worker: Worker, jobs: tuple[Job, ...]) -> int:
    """Falls with every step of progress, so that without further faults every state comes to rest."""
    status = {"draining": 1_000, "crashed": 1_000, "zombie": 1_000}.get(worker.status, 0)
    phases = {"": 0, "claiming": 40, "running": 31, "unanswered": 32, "refused": 10, "between": 10, "ended": 1}
    total = status + sum(100 for job in jobs if job.state == "queued")
    for cell in worker.cells:
        total += phases[cell.phase] - 4 * cell.seq * (cell.phase in ("running", "unanswered"))
        total += 500 * bool(cell.late)
        total += 200 * (cell.claimed and (worker.status != "live" or not cell.phase))
    return total


def _will_end(worker: Worker, at: int) -> bool:
    """Whether this worker, or the reaper after it, will take the job further."""
    cell = worker.cells[at]
    if cell.phase == "between" and worker.works:
        return True
    return cell.claimed and cell.owner and (worker.works or worker.status == "crashed")


def _will_hand_back(worker: Worker, at: int) -> bool:
    """Whether this worker, or the reaper after it, finds a job whose claim was interrupted."""
    return worker.cells[at].claimed and (worker.works or worker.status == "crashed")


def _end(job: Job, state: str) -> Job:
    return Job(state, entry=False, waits=False, twice=job.twice)


def _put(jobs: tuple[Job, ...], at: int, job: Job) -> tuple[Job, ...]:
    return (*jobs[:at], job, *jobs[at + 1 :])


def _with(worker: Worker, at: int, cell: Cell) -> Worker:
    cells = (*worker.cells[:at], cell, *worker.cells[at + 1 :])
    if worker.status == "zombie" and not any(cell.phase for cell in cells):
        return _gone(worker)
    return worker._replace(cells=cells)


def _gone(worker: Worker) -> Worker:
    return Worker((NOTHING,) * len(worker.cells), "gone")
