"""Configuration loader: merges `penstock.toml`, `PENSTOCK_*` variables and flags, validates every key, hides secrets.

Each process names the sections it reads, as frozen structs beside the code that uses them. An unknown key or a value of
the wrong type is an error that names the key, the expected value and the nearest known key.
"""

from __future__ import annotations

import ast
import difflib
import enum
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast
from urllib.parse import quote, unquote

import msgspec

from penstock.text import read_text

FLAGS = {
    "host": ("api", "host"),
    "port": ("api", "port"),
    "data_dir": ("up", "data_dir"),
    "redis_url": ("redis", "url"),
    "engine": ("up", "engine"),
    "model": ("up", "model"),
    "upstream": ("upstream", "urls"),
    "workers": ("up", "workers"),
    "api_processes": ("api", "processes"),
    "sim_step_ms": ("sim", "step_ms"),
    "sim_prefill_ms": ("sim", "prefill_ms"),
    "sim_slots": ("sim", "slots"),
    "sim_kv_tokens": ("sim", "kv_tokens"),
}
"""The setting behind each flag of `penstock up`, by the name of the flag's parameter."""


@dataclass(frozen=True)
class Sources:
    """The sources of one process's settings, the strongest first."""

    flags: Collection[tuple[str, str]] = ()
    variables: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By setting, the variable that set it."""
    files: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)
    """What each file holds, the strongest last."""

    def of(self, key: str) -> str:
        """What set this key, such as "api.port": "set in penstock.toml"; "" if nothing did."""
        section, _, name = key.partition(".")
        if (section, name) in self.flags:
            flags = (f"set by the flag --{flag.replace('_', '-')}" for flag in FLAGS if FLAGS[flag] == (section, name))
            return next(flags, "set on the command line")
        if variable := self.variables.get((section, name)):
            return f"set by the variable {variable}"
        here = Path.cwd()
        for path, held in reversed(list(self.files.items())):
            if _has(held, key):
                return f"set in {path.relative_to(here) if path.is_relative_to(here) else path}"
        return ""

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Adds what set the key to a ConfigError of the block."""
        try:
            yield
        except ConfigError as error:
            error.source = error.source or self.of(error.key)
            raise


def _has(table: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key is set; names of tables may have dots themselves."""
    return key in table or any(
        isinstance(value, dict) and key.startswith(f"{name}.") and _has(value, key[len(name) + 1 :])
        for name, value in table.items()
    )


Positive = Annotated[int, msgspec.Meta(ge=1)]

FILE = "penstock.toml"
ENV_PREFIX = "PENSTOCK_"

ENGINES = ("llamacpp", "sim", "trtllm", "upstream")
"""Names of the built-in engines, each of which is a folder, `workers/engines/<name>`. Others are plug-ins."""

SECTIONS = (
    *("up", "api", "redis", "files", "batch", "worker", "offline", "scheduler", "kubernetes"),
    *("telemetry", "records"),
    *ENGINES,
    *("models", "aliases", "keys", "oidc", "tenants", "content", "moderation", "media"),
    *("webhooks", "events", "quotas"),
)
"""All sections. A process that reads only some of them still refuses an unknown one."""

TABLES = ("models", "aliases", "keys", "tenants", "content", "webhooks")
"""Sections with one table per name; they have no environment variables."""

SHORT_ROWS = {"aliases": "model"}
"""By section, the key that a row has if it is a plain value instead of a table."""

ALIASES = {
    f"{ENV_PREFIX}{flag.upper()}": FLAGS[flag] for flag in ("host", "port", "data_dir", "engine", "model", "workers")
}
"""Short names of the most used settings, such as PENSTOCK_PORT. They take precedence over the long ones, some of which
an image sets."""

NOT_SETTINGS = ("PENSTOCK_LIFELINE", "PENSTOCK_LIFE", "PENSTOCK_API_KEY", "PENSTOCK_URL", "PENSTOCK_BENCH_CACHE")
"""Variables with the prefix that are not settings."""

UNKNOWN = "no such setting"

SECRET_OPTION = re.compile(r"[?&][^=&#\s]{0,64}(?:password|secret|token|key|sig|signature)=([^&#\s]+)")
"""An option of a URL that lets in whoever has it."""

BOUND = re.compile(r"Expected `(?:int|float)` (>=|>|<=|<) (\S+)$")
"""What msgspec says of a number that is too small or too large."""
BOUND_WORDS = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}

MISTAKE = "mistake"
"""Key in the `extra` of a setting's msgspec.Meta: the error message for an invalid value."""

HIDE = "hide"
"""Key in the `extra` of a setting's msgspec.Meta: no log shows the value."""
Secret: TypeAlias = Annotated[str, msgspec.Meta(extra={HIDE: True})]

MIN_SECRET_CHARS = 8
hidden: list[str] = []
"""The secrets in the settings that this process has read, the longest first: no log shows them."""

EngineName: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_][\w.]*)?$",
        extra={MISTAKE: f"expected {', '.join(ENGINES)}, the name of an installed plug-in, or module:class"},
    ),
]
"""Only its form is checked here: processes other than workers need not have a plug-in installed."""

