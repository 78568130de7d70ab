"""Model settings ([models.<name>]): the served models, with the workers and pools of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.config import ConfigError, EngineName
from streaming.ids import full_name
from streaming.jobs.settings import Limits, TenantSettings

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SHAPE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resource limits of one worker process that `penstock up` starts. 0: no limit."""

    cpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Processors it may run on."""
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Data memory; mapped files do not count."""
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0


class LatencyTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies that readers should see. None: no target."""

    ttft_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """From the engine's begin to the first token."""
    itl_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Between two tokens."""


class LaneTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[models.<name>.targets.<lane>]: the latencies of a model's lanes."""

    interactive: LatencyTargets = LatencyTargets()
    """Workers begin texts of lane batch only while these are predicted to hold."""


NO_TARGETS = LaneTargets()


class ShapeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of [models.<name>.shapes.<shape>]: settings of one of the model's pools. Those it leaves out are the
    model's."""

    upto: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Concurrent jobs from which on the next shape is better; the last shape has none."""
    curve: tuple[tuple[float, float], ...] = ()
    """[concurrent jobs, tokens a second] as measured for this pool at its largest, by rising jobs; `upto` is computed
    from it if every shape has one."""
    min_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Kept also while another shape takes the jobs."""
    max_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    resources: Resources | None = None
    options: dict[str, Any] = {}
    """Override the model's options."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [models.<name>]: a served model, with its own lanes and workers."""

    engine: EngineName
    min_workers: Annotated[int, msgspec.Meta(ge=0)] = 1
    max_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """None: the same as min_workers, and at least 1."""
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Of one worker, in any unit."""
    price_input: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """What a tenant pays for a million tokens of prompts, in any unit; `limits` count by it."""
    price_output: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """The same of answers."""
    budget_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """The most that all workers of this model may cost together; it overrides min_workers. None: no limit."""
    resources: Resources = Resources()
    """Limits of each of its worker processes: `resources.cpus`, `.memory_mib`, `.nice`."""
    targets: LaneTargets = LaneTargets()
    """Latencies that workers keep, e.g. `targets.interactive.itl_ms = 50`."""
    adapters: dict[str, Annotated[str, msgspec.Meta(min_length=1)]] = {}
    """Fine-tunes of it (LoRA) that its workers serve beside it, by name: the file or folder of each, or its name at the
    upstream servers. A request names one as `model:adapter`."""
    options: dict[str, Any] = {}
    """Override the engine's own section for this model, e.g. `options.path` for a GGUF file."""
    shapes: dict[str, ShapeSettings] = {}
    """Pools of different shape for this model, in the order of the load they are for. None: one pool."""

    def __post_init__(self) -> None:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is less than min_workers {self.min_workers}")
        if self.budget_per_hour is not None and self.cost_per_hour > self.budget_per_hour and not self.shapes:
            raise ValueError("budget_per_hour does not pay for one worker, so every job would wait for ever")
        if self.shapes:
            check_shapes(self)

    @property
    def prices(self) -> tuple[float, float]:
        """Of a million tokens of prompts, and of answers."""
        return self.price_input, self.price_output

    @property
    def most_workers(self) -> int:
        return max(1, self.min_workers) if self.max_workers is None else self.max_workers

    @property
    def pools(self) -> dict[str, ModelSettings]:
        """The settings of each of its pools by shape; the only pool of a model without shapes is under ""."""
        return {name: self.shaped(shape) for name, shape in self.shapes.items()} or {"": self}

    @property
    def least_wanted(self) -> int:
        """The fewest workers that an override may set, whichever shape takes the jobs."""
        return min(pool.min_workers for pool in self.pools.values())

    @property
    def most_wanted(self) -> int:
        """The most workers that an override may set."""
        return max(pool.most_workers for pool in self.pools.values())

    def shaped(self, shape: ShapeSettings) -> ModelSettings:
        """The settings of one pool, as of a model without shapes. Raises ValueError."""
        differs = {name: getattr(shape, name) for name in ("min_workers", "max_workers", "cost_per_hour", "resources")}
        given = {name: value for name, value in differs.items() if value is not None}
        return msgspec.structs.replace(self, **given, options={**self.options, **shape.options}, shapes={})


