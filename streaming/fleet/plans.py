"""Scaling plans, overrides and the election of the leading scheduler, which publishes plans that the pools carry out.

Both sides are fenced by the leader's epoch. The store takes plans only from the current leader, and a pool records each
action under its plan's epoch before it acts: if another leader was elected since, the store refuses and the pool does
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from streaming.fleet.process import Cordoned, Process, Prospect
from streaming.fleet.settings import ModelSettings
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser, Query, messages, news

log = logging.getLogger(__name__)

T = TypeVar("T")


def entry(name: str, data: bytes | str, kind: type[T]) -> T | None:
    """Decode one entry; logs and returns None if it is malformed, so that callers continue with the others."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read as %s and is left out: %s", name, kind.__name__, error)
        return None


def hash_of(name: str, kind: type[T]) -> Query[dict[str, T]]:
    """Read a hash of the fleet's slot, without malformed fields."""

    return Query([("HGETALL", FLEET_SLOT, (fleet_key(name),))], lambda answers: entries(answers[0], kind))


def decoded(raw: Sequence[bytes], kind: type[T]) -> dict[str, T | None]:
    """Decode names and values that alternate; None in place of a malformed value."""
    names = [name.decode(errors="replace") for name in raw[::2]]
    return {name: entry(name, data, kind) for name, data in zip(names, raw[1::2], strict=True)}


