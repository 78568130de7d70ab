"""Engine registry: builds the engine that a model's settings name. An engine is imported only when it is needed.

The package of an engine, `workers.engines.<name>`, has two modules that are found by name: `settings`, whose SECTION is
the struct of its section in penstock.toml, and `engine`, whose `build(model, settings, data_dir)` makes it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec

from runtime.config import ENGINES, Config
from streaming.settings import ModelSettings
from workers.engines.base import Engine


def build(model: str, settings: ModelSettings, config: Config, data_dir: Path) -> Engine:
    """An engine that is not started yet. Raises ConfigError, EngineDead."""
    own = config.section(settings.engine, section_of(settings.engine), settings.options)
    return cast(Engine, import_module(f"workers.engines.{settings.engine}.engine").build(model, own, data_dir))


def section_of(engine: str) -> type[msgspec.Struct]:
    """The struct that checks the engine's section."""
    return cast(type[msgspec.Struct], import_module(f"workers.engines.{engine}.settings").SECTION)


def sections() -> dict[str, type[msgspec.Struct]]:
    """The section of every engine."""
    return {engine: section_of(engine) for engine in ENGINES}
