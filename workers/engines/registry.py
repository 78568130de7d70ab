"""Engine registry: builds the engine that a model's settings name. It imports an engine only when it is needed.

The package of an engine, `workers.engines.<name>`, has two modules that the registry finds by name: `settings`, whose
SECTION is the struct of its section in penstock.toml, and `engine`, with `build(model, settings, data_dir)`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec

from penstock.engine import Engine
from runtime.config import ENGINES, Config
from streaming.fleet.settings import ModelSettings


def build(model: str, settings: ModelSettings, config: Config, data_dir: Path) -> Engine:
    """Build an engine without starting it. Raises ConfigError, EngineDead."""
    own = config.section(settings.engine, section_of(settings.engine), settings.options)
    return cast(Engine, import_module(f"workers.engines.{settings.engine}.engine").build(model, own, data_dir))


def section_of(engine: str) -> type[msgspec.Struct]:
    """The struct that validates the engine's section."""
    return cast(type[msgspec.Struct], import_module(f"workers.engines.{engine}.settings").SECTION)


def sections() -> dict[str, type[msgspec.Struct]]:
    """The section of every engine."""
    return {engine: section_of(engine) for engine in ENGINES}