def check_shapes(model: ModelSettings) -> None:
    """Validate a model's shapes. Raises ValueError, which names the shape."""
    shapes = model.shapes
    if len(shapes) < 2:
        raise ValueError("shapes: one shape alone is no choice; name two or more, or put its settings into the model")
    for name, shape in shapes.items():
        if not SHAPE_NAME.fullmatch(name):
            raise ValueError(f"shapes.{name}: a shape's name has small letters, digits and dashes, at most 32")
        try:
            model.shaped(shape)
        except ValueError as error:
            raise ValueError(f"shapes.{name}: {error}") from None
    for name, pool in model.pools.items():
        if not pool.most_workers and model.most_wanted:
            raise ValueError(f"shapes.{name}: max_workers is 0, and jobs meant for it would wait for ever")
    if any(shape.curve for shape in shapes.values()):
        _check_curves(shapes)
    else:
        _check_thresholds(shapes)


def _check_curves(shapes: dict[str, ShapeSettings]) -> None:
    for name, shape in shapes.items():
        jobs = [jobs for jobs, _ in shape.curve]
        if not jobs:
            raise ValueError(f"shapes.{name}: curve is missing; give every shape one, or none")
        if shape.upto is not None:
            raise ValueError(f"shapes.{name}: upto is read from the curves; give one or the other")
        if jobs != sorted(set(jobs)) or jobs[0] <= 0:
            raise ValueError(f"shapes.{name}: curve must be [jobs at once, tokens a second] by rising jobs above 0")


def _check_thresholds(shapes: dict[str, ShapeSettings]) -> None:
    *first, (last_name, last) = shapes.items()
    if last.upto is not None:
        raise ValueError(f"shapes.{last_name}: the last shape has no upto, it takes what the others do not")
    below = 0.0
    for name, shape in first:
        if shape.upto is None:
            raise ValueError(f"shapes.{name}: upto is missing, the jobs at once from which on the next shape is better")
        if shape.upto <= below:
            raise ValueError(f"shapes.{name}: upto {shape.upto:g} is not more than that of the shape before it")
        below = shape.upto


def check_model_names(models: dict[str, ModelSettings]) -> None:
    """Check model names, which are part of Redis keys and URLs, and those of adapters. Raises ValueError."""
    for name, model in models.items():
        if not MODEL_NAME.fullmatch(name):
            raise ValueError(f"models.{name}: a model name has letters, digits and . _ : / -, at most 128")
        for adapter in model.adapters:
            if not ADAPTER_NAME.fullmatch(adapter):
                raise ValueError(f"models.{name}.adapters: a name has letters, digits and . _ -, at most 64")
            full = full_name(name, adapter)
            if full in models or not MODEL_NAME.fullmatch(full):
                problem = "is the name of a model, too" if full in models else "has more than 128 characters"
                raise ValueError(f"models.{name}.adapters.{adapter}: {full} {problem}")


def served_names(models: Mapping[str, ModelSettings]) -> list[str]:
    """The full names of all models and adapters, each model's adapters behind it."""
    return [full_name(name, adapter) for name, model in models.items() for adapter in ("", *model.adapters)]


def resolve(name: str, models: Mapping[str, ModelSettings]) -> tuple[str, str] | None:
    """The model that a request names, and its adapter ("": none); None if there is none. An adapter is named in full,
    or alone if one model alone has an adapter of this name."""
    if name in models:
        return name, ""
    model, _, adapter = name.rpartition(":")
    if model in models and adapter in models[model].adapters:
        return model, adapter
    found = [each for each, settings in models.items() if name in settings.adapters]
    return (found[0], name) if len(found) == 1 else None


def check_runnable(models: Mapping[str, ModelSettings]) -> None:
    """Refuse a model that may never have a worker. Not for `penstock up --workers 0`, which means that. Raises
    ConfigError."""
    for name, model in models.items():
        if not model.most_wanted:
            problem = "0 lets no worker run, so every request would wait for ever"
            raise ConfigError(f"models.{name}.max_workers", problem, "set it to 1 or more, or leave it out")


def limits_of(tenants: Mapping[str, TenantSettings], models: Mapping[str, ModelSettings]) -> Limits:
    """What limits count by, of the rows of tenants and models."""
    limits = {name: tenant.limits for name, tenant in tenants.items() if tenant.limits is not None}
    return Limits(limits, {name: model.prices for name, model in models.items()})


def served_models(configured: dict[str, ModelSettings], workers: int | str | None = None) -> dict[str, ModelSettings]:
    """The models of a deployment; a simulated one if none is configured, so that each role runs alone. `workers`:
    [up] workers, which replaces the models' own numbers and may be 0.

    Raises ConfigError.
    """
    if workers is None:
        check_runnable(configured)
    try:
        check_model_names(configured)
    except ValueError as error:
        raise ConfigError("models", str(error)) from None
    return configured or {"sim": ModelSettings(engine="sim")}
