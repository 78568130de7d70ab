"""Tenant settings ([quotas], [tenants]): what one tenant may keep in the store, and its share of a lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.config import ConfigError, Positive
from streaming.ids import check_tenant


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section [quotas], and `quotas` of a row of [keys.<name>]: what one tenant may keep. None: no limit."""

    jobs: Positive | None = None
    """Jobs that wait, run or are kept, each for [redis] retention_s from its acceptance."""
    job_bytes: Positive | None = None
    """Bytes of their requests, and of conversations."""
    result_bytes: Positive | None = None
    """Bytes of their results. At the limit new jobs are refused; an accepted job keeps its result."""
    file_bytes: Positive | None = None
    """Bytes of files, outputs of batches among them. Each counts as at least 4,096 bytes, and until the last batch that
    reads it has ended. At the limit uploads and batches are refused; an accepted batch keeps its output."""

    store_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Share of the memory that jobs may use which one tenant may take: requests, conversations, results, and what
    unfinished jobs may still write; for lines of batches an eighth less. None: a half, if the keys have several
    tenants."""

    def over(self, others: QuotaSettings) -> QuotaSettings:
        """These quotas, with those of `others` for each that is not set."""
        own = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(others, **own)

    @property
    def bounds_jobs(self) -> bool:
        """Whether any quota limits jobs."""
        return not (self.jobs is None and self.job_bytes is None and self.result_bytes is None)


UNLIMITED = QuotaSettings()


Amount = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Money = Annotated[float, msgspec.Meta(gt=0, le=1e15)]


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`limits` of a row of [keys.<name>] or [tenants.<name>]: how fast and how much one key or tenant may use. A job
    reserves its prompt and its longest answer, and gives back at its end what it did not use. None: no limit."""

    requests_per_minute: Amount | None = None
    """A minute's worth may come at once."""
    tokens_per_minute: Amount | None = None
    """Of prompts and answers, in the same way."""
    concurrent: Amount | None = None
    """Requests whose clients wait for the answer."""
    queued: Amount | None = None
    """Unfinished jobs, waiting or running."""
    tokens_per_day: Amount | None = None
    """By UTC; a job counts when it was accepted."""
    tokens_per_month: Amount | None = None
    cost_per_day: Money | None = None
    """In the unit of `price_input` and `price_output` of [models.<name>]; a model without a price costs nothing."""
    cost_per_month: Money | None = None


class Limits:
    """What the settings say of the limits of tenants and of the prices of models; `put` counts by them.

    Args:
        tenants: Limits by tenant.
        prices: By model, the cost of a million tokens of a prompt and of an answer.
    """

    def __init__(self, tenants: Mapping[str, LimitSettings], prices: Mapping[str, tuple[float, float]]) -> None:
        self._tenants, self._prices = tenants, prices

    def of(self, tenant: str, model: str, key: str, of_key: LimitSettings | None) -> dict[str, Any]:
        """What `put` is told: the limits of the tenant and of the request's key, by its name, with prices of one token;
        nothing without any."""
        found = [(f"key:{key}", of_key)] if of_key is not None else []
        if (own := self._tenants.get(tenant)) is not None:
            found.append((f"tenant:{tenant}", own))
        prices = self._prices.get(model, (0.0, 0.0))
        return {"limits": found, "prices": [price / 1e6 for price in prices]} if found else {}

    def of_tenant(self, tenant: str) -> LimitSettings | None:
        """The limits of all keys of a tenant together, if it has any."""
        return self._tenants.get(tenant)


NO_LIMITS = Limits({}, {})
SEVERAL = QuotaSettings(store_share=0.5)
"""Where several tenants have keys: none of them can fill the store alone."""

DEFAULT_WEIGHT = 1.0
NO_WEIGHTS: Mapping[str, float] = {}
"""Of tenants that all have the default."""


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of [tenants.<name>]: how Penstock treats a tenant's jobs."""

    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = DEFAULT_WEIGHT
    """Its share of a lane in which jobs of several tenants wait: twice the weight gets twice the work."""
    content: tuple[str, ...] | None = None
    """The rules of [content.<name>] for its requests and answers; None: those with `default`."""
    limits: LimitSettings | None = None
    """How fast and how much all its keys together may use."""
    aliases: dict[str, str] = {}
    """Further names of models for its requests, before those of [aliases]."""


def content_of(tenants: Mapping[str, TenantSettings]) -> dict[str, tuple[str, ...] | None]:
    """The content rules of each tenant that has a row, by name."""
    return {name: tenant.content for name, tenant in tenants.items()}


TENANT_CLASSES = ("low", "normal", "high")
"""Of tenants, by their weight, as metrics name them: a tenant is no label."""


def class_of(weight: float) -> str:
    """The class of a tenant: its weight is below, at or above the default."""
    return TENANT_CLASSES[1 + (weight > DEFAULT_WEIGHT) - (weight < DEFAULT_WEIGHT)]


def weights_of(tenants: Mapping[str, TenantSettings]) -> dict[str, float]:
    """The weight of each tenant that has a row; others have DEFAULT_WEIGHT. Raises ConfigError."""
    for name in tenants:
        try:
            check_tenant("the name", name)
        except ValueError as error:
            raise ConfigError(f"tenants.{name}", str(error)) from None
    return {name: float(tenant.weight) for name, tenant in tenants.items()}
