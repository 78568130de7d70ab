"""Errors of settings say what set the key: a line of the file, a variable or a flag."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import FLAGS, MAX_PARSES, ConfigError, Sources, line_of, load

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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('x = 1\n"\\u006by" = 1', 2),
        ("x = 1\nt = {a = '''\n''', ky = 1}", 0),
        ("x = '''\nky = 1\nky = 2\n'''\n\nky = 1\ny = '''\nky = 3\n'''", 6),
        ("# ky\nx = [\n 'ky',\n 'ky'\n]\n  ky = [\n1]", 6),
    ],
)
def test_odd_ways_to_write_a_key(text: str, line: int) -> None:
    """Escapes, inline tables behind a text of several lines, and lines of values that look like the key's."""
    assert line_of(text, "ky") == line
    assert line_of(text.replace("\nt =", "\nky ="), "ky.ky") == (2 if "\nt =" in text else 0)


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are parsed from now on."""
    texts, loads = list[str](), tomllib.loads

    def counted(text: str) -> dict[str, Any]:
        texts.append(text)
        return loads(text)

    monkeypatch.setattr(tomllib, "loads", counted)
    return texts


@pytest.mark.parametrize("number", [0, 500, 999])
def test_a_long_file_is_parsed_a_few_times(number: int, parses: list[str]) -> None:
    """The supervisor's event loop would stand still: 4,000 lines of the same name need no more than a bisection."""
    text = "".join(f'[models.m{each}]\n# engine\nengine = "sim"\n\n' for each in range(1000))
    assert line_of(text, f"models.m{number}.engine") == 4 * number + 3
    assert len(parses) <= 1 + len(f"{4000:b}")


def test_a_file_of_values_that_look_like_the_key_is_given_up(parses: list[str]) -> None:
    text = "x = [\n" + "'port',\n" * 1000 + "]\nport = 1\n"
    assert line_of(text, "port") in (0, 1003) and len(parses) <= 1 + MAX_PARSES


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
