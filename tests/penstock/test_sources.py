"""Errors of settings say what set the key: the file, a variable or a flag."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.config import FLAGS, ConfigError, Sources, load


def test_the_strongest_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags outrank variables, and these the file, whose path is short below the folder one is in."""
    monkeypatch.chdir(tmp_path)
    path, variables = tmp_path / "penstock.toml", {("api", "port"): "PENSTOCK_PORT"}
    file = {"api": {"port": 1}, "models": {"a.b": {"options": {"path": "x"}}}}
    assert Sources([("api", "port")], variables, path, file).of("api.port") == "set by the flag --port"
    assert Sources([], variables, path, file).of("api.port") == "set by the variable PENSTOCK_PORT"
    found = Sources([], {}, path, file)
    assert found.of("api.port") == found.of("models.a.b.options.path") == "set in penstock.toml"
    assert found.of("api.metrics") == found.of("models.a.b.options.path.x") == ""
    monkeypatch.chdir("/")
    assert found.of("api.port") == f"set in {path.relative_to('/')}"


class Api(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1


class Model(msgspec.Struct, frozen=True, kw_only=True):
    engine: str


@pytest.mark.parametrize(
    ("text", "environ", "flags", "source"),
    [
        ("[api]\nport = 'x'", {}, {}, "penstock.toml"),
        ("[api]\n\nprot = 1", {}, {}, "penstock.toml"),
        ("[ap]", {}, {}, "penstock.toml"),
        ("[models.a]\n[models.b]\nengine = 1", {}, {}, "penstock.toml"),  # a has no engine
        ("[api]\nport = 2", {"PENSTOCK_PORT": "x"}, {}, "the variable PENSTOCK_PORT"),
        ("[api]\nport = 2", {"PENSTOCK_API_PORT": "x"}, {}, "the variable PENSTOCK_API_PORT"),
        ("[api]\nport = 2", {"PENSTOCK_PORT": "3"}, {("api", "port"): "x"}, "the flag --port"),
    ],
)
def test_every_error_of_the_loader_names_its_source(
    text: str, environ: dict[str, str], flags: dict[tuple[str, str], str], source: str, tmp_path: Path
) -> None:
    """Unknown sections and keys, values of the wrong kind, keys that are missing."""
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({"api": Api, "models": Model}, path=path, environ=environ, flags=flags)
    assert caught.value.source.endswith(source), caught.value.source


def test_every_flag_of_up_has_its_setting() -> None:
    """Those that set none aside."""
    from cli.up import up  # noqa: PLC0415

    flags = {flag for param in up.params for flag in param.opts if flag.startswith("--")}
    named = {Sources([target]).of(".".join(target)).removeprefix("set by the flag ") for target in FLAGS.values()}
    assert flags - named == {"--config", "--detach", "--color", "--debug"} and named <= flags
