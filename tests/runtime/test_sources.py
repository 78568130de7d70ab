"""Errors of settings say what set the key: a line of the file, a variable or a flag."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import ConfigError, load
from runtime.sources import FLAGS, Sources, line_of

TEXT = """\
# settings
[api]
host = "::1"   # port = 1

port = 9000
cors_origins = [
  "https://a",
  "port = 3",
]

[models.first]
engine = "sim"
options.path = "/a"
[models."se.cond"]
engine = "sim"
options = {path = "/b", slots = 2}
note = '''
[redis]
url = "x"
'''
[redis]
url = "redis://"
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("api", 2),
        ("api.host", 3),
        ("api.port", 5),
        ("api.cors_origins", 6),
        ("models", 11),
        ("models.first", 11),
        ("models.first.options.path", 13),
        ("models.se.cond", 14),
        ("models.se.cond.options.path", 16),
        ("redis.url", 22),  # and not the line of a text that looks like it
        ("redis.partitions", 0),
        ("redis.url.deeper", 0),
        ("nothing", 0),
    ],
)
def test_the_line_that_sets_a_key(key: str, line: int) -> None:
    """Tables, dotted and quoted keys, values of several lines."""
    assert line_of(TEXT, key) == line


def test_the_strongest_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags outrank variables, and these the file, whose path is short below the folder one is in."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "penstock.toml"
    path.write_text(TEXT)
    variables = {("api", "port"): "PENSTOCK_PORT"}
    assert Sources([("api", "port")], variables, path).of("api.port") == "set by the flag --port"
    assert Sources([], variables, path).of("api.port") == "set by the variable PENSTOCK_PORT"
    assert Sources([], {}, path).of("api.port") == "set in penstock.toml, line 5"
    assert Sources([], {}, path).of("api.metrics") == ""
    monkeypatch.chdir("/")
    assert Sources([], {}, path).of("api.port") == f"set in {path.relative_to('/')}, line 5"
    assert Sources([], {}, tmp_path / "gone.toml").of("api.port") == ""


class Api(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1


class Model(msgspec.Struct, frozen=True, kw_only=True):
    engine: str


@pytest.mark.parametrize(
    ("text", "environ", "flags", "source"),
    [
        ("[api]\nport = 'x'", {}, {}, "line 2"),
        ("[api]\n\nprot = 1", {}, {}, "line 3"),
        ("[ap]", {}, {}, "line 1"),
        ("[models.a]\n[models.b]\nengine = 1", {}, {}, "line 1"),  # a has no engine
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
    assert flags - named == {"--config", "--detach", "--verbose", "--color", "--debug"} and named <= flags
