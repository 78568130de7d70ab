"""Aliases ([aliases], `aliases` of [tenants.<name>]): further names of models, for clients that know others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.config import ConfigError
from streaming.fleet.settings import MODEL_NAME, ModelSettings, resolve, served_names
from streaming.ids import full_name
from streaming.jobs.settings import TenantSettings

PATTERN = re.compile(rf"(?=.)({MODEL_NAME.pattern})?\*?")


class AliasSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [aliases]; `"name" = "model"` is short for it."""

    model: str
    """The model that the name means. A `*` at the name's end stands for any characters."""


class Target(NamedTuple):
    """What a client means by a name."""

    model: str
    alias: str = ""
    """The alias that led to the model, as it is configured; "": the model's own name did."""
    adapter: str = ""
    """Of the model; "": none."""

    @property
    def full_model(self) -> str:
        """The model with its adapter."""
        return full_name(self.model, self.adapter)

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of it that a key may be for: one for a model is also for its adapters."""
        return self.model, self.full_model, self.alias


class Aliases:
    """Finds the model that a client means. A model's own name always wins; then the aliases of the client's tenant go
    before those of all, and among those of each an exact name before the longest pattern.

    Args:
        general: For all tenants, the model of each alias.
        tenants: Likewise, by tenant.
        default: The name that a request without one means; "": there is none.
    """

    def __init__(self, general: Mapping[str, str], tenants: Mapping[str, Mapping[str, str]], default: str = "") -> None:
        self._general, self._tenants, self.default = general, tenants, default

    def resolve(self, tenant: str, name: str, models: Mapping[str, ModelSettings]) -> Target | None:
        """Find the one of `models` that `tenant` means by `name`; None if there is none."""
        if (own := resolve(name, models)) is not None:
            return Target(own[0], adapter=own[1])
        for rows in (self._tenants.get(tenant, {}), self._general):
            fitting = [alias for alias in rows if alias.endswith("*") and name.startswith(alias[:-1])]
            if alias := name if name in rows else max(fitting, key=len, default=""):
                model, adapter = resolve(rows[alias], models) or (rows[alias], "")
                return Target(model, alias, adapter)
        return None

    def listed(self, tenant: str) -> dict[str, str]:
        """The model of each alias of a tenant, without patterns, which are no names."""
        rows = {**self._general, **self._tenants.get(tenant, {})}
        return {alias: model for alias, model in rows.items() if not alias.endswith("*")}

    def check(self, models: Mapping[str, ModelSettings]) -> None:
        """Raise ConfigError for an alias that is no name, the name of a model, or of none of the `models`."""
        tables = {"aliases": self._general} | {f"tenants.{name}.aliases": rows for name, rows in self._tenants.items()}
        for table, rows in tables.items():
            for alias, model in rows.items():
                if not PATTERN.fullmatch(alias):
                    raise ConfigError(f"{table}.{alias}", "a name has letters, digits and . _ : / -, and * at its end")
                if resolve(alias, models) is not None:
                    raise ConfigError(f"{table}.{alias}", "a model has this name", "leave the alias out")
                if resolve(model, models) is None:
                    known = self._general.keys() | rows.keys()
                    problem = f"{model!r} is an alias, too" if model in known else f"there is no [models.{model}]"
                    raise ConfigError(
                        f"{table}.{alias}", problem, f"name a model: {', '.join(sorted(served_names(models)))}"
                    )
        if self.default and self.resolve("", self.default, models) is None:
            raise ConfigError("api.default_model", f"there is no [models.{self.default}], and no such alias for all")


NO_ALIASES = Aliases({}, {})


def aliases_of(
    rows: Mapping[str, AliasSettings],
    tenants: Mapping[str, TenantSettings],
    default: str,
    models: Mapping[str, ModelSettings],
) -> Aliases:
    """The aliases of a deployment. Raises ConfigError."""
    own = {name: tenant.aliases for name, tenant in tenants.items() if tenant.aliases}
    found = Aliases({name: row.model for name, row in rows.items()}, own, default)
    found.check(models)
    return found
