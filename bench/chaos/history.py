"""The record of what clients saw: one line of JSON per event, in the order they happened.

Nothing in it is the server's own word about itself; the checker judges from this alone.

| event    | fields                                          | meaning                                              |
|----------|-------------------------------------------------|------------------------------------------------------|
| ask      | req, prompt, tokens, may, key, reads, tenant, limits | a client begins; `may`: final states it may meet; `limits`: its deadlines, in ms |
| accepted | req, job, status, ms                            | a 2xx with a job id                                  |
| refused  | req, status, code, ms, retry_after              | an answer to a request that is no 2xx                |
| answered | what, status, code, retry_after                 | an answer to anything else that is no 2xx            |
| error    | req, code                                       | an error in a stream that is no documented one       |
| unknown  | req or job, why                                 | no answer: nobody can say whether it was accepted; `job`: of a cancel |
| token    | req, text, id                                   | text shown; the id of its delta, "" in a chat stream |
| event    | req, name, id                                   | an event of a job's log that is no delta             |
| cut      | req, why                                        | the connection ended before the end was told         |
| resume   | req, after                                      | reading goes on behind this event id, or anew        |
| reset    | req, code                                       | stream.reset: what was shown no longer counts        |
| end      | req, state, code, usage, finish                 | a terminal frame or answer; `usage`: tokens of prompt and answer that it counts, or none; `finish`: its finish reasons |
| gave_up  | req, why                                        | the client's patience was over, before an answer or before the end |
| left     | req                                             | the client went away on purpose                      |
| cancel   | job, status                                     | a cancel was answered with this state of the job     |
| final    | job, status, state, code, text, finish, usage, attempts, replay, before, ends, log | read afterwards through the public API; `before`: what came before each stream.reset; `log`: name and id of each event |
| quiet    | what, number                                    | what was still held after everything had ended       |
| crossed  | job, status, path                               | another tenant's key opened it                       |
| fault    | trial, what                                     | injected now                                         |
| missed   | trial, why                                      | that fault did not bite: the trial does not count    |
| rollback | since                                           | the store has now forgotten what came since then     |
"""  # noqa: E501 - a table

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from bench.chaos import oracle

Event: TypeAlias = dict[str, Any]


class ClientHistory:
    """Events in memory, and line by line in a file. Times are monotonic seconds since the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._began = time.monotonic()
        self._file = path.open("ab")

    def add(self, kind: str, **fields: Any) -> None:
        """One event, now. Clients of a row that broke off may go on while it is judged: that is left out."""
        if self._file.closed:
            return
        event = {"t": round(self.now(), 5), "event": kind, **fields}
        self.events.append(event)
        self._file.write(msgspec.json.encode(event) + b"\n")

    def now(self) -> float:
        """The time an event would have that is added now."""
        return time.monotonic() - self._began

    def close(self) -> None:
        """Flush, and add no more."""
        self._file.close()


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """Those of these kinds."""
    return [event for event in events if event["event"] in kinds]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    kind: str
    who: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.who}): {self.detail}"


@dataclass(slots=True)
class Life:
    """Everything that happened to one request, as its client saw it."""

    ask: Event
    job: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return oracle.chat(self.ask["prompt"])

    @property
    def name(self) -> str:
        return f"request {self.ask['req']}, {self.job or 'never accepted'}"

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]

    def first(self, kind: str) -> float:
        """When an event of this kind came first; infinity if none did."""
        return next((event["t"] for event in self.events if event["event"] == kind), float("inf"))


@dataclass(frozen=True, slots=True)
class Losses:
    """When the store forgot, and what it may have forgotten: everything between the two times of each loss."""

    spans: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Losses:
        return cls(tuple((event["since"], event["t"]) for event in of_kind(events, "rollback")))

    def between(self, after: float, before: float) -> int:
        """How often the store forgot something while `after` to `before` passed."""
        return sum(since <= before and after <= until for since, until in self.spans)

    def hold(self, moment: float) -> bool:
        """Whether what was written at this moment may be forgotten."""
        return any(since <= moment <= until for since, until in self.spans)


def lives_of(events: Iterable[Event]) -> dict[int, Life]:
    """Requests by number."""
    lives: dict[int, Life] = {}
    for event in events:
        if event["event"] == "ask":
            lives[event["req"]] = Life(event)
        elif "req" in event:
            life = lives[event["req"]]
            life.events.append(event)
            if event["event"] == "accepted":
                life.job = life.job or event["job"]
    return lives


def stalls_ms(events: Sequence[Event]) -> list[float]:
    """For each fault and each reader that had a token before it and one after it: the longest gap between two tokens
    that reaches beyond the fault and begins before the next one."""
    faults = [event["t"] for event in of_kind(events, "fault")]
    found = []
    for life in lives_of(events).values():
        times = [event["t"] for event in life.of("token")]
        for fault, following in zip(faults, [*faults[1:], float("inf")], strict=False):
            if times and times[0] <= fault < times[-1]:
                found.append(_longest(times, fault, following))
    return sorted(found)


def _longest(times: Sequence[float], fault: float, following: float) -> float:
    gaps = itertools.pairwise(times)
    return max((1000 * (after - before) for before, after in gaps if after > fault and before < following), default=0.0)
