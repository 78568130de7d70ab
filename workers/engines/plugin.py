"""Engine plug-ins: finds the class that a setting names, validates its options, and builds it.

A plug-in is any Python class with the methods of penstock.engine.Engine, called with the model's name and its options.
Only settings name one, never a request. docs/engines.md is its manual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import msgspec

from penstock.config import ENGINES, ConfigError, nearest
from penstock.config import build as validated
from penstock.engine import Engine, EngineDead

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
    module_name, _, path = target.partition(":")
    found: Any = _module(module_name, key)
    for part in path.split("."):
        if not hasattr(found, part):
            own = [name for name, each in vars(found).items() if getattr(each, "__module__", "") == module_name]
            raise ConfigError(key, f"{module_name} has no {path!r}", nearest(part, own))
        found = getattr(found, part)
    if not callable(found):
        problem = f"{target} is no engine: a {type(found).__name__}, not a class"
        raise ConfigError(key, problem, f"name the class: {MANUAL}")
    return found  # type: ignore[no-any-return]


def _module(name: str, key: str) -> ModuleType:
    """Raises ConfigError."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if f"{name}.".startswith(f"{missing}."):
            hint = "install its package in this environment, or put its folder into PYTHONPATH"
            raise ConfigError(key, f"there is no module {missing!r}", hint) from error
        raise ConfigError(key, f"{name} needs the module {missing!r}, which is missing", "install it") from error
    except Exception as error:
        problem = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(key, problem, f'try: python -c "import {name}"') from error


def _settings(make: Callable[..., Any], options: Mapping[str, Any], where: str, key: str) -> Any:
    """The options as the class's own `Settings`, or as they are if it has none. Raises ConfigError."""
    kind = getattr(make, "Settings", None)
    if kind is None:
        return dict(options)
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        raise ConfigError(key, "its Settings is no msgspec.Struct", f"see {MANUAL}")
    return validated(kind, dict(options), where)


def _require_methods(engine: object, name: str, key: str) -> None:
    """Raises ConfigError."""
    lacks = [each for each in METHODS if not callable(getattr(engine, each, None))]
    if lacks:
        raise ConfigError(key, f"{name} is no engine: it has no {', '.join(lacks)}", f"see {MANUAL}")
    plain = [each for each in ASYNC if not inspect.iscoroutinefunction(getattr(engine, each))]
    if plain:
        raise ConfigError(key, f"{name} is no engine: {', '.join(plain)} must be `async def`", f"see {MANUAL}")
