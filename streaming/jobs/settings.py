"""Tenant settings ([quotas], [tenants]): what one tenant may keep in the store, and its share of a lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

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