def entries(raw: Sequence[bytes], kind: type[T]) -> dict[str, T]:
    """The same without malformed values."""
    return {name: value for name, value in decoded(raw, kind).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Lead:
    """The current leader and its epoch. `holder` is "" while there is none; a lost one counts for up to
    `lead_s`."""

    holder: str
    epoch: int


def claim_lead(holder: str, keep_ms: int) -> Query[Lead]:
    """Claim or renew the lead for `keep_ms`; 0 gives it up. The answer is the leader after that.

    A leader that was suspended does not know that another was elected meanwhile. So the store checks the epoch (a
    fencing token) of everything a leader publishes and of everything a pool does for it.
    """
    return Query([("lead", FLEET_SLOT, (holder, keep_ms))], _lead)


def _lead(answers: list[Any]) -> Lead:
    ((epoch, holder),) = answers
    known = isinstance(epoch, int) or (epoch or b"").isdigit()
    return Lead((holder or b"").decode(errors="replace"), int(epoch) if known else 0)


LEADER = Query([("MGET", FLEET_SLOT, (fleet_key("leader_epoch"), fleet_key("leader")))], _lead)
"""The current leader."""


SHARE_TIMEOUT_S = 10
"""A machine that does not ask for its share of a pool for so long counts as gone."""

PoolKind: TypeAlias = Literal["local", "kubernetes", "dry-run"]
"""Who executes a plan: the supervisors of each machine, a cluster's controllers, or nobody."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many workers a model should have, and why."""

    model: str
    want: int
    """Without cordoned workers; of all shapes together."""
    reason: str
    epoch: int = 0
    """Epoch of the leader that published it."""
    at_ms: int = 0
    """Redis time of the observation that it was decided on."""
    pool: PoolKind = "local"
    cordon: tuple[Cordoned, ...] = ()
    leaving: tuple[str, ...] = ()
    """Pods, in pools that have them, that were chosen to be removed and still exist."""
    lanes: dict[str, Prospect] = {}
    wake_s: float = 0.0
    """Until the first worker is ready; 0 if one is."""
    cold_start_s: float = 0.0
    """From ordering a worker until it is ready."""
    shapes: dict[str, int] = {}
    """Workers wanted of each shape, where the model has several."""
    shape: str = ""
    """The shape that suits the current load."""
    takes: tuple[str, ...] = ()
    """The shapes that take new jobs: that one, as soon as it has workers."""

    @property
    def pools(self) -> dict[str, int]:
        """Workers wanted of each of its pools; a model of one pool is under ""."""
        return self.shapes or {"": self.want}


ActionKind: TypeAlias = Literal[
    "lead", "up", "down", "switch", "cordon", "start", "drain", "scale", "remove", "set", "pause", "resume"
]
"""Kinds of decisions of a leader or an operator, and of actions of a pool."""


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision about a pool, or an action on it."""

    model: str
    kind: ActionKind
    reason: str
    by: str
    """The scheduler, the machine, or the API key."""
    want: int | None = None
    was: int | None = None
    worker: str = ""
    shape: str = ""
    """Shape of the pool, if the model has several."""


@dataclass(frozen=True, slots=True)
class Noted:
    """An action as it was recorded."""

    action: Action
    at_ms: int
    epoch: int


PLANS = hash_of("plan", Plan)
"""The plans by model."""


class Plans(ClientUser):
    """Plans in the store. Every method raises Unavailable."""

    async def publish(
        self,
        lead: Lead,
        plans: Iterable[Plan],
        actions: Iterable[Action] = (),
        cold: Mapping[str, float] | None = None,
        holds: Mapping[str, int] | None = None,
    ) -> bool:
        """Store the leader's decisions and notify workers and pools, in one step; notifies cordoned workers each time.

        Args:
            cold: Cold starts in seconds, by model or `pool_name`.
            holds: Milliseconds for which a worker, by its lease, shall leave new jobs to others.

        Returns: False if another leads now; then nothing was done.
        """
        rows: list[str | bytes] = []
        for plan in plans:
            rows += ["plan", plan.model, msgspec.json.encode(plan)]
            for cordoned in plan.cordon if plan.pool != "dry-run" else ():
                rows += ["cordon", cordoned.worker, cordoned.reason]
        for model, seconds in (cold or {}).items():
            rows += ["cold", model, f"{seconds:.3f}"]
        for worker, hold_ms in (holds or {}).items():
            rows += ["hold", worker, str(hold_ms)]
        for action in actions:
            rows += ["act", action.model, msgspec.json.encode(action)]
        return bool(await self._client.call("plan", FLEET_SLOT, lead.holder, lead.epoch, *rows))

    async def act(self, epoch: int, action: Action) -> bool:
        """Record an action before it is done for a plan of this epoch. False: another leads now, so do nothing."""
        return bool(await self._client.call("act", FLEET_SLOT, epoch, action.model, msgspec.json.encode(action)))

    async def share(self, epoch: int, pool: str, machine: str, has: int, want: int) -> int | None:
        """Return how many of the `want` workers of a pool this machine shall have. None: another leads now, so do
        nothing. Call it at least every SHARE_TIMEOUT_S seconds."""
        args = (epoch, pool, machine, has, want, 1000 * SHARE_TIMEOUT_S)
        share = await self._client.call("share", FLEET_SLOT, *args)
        return None if share < 0 else int(share)

    async def read(self) -> dict[str, Plan]:
        """Read the plans by model."""
        return await self._client.ask(PLANS)

    async def cold_starts(self) -> dict[str, float]:
        """Read the last measured cold starts in seconds, by `pool_name`."""
        return await self._client.ask(hash_of("cold", float))

    async def actions(self, count: int) -> list[Noted]:
        """Read the last recorded actions, newest first."""
        rows = await self._client.call("XREVRANGE", FLEET_SLOT, fleet_key("actions"), "+", "-", "COUNT", count)
        return [noted for name, fields in rows if (noted := _noted(name, fields))]

    def news(self, every_s: float) -> AsyncGenerator[None]:
        """Yield when plans should be read: at once, after each change, and at least every `every_s`. Never ends."""
        return news(self._client, "pools", "plan", every_s)

    async def woken(self) -> AsyncIterator[None]:
        """Yield when a scheduler should run at once, or may have missed such a wake-up. Never ends."""
        async for _ in messages(self._client, "scheduler", "wake"):
            yield


def pool_name(model: str, shape: str) -> str:
    """Name of one of a model's pools; no model's name has a #."""
    return f"{model}#{shape}" if shape else model


def _noted(name: bytes, words: Sequence[bytes]) -> Noted | None:
    """Decode an action; None if it is malformed."""
    fields = dict(zip(words[::2], words[1::2], strict=True))
    action, epoch = entry("an action", fields.get(b"action", b""), Action), fields.get(b"epoch", b"")
    return Noted(action, int(name.split(b"-")[0]), int(epoch)) if action and epoch.isdigit() else None


class Override(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fixed number of workers; without `want`, scaling is paused."""

    want: int | None = None
    by: str
    """The API key's name."""
    at_ms: int = 0
    until_ms: int | None = None
    """None: until it is ended."""

    @property
    def paused(self) -> bool:
        return self.want is None


class Overrides(ClientUser):
    """Overrides in the store. Every method raises Unavailable.

    A model has at most one override, until it is ended or expires. All times are Redis time.
    """

    async def put(self, model: str, want: int | None, by: str, hold_ms: int | None = None) -> Override:
        """Write a model's override, in place of an earlier one: `want` workers, or a pause of scaling if that is None.

        It expires after `hold_ms`; without `hold_ms`, it lasts until `end`.
        """
        now = await self._client.now_ms()
        override = Override(want=want, by=by, at_ms=now, until_ms=None if hold_ms is None else now + hold_ms)
        action = Action(model=model, kind="pause" if want is None else "set", reason="by hand", by=by, want=want)
        await self._write(model, msgspec.json.encode(override), "" if hold_ms is None else hold_ms, action)
        return override

    async def end(self, model: str, by: str) -> bool:
        """End a model's override; False if there was none."""
        return await self._write(model, b"", "", Action(model=model, kind="resume", reason="by hand", by=by))

    async def of(self, models: Iterable[str]) -> dict[str, Override]:
        """Read the current overrides by model."""
        return await self._client.ask(overrides_of(models))

    async def _write(self, model: str, record: bytes, hold_ms: int | str, action: Action) -> bool:
        return bool(
            await self._client.call("override", FLEET_SLOT, model, record, hold_ms, msgspec.json.encode(action))
        )


def overrides_of(models: Iterable[str]) -> Query[dict[str, Override]]:
    """Read the current overrides by model. A malformed one counts as a pause, so that the scheduler does not act
    against an operator's decision."""
    keys = {model: fleet_key("override", model) for model in models}

    def parse(answers: list[Any]) -> dict[str, Override]:
        return {
            model: entry(f"the override of {model}", value, Override) or Override(by="unreadable")
            for model, value in zip(keys, *answers, strict=True)
            if value is not None
        }

    return Query([("MGET", FLEET_SLOT, tuple(keys.values()))] if keys else (), parse)


class Stall(NamedTuple):
    """Why jobs of a model wait for ever, and what to do. It names no operator, because clients read the cause."""

    cause: str
    fix: str


def stall_of(
    model: str,
    settings: ModelSettings,
    workers: Iterable[Process],
    plan: Plan | None,
    override: Override | None,
    *,
    lead: Lead,
) -> Stall | None:
    """Return None while a worker takes jobs of the model, is starting, or may be started by the scheduler.

    Args:
        workers: of all models.
    """
    cordoned = {each.worker for each in plan.cordon} if plan is not None else set()
    own = [each for each in workers if each.model == model and each.worker_id not in cordoned]
    if any(each.state in ("ready", "starting") for each in own):
        return None
    cause, fix = "", f"penstock scale resume {model}"
    if override is not None and override.want == 0 == settings.least_wanted:
        cause = "an operator has set its number of workers to 0"
    elif override is not None and override.paused and not (plan and plan.want):
        cause = "an operator has paused its scaling while it has no worker"
    elif not settings.most_wanted:
        cause = "the settings start no worker of it (penstock up --workers 0)"
        fix = "start again with more --workers, or start a worker on another machine"
    elif not lead.holder:
        cause = "no scheduler leads, so none is started"
        fix = "start a scheduler, or a worker: penstock up --workers 1"
    elif plan is not None and plan.pool == "dry-run":
        cause = "the scheduler only publishes its plans (scheduler.pool is dry-run)"
        fix = "start a worker, or set scheduler.pool to local"
    return Stall(cause, fix) if cause else None