S = TypeVar("S", bound=msgspec.Struct)


class ConfigError(Exception):
    """Raised when a setting cannot be used. The message names the key, what was expected and what to do."""

    def __init__(self, key: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{key}: {problem}" + (f" ({hint})" if hint else ""))
        self.key, self.problem, self.hint = key, problem, hint
        self.source = ""
        """What set it: a flag, a variable, or a line of the file; "" if that is not known."""


class Config:
    """The merged settings of a deployment as plain data; `section` converts a part of it into a validated struct."""

    def __init__(self, raw: Mapping[str, Any], sources: Sources | None = None) -> None:
        self.raw: dict[str, Any] = {name: dict(values) for name, values in raw.items()}
        self.sources = sources or Sources()

    def section(self, name: str, kind: type[S], extra: Mapping[str, Any] | None = None) -> S:
        """The section as `kind`; values of `extra` take precedence. Raises ConfigError."""
        values = {**self.raw.get(name, {}), **(extra or {})}
        return build(kind, values, name)

    def table(self, name: str, kind: type[S]) -> dict[str, S]:
        """A section of named tables, e.g. `[models.<name>]`. Raises ConfigError."""
        rows = self.raw.get(name, {})
        if name in SHORT_ROWS:
            rows = {key: row if isinstance(row, dict) else {SHORT_ROWS[name]: row} for key, row in rows.items()}
        return {key: build(kind, values, f"{name}.{key}") for key, values in rows.items()}

    def only(self, sections: Collection[str]) -> Config:
        """The settings of these sections alone."""
        return Config({name: values for name, values in self.raw.items() if name in sections}, self.sources)

    def save(self, path: Path) -> None:
        """Write the merged settings for a child process, readable only by the owner because they may hold secrets."""
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self.raw, enc_hook=str))

    @classmethod
    def saved(cls, path: Path) -> Config:
        """Read what `save` wrote. Raises ConfigError."""
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]]))
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}") from None


def load(
    kinds: Mapping[str, type[msgspec.Struct]],
    *,
    path: Path | None = None,
    own: Path | None = None,
    environ: Mapping[str, str],
    flags: Mapping[tuple[str, str], Any] | None = None,
) -> Config:
    """Merge files, environment and flags; later ones take precedence. Raises ConfigError.

    Args:
        kinds: the sections that this process reads; for a section of tables, the struct of one table.
        own: a second file, for the processes of one role.
        flags: values from the command line by (section, key); None: not given.
    """
    raw = dict[str, dict[str, Any]]()
    files = {each: _from_file(each) for each in (path, own) if each is not None}
    for file, found in files.items():
        with Sources(files={file: found}).naming():
            for section, values in found.items():
                if section not in SECTIONS:
                    raise ConfigError(section, "no such section", nearest(section, SECTIONS))
                if not isinstance(values, dict):
                    raise ConfigError(section, f"expected a table [{section}], got {type(values).__name__}")
                raw[section] = {**raw.get(section, {}), **values}
    variables = _variables(kinds, environ)
    given = {target: value for target, value in (flags or {}).items() if value is not None}
    for (section, key), value in ({target: environ[name] for target, name in variables.items()} | given).items():
        raw.setdefault(section, {})[key] = value
    config = Config(raw, Sources(given.keys(), variables, files))
    with config.sources.naming():
        for name, kind in kinds.items():
            config.table(name, kind) if name in TABLES else config.section(name, kind)
    return config


