"""Settings of the scheduler: sections [scheduler] and [kubernetes], and a model's shapes with their thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

import msgspec

from penstock.config import ConfigError
from scheduler.policy.snapshot import Shape, calibrated
from streaming.fleet.plans import PoolKind, pool_name
from streaming.fleet.settings import ModelSettings

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [scheduler]."""

    tick_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Seconds between two decisions."""
    interactive_s: Seconds = 2.0
    """Queue-time target: how long an interactive job may wait before it is begun."""
    standard_s: Seconds = 30.0
    """The same for standard jobs."""
    batch_s: Seconds = 3600.0
    """The same for batch jobs."""
    cover: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.99
    """Share of the last hours' bursts, by jobs, for which workers are kept ready."""
    idle_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How long fewer workers must have been enough before a pool shrinks; at least five cold starts."""
    sleep_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    """How long a model with min_workers 0 must have had no job before its last worker stops."""
    cold_start_s: Seconds = 10.0
    """Assumed time from the decision to add a worker until it is ready; used until it has been measured."""
    lead_s: Annotated[float, msgspec.Meta(ge=0.5, le=8)] = 5.0
    """Lifetime of the leadership: another scheduler takes over when the leader has not renewed it for this long."""
    pool: PoolKind = "local"
    """Where workers run. local: `penstock up` on each machine; kubernetes: Deployments; dry-run: plans are logged."""


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [kubernetes]: where the pods of pool "kubernetes" are."""

    namespace: str = ""
    """Empty: the scheduler's own, or that of KUBECONFIG's context."""
    deployment: str = "penstock-worker-{model}"
    """Name of a model's Deployment; characters of {model} that such names may not contain become dashes."""

    def deployment_of(self, model: str, shape: str = "") -> str:
        """The name of a model's Deployment, or of one of its shapes'."""
        name = re.sub(r"[^a-z0-9]+", "-", pool_name(model, shape).lower()).strip("-")
        return self.deployment.replace("{model}", name)


def check_deployments(settings: KubernetesSettings, models: Mapping[str, ModelSettings]) -> None:
    """Check that no two pools use one Deployment: they would scale it against each other. Raises ConfigError."""
    pools: dict[str, str] = {}
    for model, each in models.items():
        for shape in each.pools:
            name, pool = settings.deployment_of(model, shape), pool_name(model, shape)
            other = pools.setdefault(name, pool)
            if other != pool:
                raise ConfigError(
                    "kubernetes.deployment",
                    f"{other!r} and {pool!r} would both be the Deployment {name!r}",
                    "rename a model, or put {model} into the name",
                )


def shapes_of(name: str, model: ModelSettings) -> tuple[Shape, ...]:
    """The model's shapes with their thresholds, as set or as computed from their curves. Raises ConfigError."""
    if not any(shape.curve for shape in model.shapes.values()):
        return tuple(
            Shape(each, math.inf if shape.upto is None else shape.upto) for each, shape in model.shapes.items()
        )
    found = calibrated([(each, shape.curve) for each, shape in model.shapes.items()])
    for before, (few, many) in zip((Shape("", 0.0), *found), pairwise(found), strict=False):
        if not before.upto < few.upto < math.inf:
            never = few if few.upto <= before.upto else many
            key, words = f"models.{name}.shapes.{never.name}", "by the curves another shape is better at every load"
            raise ConfigError(key, words, "leave it out, or measure more jobs at once")
    return found
