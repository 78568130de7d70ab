"""Upstream model: a model's settings with its keys, checked together with the models that it falls back to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.config import ConfigError
from workers.engines.upstream.http.address import ServerAddress
from workers.engines.upstream.http.proxy import proxy_for
from workers.engines.upstream.places.limits import UpstreamKey
from workers.engines.upstream.settings import UpstreamSettings

OtherModels: TypeAlias = Callable[[str], UpstreamSettings | None]
"""The settings of another model with this engine, by its name; None if there is none."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """One model. `keys` are those of its settings, read from the environment."""

    name: str
    settings: UpstreamSettings
    keys: Sequence[UpstreamKey]


def checked_models(model: str, settings: UpstreamSettings, others: OtherModels) -> Iterator[UpstreamModel]:
    """The model, then its fallbacks in their order. Raises ConfigError for settings that cannot be used."""
    where = f"models.{model}.options"
    if not settings.urls:
        raise ConfigError(f"{where}.urls", "no server is named", 'e.g. options.urls = ["http://gpu-1:8000/v1"]')
    _check_proxies(settings, where)
    yield UpstreamModel(model, settings, keys_of(settings, where))
    for name in settings.fallback:
        other = others(name)
        if other is None or not other.urls:
            problem = f"{name} is no model with engine upstream and urls"
            raise ConfigError(f"{where}.fallback", problem, "add it, or name another one")
        if settings.fallback.count(name) > 1:
            raise ConfigError(f"{where}.fallback", f"{name} is named twice", "name it once")
        if model == name or model in _reached(name, others):
            hint = "leave it out: a fallback must not lead back"
            raise ConfigError(f"{where}.fallback", f"{name} is {model}, or falls back to it", hint)
        _check_proxies(other, f"models.{name}.options")
        yield UpstreamModel(name, other, keys_of(other, f"models.{name}.options"))


def _check_proxies(settings: UpstreamSettings, where: str) -> None:
    """Raises ConfigError if the environment names no proxy that can be used."""
    for address in map(ServerAddress.of, settings.urls):
        try:
            proxy_for(settings.proxy, address.host, address.port, os.environ, secure=address.secure)
        except ValueError as error:
            raise ConfigError(f"{where}.proxy", str(error), "correct the variable, or name a proxy here") from None


def _reached(model: str, others: OtherModels) -> set[str]:
    """The models that a model's fallbacks lead to."""
    found, ahead = set[str](), [model]
    while ahead:
        settings = others(ahead.pop())
        new = set(settings.fallback) - found if settings is not None else set[str]()
        found |= new
        ahead += new
    return found


def keys_of(settings: UpstreamSettings, where: str) -> list[UpstreamKey]:
    """The keys in the environment. Raises ConfigError if a variable is not set."""
    keys = []
    for name in settings.key_env:
        secret = os.environ.get(name, "").strip()
        if not secret:
            raise ConfigError(f"{where}.key_env", f"the variable {name} is not set", "export it where workers start")
        if not secret.isascii() or not secret.isprintable():
            raise ConfigError(f"{where}.key_env", f"the variable {name} holds no API key", "keys are printable ASCII")
        keys.append(UpstreamKey(name, secret))
    return keys