def own_file(path: Path, role: str) -> Path | None:
    """The settings file of one role alone, penstock.<role>.toml beside that of all; None if it does not exist."""
    own = path.with_name(f"{path.stem}.{role}{path.suffix}")
    return own if own.exists() else None


def build(kind: type[S], values: Any, where: str) -> S:
    """Convert plain data to a validated struct; accepts strings for numbers and booleans. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(where, f"expected a table, got {type(values).__name__}")
    hints = typing.get_type_hints(kind, include_extras=True)
    for key in values:
        if key not in kind.__struct_fields__:
            quotes = "; a name with dots needs quotes" if where.partition(".")[0] in SHORT_ROWS else ""
            raise ConfigError(f"{where}.{key}", UNKNOWN, nearest(key, kind.__struct_fields__) + quotes)
    built = {}
    for key, value in values.items():
        if (rows := _rows(hints[key])) is not None and isinstance(value, dict):
            built[key] = {name: build(rows, row, f"{where}.{key}.{name}") for name, row in value.items()}
            continue
        try:
            built[key] = msgspec.convert(_listed(value, hints[key]), hints[key], strict=False, dec_hook=_path)
        except msgspec.ValidationError as error:
            problem = _extra(hints[key], MISTAKE) or _bound(str(error)) or f"expected {describe(hints[key])}: {error}"
            raise ConfigError(f"{where}.{key}", problem) from None
        if not _is_finite(value) or not _is_finite(built[key]):  # a child process would read null
            raise ConfigError(f"{where}.{key}", "must be finite, neither inf nor nan")
        hide(_secrets_of(built[key], hints[key]))
    try:
        return kind(**built)
    except (TypeError, ValueError) as error:  # a required key is missing, or __post_init__ refuses the values
        field, _, problem = str(error).partition(": ")
        if problem and field in kind.__struct_fields__:
            raise ConfigError(f"{where}.{field}", problem) from None
        raise ConfigError(where, str(error)) from None


def hide(secrets: Iterable[str]) -> None:
    """Keep secrets out of the logs and spans of this process. One of fewer than MIN_SECRET_CHARS characters is hidden
    only where its form tells: logs that lack an ordinary word say nothing."""
    long = [each for each in secrets if len(each) >= MIN_SECRET_CHARS]
    spelled = [form for each in long for form in (each, quote(each, safe=""), repr(each)[1:-1], json.dumps(each)[1:-1])]
    hidden[:] = sorted({*hidden, *spelled}, key=len, reverse=True)


def hide_environment(environ: Mapping[str, str]) -> None:
    """Hide what libraries read from the environment: logins of proxies, and headers for collectors."""
    for name, value in environ.items():
        if name.upper().endswith("_PROXY"):
            hide(_logins_of(value))
        elif name.startswith("OTEL_EXPORTER_OTLP") and name.endswith("HEADERS"):
            hide(part.strip() for pair in (value, *value.split(",")) for part in (pair, *re.split("[=: ]", pair)[1:]))


def _secrets_of(value: Any, hint: Any) -> Iterator[str]:
    """The secrets in a setting: all of a secret one, and of a URL its password and those of its options."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str):
            if _extra(hint, HIDE):
                yield text
            for secret in (*_logins_of(text), *SECRET_OPTION.findall(text)):
                yield from (secret, unquote(secret))


