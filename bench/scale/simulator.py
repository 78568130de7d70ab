"""Simulated lanes and workers, event by event: what the scheduler steers.

All requests in a worker's batch get a token each step, and a step takes longer the fuller the batch is, so a batch has
one common clock that counts steps. A prompt holds that clock up while it is read. Workers take jobs as real ones do:
one that has room is woken, the highest lane goes first, and nothing that runs is ever stopped.
The cache is counted, but only slots limit what a worker takes.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from planner.simulator.trace import TraceRow
from scheduler.policy.snapshot import LaneLoad, Snapshot
from streaming.fleet.process import Process, Served

LANES = ("interactive", "standard", "batch")
REPORT_INTERVAL_S = 2.0
"""A worker says how it is doing this often; in between the scheduler knows what it said last."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The time model of one worker, and what it takes to get one. Seconds; `each_s` per request of the batch."""

    slots: int = 8
    step_s: float = 0.030
    each_s: float = 0.001
    prompt_s: float = 1 / 8000
    """Per prompt token."""
    start_s: float = 60.0
    """From order to ready, in the mean; evenly spread over a fifth less and a fifth more."""
    kv_tokens: int = 16_384

    def step(self, batch: int) -> float:
        """Seconds of one step."""
        return self.step_s + self.each_s * batch


@dataclass(slots=True)
class Waiting:
    """A job in a lane."""

    at: float
    request: TraceRow


@dataclass(slots=True)
class SimWorker:
    """One worker. `clock` counts steps of its batch; `at` is when it was last brought up to date."""

    id: str
    engine: EngineModel
    ordered: float
    shape: str = ""
    state: str = "starting"
    slow: float = 1.0
    clock: float = 0.0
    at: float = 0.0
    held_until: float = 0.0
    """The batch stands still until then: prompts are read."""
    ends: list[tuple[float, int, float, TraceRow]] = field(default_factory=list)
    """(clock at its end, number, time of its begin, request) of all that run; a heap."""
    version: int = 0
    step_s: float = 0.0
    step_tokens: float = 0.0
    tokens_begun: float = 0.0
    """Prompt tokens of the running requests, less the clock at which each began."""
    served: dict[str, Served] = field(default_factory=dict)
    said: Process | None = None
    said_at: float = 0.0

    @property
    def running(self) -> int:
        return len(self.ends)

    @property
    def room(self) -> int:
        return self.engine.slots - len(self.ends) if self.state == "ready" else 0

    @property
    def kv_used(self) -> float:
        """Tokens in its cache."""
        return self.tokens_begun + self.clock * len(self.ends)

    def advance(self, now: float) -> None:
        """Bring the clock to `now`."""
        batch = len(self.ends)
        if batch:
            stepping = now - max(self.at, min(self.held_until, now))
            if stepping > 0:
                steps = stepping / (self.engine.step(batch) * self.slow)
                self.clock += steps
                self.step_tokens += steps * batch
            self.step_s += now - self.at
        self.at = now

    def begin(self, request: TraceRow, now: float, number: int) -> None:
        """Take a request into the batch."""
        self.advance(now)
        self.held_until = max(now, self.held_until) + request.prompt * self.engine.prompt_s * self.slow
        heapq.heappush(self.ends, (self.clock + request.answer, number, now, request))
        self.tokens_begun += request.prompt - self.clock

    def next_end(self) -> float:
        """When the next request ends if nothing else happens."""
        left = max(0.0, self.ends[0][0] - self.clock)
        return max(self.at, self.held_until) + left * self.engine.step(len(self.ends)) * self.slow

    def end(self, now: float) -> tuple[TraceRow, float]:
        """Let the request whose end has come go; returns it and when it was begun."""
        self.advance(now)
        at, _, begun, request = heapq.heappop(self.ends)
        self.clock = max(self.clock, at)
        self.tokens_begun -= request.prompt - (at - request.answer)
        past = self.served.get(request.lane, Served())
        self.served[request.lane] = Served(past.jobs + 1, past.tokens + request.prompt + request.answer)
        return request, begun

    def seen(self, now: float) -> Process:
        """As the scheduler sees it: what it said last."""
        if self.said is None or self.said.state != self.state or now - self.said_at >= REPORT_INTERVAL_S:
            self.advance(now)
            self.said, self.said_at = self._says(), now
        return self.said

    def _says(self) -> Process:
        return a_report(
            self.id,
            self.state,
            slots=self.engine.slots,
            running=len(self.ends),
            kv_tokens=self.engine.kv_tokens,
            kv_used=int(self.kv_used),
            served=dict(self.served),
            steps=int(self.clock),
            step_s=self.step_s,
            step_tokens=int(self.step_tokens),
            shape=self.shape,
        )


