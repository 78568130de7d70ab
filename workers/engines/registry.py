"""Engine registry: builds the engine that a model's settings name. It imports an engine only when it is needed.

The package of a built-in engine, `workers.engines.<name>`, has two modules that the registry finds by name: `settings`,
whose SECTION is the struct of its section in penstock.toml, and `engine`, with `build(model, settings, data_dir,
adapters)`. Any other name is a plug-in's: a Python class with the methods of penstock.engine.Engine, called with the
model's name and its options, to which `adapters` of the model are added. Only settings name one, never a request.
docs/engines.md is its manual.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.config import ENGINES, Config, ConfigError, nearest
from penstock.config import build as validated
from penstock.engine import Engine, EngineDead
from streaming.fleet.settings import ModelSettings
from workers.engines.checked_engine import CheckedEngine

log = logging.getLogger(__name__)

GROUP = "penstock.engines"
"""The entry point group in which a package gives its engine a name."""
ASYNC = ("start", "check", "stop")
METHODS = (*ASYNC, "submit", "cancel", "stats", "health")
MANUAL = "docs/engines.md"


def target(name: str, key: str) -> str:
    """The `module:class` that an engine's name stands for; imports nothing. Raises ConfigError about `key`."""
    if ":" in name:
        return name
    installed = {each.name: each.value for each in entry_points(group=GROUP)}
    if name not in installed:
        hint = f"{nearest(name, [*ENGINES, *installed])}; a plug-in is module:class ({MANUAL})"
        raise ConfigError(key, f"no engine {name!r} is installed", hint)
    return installed[name]


def build_plugin(name: str, model: str, options: Mapping[str, Any]) -> Engine:
    """Import and build the engine; it loads nothing yet. Raises ConfigError, EngineDead."""
    key = f"models.{model}.engine"
    make = _find(target(name, key), key)
    if isinstance(make, type):
        _require_methods(make, name, key)
    settings = _settings(make, options, f"models.{model}.options", key)
    try:
        engine = make(model, settings)
    except (ConfigError, EngineDead):
        raise
    except Exception as error:
        problem = f"{name} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(key, problem, f"it is called with the model's name and its options: {MANUAL}") from error
    _require_methods(engine, name, key)
    return engine  # type: ignore[no-any-return]


def _find(target: str, key: str) -> Callable[..., Any]:
    """Raises ConfigError."""
    try:
        found: Any = pkgutil.resolve_name(target)
    except Exception as error:
        problem = f"{target} cannot be imported: {type(error).__name__}: {error}"
        hint = f'try: python -c "import {target.partition(":")[0]}"'
        raise ConfigError(key, problem, hint) from error
    if not callable(found):
        problem = f"{target} is no engine: a {type(found).__name__}, not a class"
        raise ConfigError(key, problem, f"name the class: {MANUAL}")
    return found  # type: ignore[no-any-return]


def _settings(make: Callable[..., Any], options: Mapping[str, Any], where: str, key: str) -> Any:
    """The options as the class's own `Settings`, or as they are if it has none. Raises ConfigError."""
    kind = getattr(make, "Settings", None)
    if kind is None:
        return dict(options)
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        raise ConfigError(key, "its Settings is no msgspec.Struct", f"see {MANUAL}")
    if "adapters" in options and "adapters" not in kind.__struct_fields__:
        raise ConfigError(key.replace(".engine", ".adapters"), "this engine takes none", f"see {MANUAL}")
    return validated(kind, dict(options), where)


def _require_methods(engine: object, name: str, key: str) -> None:
    """Raises ConfigError."""
    lacks = [each for each in METHODS if not callable(getattr(engine, each, None))]
    if lacks:
        raise ConfigError(key, f"{name} is no engine: it has no {', '.join(lacks)}", f"see {MANUAL}")
    plain = [each for each in ASYNC if not inspect.iscoroutinefunction(getattr(engine, each))]
    if plain:
        raise ConfigError(key, f"{name} is no engine: {', '.join(plain)} must be `async def`", f"see {MANUAL}")


FALLING_BACK = ("upstream",)
"""Engines whose models may fall back to other models: their `build` also takes `other_models`."""


def build(model: str, settings: ModelSettings, config: Config, data_dir: Path) -> Engine:
    """Build an engine without starting it. Raises ConfigError, EngineDead."""
    name = settings.engine
    if is_plugin(name):
        given = {"adapters": settings.adapters} if settings.adapters else {}
        return CheckedEngine(build_plugin(name, model, settings.options | given), name, model)
    if any(each.name == name for each in entry_points(group=GROUP)):
        log.warning("engine %s is Penstock's own; write the installed one of that name as module:class", name)
    check_options(name, settings.options, f"models.{model}.options")
    own = config.section(name, section_of(name), settings.options)
    extra = (other_models(config, name),) if name in FALLING_BACK else ()
    make = import_module(f"workers.engines.{name}.engine").build
    return cast(Engine, make(model, own, data_dir, settings.adapters, *extra))


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
        target(name, key)


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
