"""Aliases: which model a name means, and which rows are refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError, load
from streaming.fleet.aliases import Aliases, AliasSettings, Target, aliases_of
from streaming.fleet.settings import ModelSettings
from streaming.jobs.settings import TenantSettings

MODELS = {name: ModelSettings(engine="sim") for name in ("llama-8b", "claude-own", "other")}
MODELS["other"] = ModelSettings(engine="sim", adapters={"sql": "/sql", "law": "/law"})
MODELS["org/m:8b"] = ModelSettings(engine="sim", adapters={"tax": "/tax"})
GENERAL = {"gpt-4o-mini": "llama-8b", "claude-*": "llama-8b", "claude-3*": "other", "gpt-4o": "other"}
GENERAL["tuned-*"] = "other:sql"
ALIASES = Aliases(GENERAL, {"red": {"gpt-*": "other", "gpt-4o": "llama-8b"}}, "gpt-4o")


@pytest.mark.parametrize(
    ("tenant", "name", "found"),
    [
        ("blue", "llama-8b", Target("llama-8b")),
        ("blue", "gpt-4o-mini", Target("llama-8b", "gpt-4o-mini")),
        ("blue", "claude-2", Target("llama-8b", "claude-*")),
        ("blue", "claude-3-haiku", Target("other", "claude-3*")),
        ("blue", "claude-own", Target("claude-own")),
        ("blue", "gpt-4o", Target("other", "gpt-4o")),
        ("blue", "gpt-5", None),
        ("blue", "GPT-4o", None),
        ("red", "gpt-5", Target("other", "gpt-*")),
        ("red", "gpt-4o", Target("llama-8b", "gpt-4o")),
        ("red", "gpt-4o-mini", Target("other", "gpt-*")),
        ("red", "claude-2", Target("llama-8b", "claude-*")),
        ("blue", "other:sql", Target("other", adapter="sql")),
        ("blue", "law", Target("other", adapter="law")),
        ("blue", "org/m:8b:tax", Target("org/m:8b", adapter="tax")),
        ("blue", "8b:tax", None),
        ("red", "gpt-sql", Target("other", "gpt-*")),
        ("blue", "tuned-1", Target("other", "tuned-*", "sql")),
        ("blue", "llama-8b:sql", None),
    ],
)
def test_what_a_name_means(tenant: str, name: str, found: Target | None) -> None:
    """A model's own name, then the tenant's aliases, then those of all; an exact one before the longest pattern."""
    assert ALIASES.resolve(tenant, name, MODELS) == found


def test_a_tenant_sees_its_own_aliases() -> None:
    """And those of all, but no pattern, which is no name, and nothing of another tenant."""
    assert ALIASES.listed("blue") == {"gpt-4o-mini": "llama-8b", "gpt-4o": "other"}
    assert ALIASES.listed("red") == {"gpt-4o-mini": "llama-8b", "gpt-4o": "llama-8b"}


@pytest.mark.parametrize(
    ("text", "default", "key", "words"),
    [
        ('[aliases]\na = "gone"', "", "aliases.a", "no [models.gone]"),
        ('[aliases]\na = "b"\nb = "llama-8b"', "", "aliases.a", "an alias"),
        ('[aliases]\nllama-8b = "other"', "", "aliases.llama-8b", "a model has this name"),
        ('[aliases]\n"other:sql" = "llama-8b"', "", "aliases.other:sql", "a model has this name"),
        ('[aliases]\nlaw = "llama-8b"', "", "aliases.law", "a model has this name"),
        ('[aliases]\ngpt-4.1 = "other"', "", "aliases.gpt-4.1", "a name with dots needs quotes"),
        ('[aliases]\n"a*b" = "other"', "", "aliases.a*b", "at its end"),
        ('[aliases]\n"a b" = "other"', "", "aliases.a b", "letters"),
        ('[aliases]\n"" = "other"', "", "aliases.", "letters"),
        ("[aliases]\na = 3", "", "aliases.a.model", "text"),
        ('[tenants.red]\naliases = {a = "gone"}', "", "tenants.red.aliases.a", "no [models.gone]"),
        ('[aliases]\nb = "other"\n[tenants.red]\naliases = {a = "b"}', "", "tenants.red.aliases.a", "an alias"),
        ('[tenants.red]\naliases = {a = "other"}', "a", "api.default_model", "no such alias for all"),
        ("", "gone", "api.default_model", "no [models.gone]"),
    ],
)
def test_rows_that_lead_nowhere_are_refused(text: str, default: str, key: str, words: str, tmp_path: Path) -> None:
    """At the start, with the row's key: no client finds out first."""
    (tmp_path / "penstock.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config = load(
            {"aliases": AliasSettings, "tenants": TenantSettings}, path=tmp_path / "penstock.toml", environ={}
        )
        aliases_of(config.table("aliases", AliasSettings), config.table("tenants", TenantSettings), default, MODELS)
    assert caught.value.key == key and words in str(caught.value)


def test_a_row_may_be_short_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[aliases]\n"gpt-4.1*" = "other"\n[aliases.mine]\nmodel = "llama-8b"\n')
    config = load({"aliases": AliasSettings}, path=tmp_path / "penstock.toml", environ={})
    found = aliases_of(config.table("aliases", AliasSettings), {}, "mine", MODELS)
    assert found.resolve("t", "gpt-4.1-nano", MODELS) == Target("other", "gpt-4.1*")
    assert found.resolve("t", found.default, MODELS) == Target("llama-8b", "mine")
