"""The settings of the hand on the gate."""

from __future__ import annotations

from typing import Annotated

import msgspec

from streaming.plans import PoolKind


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [scheduler]."""

    tick_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    backlog_per_worker: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Waiting jobs that justify one more worker."""
    idle_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """Quiet time after which a worker beyond the minimum is given back."""
    lead_s: Annotated[float, msgspec.Meta(ge=0.5, le=8)] = 5.0
    """A leading scheduler silent for so long is replaced by another."""
    pool: PoolKind = "local"
    """Who makes the plans come true. local: each machine's `penstock up`; kubernetes: Deployments; dry-run: nobody."""


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [kubernetes]: where the pods of pool "kubernetes" are."""

    namespace: str = ""
    """Empty: the scheduler's own, or that of the context KUBECONFIG names."""
    deployment: str = "penstock-worker-{model}"
    """Name of a model's Deployment; in {model}, what such names may not hold is a dash."""