def _logins_of(text: str) -> Iterator[str]:
    """The passwords in a URL, or in several behind `;`."""
    for each in (text, *text.split(";")):
        login, at, _ = each.partition("://")[2].rpartition("@")
        if at:
            password = login.partition(":")[2]
            yield from (password, unquote(password), re.split("[/?#]", password)[0])


def _extra(hint: Any, key: str) -> Any:
    """What a setting's msgspec.Meta has under this key; "" if nothing."""
    extras = (meta.extra for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta) and meta.extra)
    return next((extra[key] for extra in extras if key in extra), "")


def _bound(message: str) -> str:
    """The bound that a number is beyond; "" if msgspec says something else."""
    found = BOUND.match(message)
    return f"must be {BOUND_WORDS[found[1]]} {found[2]}" if found else ""


def _rows(hint: Any) -> type[msgspec.Struct] | None:
    """The struct of each row if the setting is a table of tables, such as a model's shapes; else None."""
    kind = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else None
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _is_finite(value: Any) -> bool:
    """Whether a value of a setting, or a table of them, has neither inf nor nan."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _listed(value: Any, hint: Any) -> Any:
    """Split a comma-separated string if the setting is a list."""
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _path(kind: type, value: Any) -> Any:
    """Decoding hook for Path, which msgspec does not convert by itself."""
    if kind is not Path:
        raise NotImplementedError  # msgspec's convention for an unsupported type
    if not isinstance(value, str) or not value:
        raise ValueError("it is empty" if value == "" else "it is no text")
    return expanded(value)


def expanded(path: str) -> Path:
    """The path with the home folder for its `~`, as a shell would write it. Raises ValueError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {path!r}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word closest to `word`, or lists them all."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)


def describe(kind: Any) -> str:
    """Describe a type for an error message."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(arg) or "empty" for arg in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in typing.get_args(kind) if arg is not type(None))
    if origin is typing.Annotated:
        return describe(typing.get_args(kind)[0])
    if origin is tuple:
        of = typing.get_args(kind)[0]
        return "texts, with commas between" if of is str else f"a list, each {describe(of)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(cast(type, kind), getattr(kind, "__name__", str(kind)))


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", "correct the path") from None
    except ValueError as error:
        hint = "write the file as UTF-8 TOML, as in docs/configuration.md"
        raise ConfigError(str(path), f"cannot be read: {error}", hint) from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None


def _variables(kinds: Mapping[str, type[msgspec.Struct]], environ: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """By setting, the variable that sets it. Raises ConfigError."""
    known = {name: target for name, target in ALIASES.items() if target[0] in kinds}
    for section, kind in kinds.items():
        if section not in TABLES:
            known |= {f"{ENV_PREFIX}{section}_{key}".upper(): (section, key) for key in kind.__struct_fields__}
    found = {}
    for variable in sorted(environ, key=ALIASES.__contains__):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        if variable in known:
            found[known[variable]] = variable
            continue
        section = variable.removeprefix(ENV_PREFIX).split("_", 1)[0].lower()
        is_anothers = section in SECTIONS and section not in kinds and section not in TABLES
        if not is_anothers and variable not in ALIASES:  # another process checks the keys of its sections
            raise ConfigError(variable, UNKNOWN, nearest(variable, known))
    return found


SENTENCE = re.compile(r"(?<=[^.]{2}[.!?])\s+(?=[A-Z\"`])")
"""The gap between two sentences."""


def field_meanings(kind: type) -> dict[str, str]:
    """By the name of a field of `kind`, the first sentence of the text below it; fields without a text are left out.
    Empty where the source is not installed."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    found: dict[str, str] = {}
    for stated, below in pairwise(ast.parse(source).body[0].body):  # type: ignore[attr-defined]
        match stated, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = SENTENCE.split(" ".join(text.split()))[0]
    return found