def a_report(name: str, state: str = "ready", **load: Any) -> Process:
    """A worker's report with this load."""
    return Process(role="worker", id=name, life=name, pid=0, host="", state=state, since=0.0, **load)


Heard: TypeAlias = Callable[[TraceRow, float], None]
"""Called with a request and the seconds it waited, or was held."""
Place: TypeAlias = Literal["freshest", "freest"]
"""Who is woken for a new job: whoever said last that it has room, or whoever is freest."""
Action: TypeAlias = Callable[[float], None]


class PoolSimulator:
    """Lanes and workers on a simulated clock. `on_begun` and `on_ended` hear of every request."""

    def __init__(
        self,
        engine: EngineModel,
        seed: int = 0,
        *,
        place: Place = "freshest",
        on_begun: Heard | None = None,
        on_ended: Heard | None = None,
    ) -> None:
        self.now = 0.0
        self.engine = engine
        self.lanes: dict[str, deque[Waiting]] = {lane: deque() for lane in LANES}
        self.added = dict.fromkeys(LANES, 0)
        self.running = dict.fromkeys(LANES, 0)
        self.workers: dict[str, SimWorker] = {}
        """Those that are there, by age."""
        self.worker_s = 0.0
        """Of workers that are gone, from order to end."""
        self._chance = random.Random(seed)  # noqa: S311 - a simulation, not a secret
        self.dispatch = ""
        """Only workers of this shape take jobs; "": all do."""
        self._place, self._on_begun, self._on_ended = place, on_begun, on_ended
        self._events: list[tuple[float, int, Action]] = []
        self._number = 0
        self._roomy: dict[str, SimWorker] = {}
        """Workers with room; the last is the one that said so last."""

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Action) -> None:
        """Do this then."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, action))

    def every(self, seconds: float, action: Action) -> None:
        """Do this every so many seconds, from now on."""

        def again(now: float) -> None:
            action(now)
            self.at(now + seconds, again)

        self.at(self.now, again)

    def feed(self, requests: Iterable[TraceRow]) -> None:
        """Put each request when its time comes; they are asked for one by one."""
        rest = iter(requests)

        def come(request: TraceRow) -> Action:
            def put(_: float) -> None:
                self.put(request)
                if (following := next(rest, None)) is not None:
                    self.at(following.at, come(following))

            return put

        if (first := next(rest, None)) is not None:
            self.at(first.at, come(first))

    def run(self, until: float) -> None:
        """Let everything happen up to then."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heapq.heappop(events)
            action(self.now)
        self.now = until

    # --- lanes -----------------------------------------------------------------------------------------------------

    def put(self, request: TraceRow) -> None:
        """A request arrives."""
        self.added[request.lane] += 1
        self.lanes[request.lane].append(Waiting(self.now, request))
        if self._roomy:
            self._claim(self._chosen())

    def _chosen(self) -> SimWorker:
        """Who is woken."""
        match self._place:
            case "freshest":
                return next(reversed(self._roomy.values()))
            case "freest":
                return min(self._roomy.values(), key=lambda worker: worker.running)

    def _next(self) -> Waiting | None:
        for lane in self.lanes.values():
            if lane:
                return lane.popleft()
        return None

    def _claim(self, worker: SimWorker) -> None:
        """Take what fits, highest lane first."""
        begun = False
        takes = not self.dispatch or worker.shape == self.dispatch
        while takes and worker.room and (waiting := self._next()):
            self._number += 1
            worker.begin(waiting.request, self.now, self._number)
            self.running[waiting.request.lane] += 1
            begun = True
            if self._on_begun:
                self._on_begun(waiting.request, self.now - waiting.at)
        self._roomy.pop(worker.id, None)
        if takes and worker.room:
            self._roomy[worker.id] = worker
        if begun:
            self._expect(worker)

    def _expect(self, worker: SimWorker) -> None:
        """Be there when the next request ends."""
        worker.version += 1
        version = worker.version

        def ends(now: float) -> None:
            if worker.version == version:
                self._end(worker, now)

        if worker.ends:
            self.at(worker.next_end(), ends)

    def _end(self, worker: SimWorker, now: float) -> None:
        request, begun = worker.end(now)
        self.running[request.lane] -= 1
        if self._on_ended:
            self._on_ended(request, now - begun)
        self._claim(worker)
        if worker.state == "draining" and not worker.ends:
            self._leave(worker)
        else:
            self._expect(worker)

    # --- workers ---------------------------------------------------------------------------------------------------

    def order(
        self, count: int = 1, *, engine: EngineModel | None = None, shape: str = "", at_once: bool = False
    ) -> None:
        """Start workers; `at_once`: they are ready now."""
        engine = engine or self.engine
        for _ in range(count):
            self._number += 1
            worker = SimWorker(f"w{self._number}", engine, self.now, shape, at=self.now)
            self.workers[worker.id] = worker
            start_s = 0.0 if at_once else engine.start_s * self._chance.uniform(0.8, 1.2)
            self.at(self.now + start_s, partial(self._ready, worker))

    def _ready(self, worker: SimWorker, _: float) -> None:
        if worker.state == "starting" and worker.id in self.workers:
            worker.state, worker.at = "ready", self.now
            self._claim(worker)

    def slow_down(self, worker: SimWorker, factor: float) -> None:
        """From now on it is so many times slower than its engine."""
        worker.advance(self.now)
        worker.slow = factor
        self._expect(worker)

    def drain(self, worker: SimWorker) -> None:
        """Take nothing more, and go when what runs has ended."""
        worker.state = "draining"
        self._roomy.pop(worker.id, None)
        if not worker.ends:
            self._leave(worker)

    def _leave(self, worker: SimWorker) -> None:
        worker.version += 1
        self.worker_s += self.now - worker.ordered
        del self.workers[worker.id]

    def send_to(self, shape: str) -> None:
        """New jobs go to workers of this shape from now on."""
        if shape != self.dispatch:
            self.dispatch = shape
            self._roomy.clear()
            for worker in list(self.workers.values()):
                self._claim(worker)

    def resize(self, want: int, cordoned: Iterable[str] = ()) -> None:
        """Have so many workers that are meant to stay: order some, or let the newest go, starting ones first."""
        for name in cordoned:
            if (worker := self.workers.get(name)) and worker.state == "ready":
                self.drain(worker)
        staying = [worker for worker in self.workers.values() if worker.state != "draining"]
        if len(staying) < want:
            self.order(want - len(staying))
        surplus = sorted(staying, key=lambda each: (each.state == "starting", each.ordered))[want:]
        for worker in reversed(surplus):
            self.drain(worker)

    def total_worker_s(self) -> float:
        """Worker-seconds so far, from order to end."""
        return self.worker_s + sum(self.now - worker.ordered for worker in self.workers.values())

    # --- seen from outside -----------------------------------------------------------------------------------------

    def snapshot(self, model: str = "m") -> Snapshot:
        """What the scheduler sees now."""
        lanes = tuple(
            LaneLoad(name, len(lane), self.running[name], self.now - lane[0].at if lane else 0.0, self.added[name])
            for name, lane in self.lanes.items()
        )
        return Snapshot(model, lanes, tuple(worker.seen(self.now) for worker in self.workers.values()))
