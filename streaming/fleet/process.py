"""Process entry: what one process of Penstock reports of itself to the others."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT_TIMEOUT_S = 10
"""A process without a heartbeat for so long counts as gone."""

Role: TypeAlias = Literal["redis", "api", "worker", "scheduler", "offline"]


def without_host(name: str) -> str:
    """The part of a process's name that a tenant may see: `worker-1` of `worker-1@host`."""
    return name.partition("@")[0]


class Served(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one lane's jobs that a worker has ended since its start."""

    jobs: int = 0
    tokens: int = 0
    """Prompts and answers together."""
    failed: int = 0
    """Jobs of these that failed by a fault of the engine."""


class Cordoned(msgspec.Struct, frozen=True, array_like=True):
    """A cordoned worker, by its lease: it claims nothing more, finishes its jobs and is replaced."""

    worker: str
    reason: str


class Prospect(msgspec.Struct, frozen=True, array_like=True):
    """Expected wait of a job that is put into a lane now."""

    wait_s: float | None
    """Until it starts; None: no worker will start it."""
    each_s: float = 0.0
    """Added for each further job before it."""
    waiting: int = 0
    """Jobs that were in the lane when this was decided."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report that a process writes about itself every few seconds. Counters start at 0 when the process starts."""

    role: Role
    id: str
    """Name on its machine; processes of several machines may have the same one."""
    life: str
    """Random id, new at each start, which distinguishes processes of the same name."""
    pid: int
    host: str
    state: str
    """starting | ready | draining | drained (cordoned, done, and still there)"""
    since: float
    """Unix seconds of its start, by its machine's clock. For people only."""
    model: str = ""
    url: str = ""
    lease: str = ""
    """Under which a worker holds its jobs: new in each of its lives."""
    slots: int = 0
    running: int = 0
    """Texts in slots of a worker's engine; a job of several choices has several."""
    reserved: int = 0
    """Slots of a worker that lane batch may not fill."""
    waiting: int = 0
    """Texts that a worker's engine has and does not run yet."""
    kv_tokens: int = 0
    """Room of a worker's KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    steps: int = 0
    """Engine steps whose time is known, in all `step_s` seconds with `step_tokens` tokens."""
    step_s: float = 0.0
    step_tokens: int = 0
    tokens_per_s: float = 0.0
    """Tokens that a worker has written in the last seconds, of all its texts."""
    served: dict[str, Served] = {}
    """By lane."""
    phase: str = ""
    """What a worker that starts does now."""
    away: tuple[str, ...] = ()
    """The servers that a worker waits for, each with the reason; none while one of them is there."""
    away_s: float = 0.0
    """For how long they have been away."""
    shape: str = ""
    """Which of its model's pools a worker belongs to."""
    adapters: tuple[str, ...] = ()
    """Those that a worker's engine has loaded."""
    swaps: int = 0
    """How often it has loaded one for a request."""

    @property
    def name(self) -> str:
        """Name for people, everywhere: `worker-1@host`."""
        return f"{self.id}@{self.host}"

    @property
    def worker_id(self) -> str:
        """Names a worker in cordons and counters: its lease, or its life until it has one."""
        return self.lease or self.life
