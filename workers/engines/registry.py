"""Engine registry: builds the engine that a model's settings name. It imports an engine only when it is needed.

The package of a built-in engine, `workers.engines.<name>`, has two modules that the registry finds by name: `settings`,
whose SECTION is the struct of its section in penstock.toml, and `engine`, with `build(model, settings, data_dir)`. Any
other name is a plug-in's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.config import ENGINES, Config
from penstock.config import build as validated
from penstock.engine import Engine
from streaming.fleet.settings import ModelSettings
from workers.engines import plugin
from workers.engines.checked_engine import CheckedEngine

FALLING_BACK = ("upstream",)
"""Engines whose models may fall back to other models: their `build` also takes `other_models`."""


def build(model: str, settings: ModelSettings, config: Config, data_dir: Path) -> Engine:
    """Build an engine without starting it. Raises ConfigError, EngineDead."""
    name = settings.engine
    if is_plugin(name):
        return CheckedEngine(plugin.build_plugin(name, model, settings.options), name, model)
    check_options(name, settings.options, f"models.{model}.options")
    own = config.section(name, section_of(name), settings.options)
    extra = (other_models(config, name),) if name in FALLING_BACK else ()
    return cast(Engine, import_module(f"workers.engines.{name}.engine").build(model, own, data_dir, *extra))


def other_models(config: Config, engine: str) -> Callable[[str], Any]:
    """A function that returns the settings of another model with a built-in engine, by its name; None if there is
    none, and of a model with shapes those that all of its pools share."""
    models = config.table("models", ModelSettings)

    def of(name: str) -> msgspec.Struct | None:
        model = models.get(name)
        if model is None or model.engine != engine:
            return None
        return config.section(engine, section_of(engine), model.options)

    return of


def is_plugin(name: str) -> bool:
    """Whether the engine is not one of Penstock's own."""
    return name not in ENGINES


def check_name(name: str, key: str) -> None:
    """Check that an engine has this name, without importing it. Raises ConfigError about `key`."""
    if is_plugin(name):
        plugin.target(name, key)


def check_options(engine: str, options: Mapping[str, Any], where: str) -> None:
    """Check options of a built-in engine, which are at `where` in the settings. Raises ConfigError."""
    if not is_plugin(engine):
        validated(section_of(engine), dict(options), where)


def section_of(engine: str) -> type[msgspec.Struct]:
    """The struct that validates a built-in engine's section."""
    return cast(type[msgspec.Struct], import_module(f"workers.engines.{engine}.settings").SECTION)


def sections() -> dict[str, type[msgspec.Struct]]:
    """The section of every built-in engine."""
    return {engine: section_of(engine) for engine in ENGINES}
