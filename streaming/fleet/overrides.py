"""Manual overrides of the scheduler: an operator fixes a model's number of workers, or pauses its scaling.

A model has at most one override, until it is ended or expires. All times are Redis time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from streaming.fleet.entries import entry
from streaming.fleet.plans import Action
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated


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
    """Overrides in the store. Every method raises Unavailable."""

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
        """Read the current overrides by model. A malformed one counts as a pause, so that the scheduler does not act
        against an operator's decision."""
        models = tuple(models)
        if not models:
            return {}
        with translated():
            values = await self._client.redis.mget([fleet_key("override", model) for model in models])
        return {
            model: entry(f"the override of {model}", value, Override) or Override(by="unreadable")
            for model, value in zip(models, values, strict=True)
            if value is not None
        }

    async def _write(self, model: str, record: bytes, hold_ms: int | str, action: Action) -> bool:
        return bool(
            await self._client.call("override", FLEET_SLOT, model, record, hold_ms, msgspec.json.encode(action))
        )
