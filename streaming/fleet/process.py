"""Process entry: what one process of Penstock reports of itself to the others."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["redis", "api", "worker", "scheduler", "offline"]


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has ended of one lane since its start."""

    jobs: int = 0
    tokens: int = 0
    """Prompts and answers together."""
    failed: int = 0
    """Jobs among them that failed by the engine's fault."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process as it says of itself, every few seconds. What counts up does so from its start."""

    role: Role
    id: str
    """Its name for people; several machines may use the same one."""
    life: str
    """Random, and new with each start: what tells processes of the same name apart."""
    pid: int
    host: str
    state: str
    """starting | ready | draining | drained (cordoned, done, and still there)"""
    since: float
    """Unix seconds of its start: a scheduler's in Redis time, others' by their machine's clock. For people only."""
    model: str = ""
    url: str = ""
    lease: str = ""
    """Under which a worker holds its jobs: new in each of its lives."""
    slots: int = 0
    running: int = 0
    reserved: int = 0
    """Slots of a worker that lane batch may not fill."""
    waiting: int = 0
    """Jobs a worker holds that wait inside its engine."""
    kv_tokens: int = 0
    """Room of a worker's KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    steps: int = 0
    """Engine steps whose time is known, in all `step_s` seconds with `step_tokens` tokens."""
    step_s: float = 0.0
    step_tokens: int = 0
    served: dict[str, Served] = {}
    """By lane."""
    shape: str = ""
    """Which of its model's pools a worker belongs to."""
