"""Settings editor: sets values in penstock.toml, keeps all other lines, and writes nothing that would not load."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cli.deployment import load_deployment
from cli.output import Problem
from penstock.config import FILE, ConfigError
from penstock.files import write_file
from penstock.text import decoded
from planner.commands.tuning import Applied
from planner.tuning import Recommendation

Keys: TypeAlias = tuple[str, ...]
BATCH_KEY = {"trtllm": "max_batch_size", "sim": "slots", "llamacpp": "slots"}
"""By engine, the setting of the requests at once."""
KV_KEY: Mapping[str, Keys] = {"trtllm": ("kv_cache", "max_tokens"), "sim": ("kv_tokens",)}
"""By engine, the setting of the cache's tokens; llama.cpp's follows from slots and context."""
BARE = re.compile(r"[A-Za-z0-9_-]+")


def check_applicable(folder: Path, model: str, shape: str | None) -> None:
    """Check, before anything is measured, that settings of the model could be written, or that there is no file to
    write, so that the lines will be shown. Raises Problem, ConfigError."""
    if not (folder / FILE).exists():
        return
    check(folder, changed_text(folder, model, Recommendation(1, 1 << 20), ((1.0, 1.0), (2.0, 2.0)), shape)[0])


def apply_settings(
    folder: Path,
    model: str,
    wanted: Recommendation,
    curve: Sequence[Sequence[float]],
    shape: str | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Applied:
    """Write the recommended settings of a model into penstock.toml of a folder. `tell` gets each change, old and new,
    before it is written. Raises Problem, ConfigError."""
    if not (folder / FILE).exists():
        return Applied(folder / FILE, () if wanted.withheld else lines_of(model, wanted), is_written=False)
    text, changes = changed_text(folder, model, wanted, curve, shape)
    if not changes:
        return Applied(folder / FILE, (), is_written=False)
    check(folder, text)
    before = tomllib.loads(decoded((folder / FILE).read_bytes()))
    for keys, value in changes.items():
        tell(f"{'.'.join(map(quoted, keys))}: {old(before, keys)} -> {literal(value)}")
    path = (folder / FILE).resolve()  # behind a link
    mode = stat.S_IMODE(path.stat().st_mode)
    write_file(path, text.encode(), mode)
    path.chmod(mode)  # also where the umask says less
    return Applied(path, [f"{'.'.join(map(quoted, keys))} = {literal(value)}" for keys, value in changes.items()])


def old(settings: Mapping[str, Any], keys: Keys) -> str:
    """The value of a key in a file's settings, or that it has none."""
    value: Any = settings
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return "not set" if value is None else literal(value)


def lines_of(model: str, wanted: Recommendation) -> list[str]:
    """The settings as lines for a file that is elsewhere, by engine."""
    found = [f"[models.{quoted(model)}.options]"]
    for engine, key in BATCH_KEY.items():
        cache = f", {'.'.join(KV_KEY[engine])} = {wanted.kv_tokens}" if engine in KV_KEY else ""
        found.append(f"# engine {engine}: {key} = {wanted.max_batch_size}{cache}")
    return found


def changed_text(
    folder: Path, model: str, wanted: Recommendation, curve: Sequence[Sequence[float]], shape: str | None
) -> tuple[str, Mapping[Keys, Any]]:
    """The file with the recommended settings, and what was changed. Raises Problem, ConfigError."""
    path = folder / FILE
    before = load_deployment({}, os.environ, folder, path if path.is_file() else None)
    text = decoded(path.read_bytes()) if path.is_file() else ""  # with the ends of its lines
    if model not in before.models:
        raise Problem(
            f"{path} does not configure the model {model!r}, which is to be measured",
            next_step="run this in the folder of its penstock.toml",
        )
    changes = changes_for(model, before.models[model].engine, tomllib.loads(text), wanted, curve, shape)
    for keys, value in changes.items():
        text = with_value(text, keys, value)
    return text, changes


def changes_for(
    model: str,
    engine: str,
    settings: Mapping[str, Any],
    wanted: Recommendation,
    curve: Sequence[Sequence[float]],
    shape: str | None,
) -> dict[Keys, Any]:
    """The keys to set: of the model's row, if it has one, else of the engine's section. Raises Problem for an engine
    whose batch Penstock does not set, or a shape that the model has not got."""
    if engine not in BATCH_KEY:
        raise Problem(
            f"the batch of engine {engine} is not a setting of Penstock", next_step="set it at the server itself"
        )
    row = settings.get("models", {}).get(model)
    options: Keys = (engine,) if row is None else ("models", model, "options")
    changes: dict[Keys, Any] = {}
    if shape is not None:
        if shape not in (row or {}).get("shapes", {}):
            raise Problem(f"--shape {shape}: [models.{model}] has no such shape in {FILE}")
        options = ("models", model, "shapes", shape, "options")
        changes["models", model, "shapes", shape, "curve"] = [[float(x), float(y)] for x, y in curve]
    if wanted.withheld:
        return changes
    changes[*options, BATCH_KEY[engine]] = wanted.max_batch_size
    if engine in KV_KEY:
        changes[*options, *KV_KEY[engine]] = wanted.kv_tokens
    if wanted.replicas and row is not None:
        workers = ("models", model, "shapes", shape) if shape else ("models", model)
        changes[*workers, "max_workers"] = max(wanted.replicas, int(row.get("min_workers", 1)))
    return changes


def check(folder: Path, text: str) -> None:
    """Load the changed file as `penstock up` would. Raises ConfigError, Problem if the folder cannot be written."""
    trial = folder / f".{FILE}.tune"
    if not os.access(folder / FILE, os.W_OK) and (folder / FILE).exists():
        raise Problem(f"{folder / FILE} cannot be written", cause="it is read-only")
    try:
        write_file(trial, text.encode())
        load_deployment({}, os.environ, folder, trial)
    except ConfigError as error:
        raise ConfigError(error.key, f"with the measured settings: {error.problem}", error.hint) from None
    except OSError as error:
        raise Problem(f"{folder / FILE} cannot be written", cause=error.strerror or str(error)) from None
    finally:
        trial.unlink(missing_ok=True)


def with_value(text: str, keys: Keys, value: Any) -> str:
    """The text with one key set, all other lines as they were. Raises Problem if that cannot be done by lines."""
    wanted = tomllib.loads(text)
    _set(wanted, keys, value)
    for changed in _candidates(text, keys, value):
        try:
            if tomllib.loads(changed) == wanted:
                return changed
        except tomllib.TOMLDecodeError:
            continue
    raise Problem(
        f"{FILE} cannot be changed by lines: {'.'.join(map(quoted, keys))} stands in an inline table",
        next_step=f"write {'.'.join(map(quoted, keys))} = {literal(value)} yourself",
    )


def _candidates(text: str, keys: Keys, value: Any) -> list[str]:
    """Ways to set it, of which the first that fits counts: replace its line, add one to the table of most of its keys,
    or add a table."""
    lines, end = text.splitlines(keepends=True), "\r\n" if "\r\n" in text else "\n"
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += end
    found, table = list[str](), Keys()
    for number, line in enumerate(lines):
        table = _header(line) or table
        rest = _key_of(line)
        if rest is not None and (*table, *rest) == keys:
            changed = f"{'.'.join(map(quoted, rest))} = {literal(value)}{_behind(line)}"
            found.append("".join([*lines[:number], changed, *lines[number + 1 :]]))
    for depth in range(len(keys) - 1, 0, -1):
        for number, line in enumerate(lines):
            if _header(line) == keys[:depth]:
                added = f"{'.'.join(map(quoted, keys[depth:]))} = {literal(value)}{end}"
                found.append("".join([*lines[: number + 1], added, *lines[number + 1 :]]))
    gap = end if lines else ""
    own = f"{gap}[{'.'.join(map(quoted, keys[:-1]))}]{end}{quoted(keys[-1])} = {literal(value)}{end}"
    return [*found, "".join(lines) + own]


def _behind(line: str) -> str:
    """What stands behind the value that a line sets: spaces, a comment, the end of the line."""
    whole, place = tomllib.loads(line), line.find("#")
    while place >= 0:
        try:
            if tomllib.loads(line[:place]) == whole:
                value = line[:place].rstrip()
                return line[len(value) :]
        except tomllib.TOMLDecodeError:  # the character is a part of the value
            pass
        place = line.find("#", place + 1)
    return line[len(line.rstrip("\r\n")) :]


def _header(line: str) -> Keys | None:
    """The keys of the head of a table; None: the line is none."""
    if not line.lstrip().startswith("[") or line.lstrip().startswith("[["):
        return None
    return _path(line)


def _key_of(line: str) -> Keys | None:
    """The keys that a line sets; None: it sets none, or not in one line."""
    if line.lstrip().startswith(("[", "#")) or "=" not in line:
        return None
    return _path(line)


def _path(line: str) -> Keys | None:
    """The single path of keys that a line of TOML makes."""
    try:
        table: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    keys = list[str]()
    is_header = line.lstrip().startswith("[")
    depth = line.count(".") + 1
    while isinstance(table, dict) and len(table) == 1 and (is_header or len(keys) < depth):
        (key,) = table
        keys.append(key)
        table = table[key]
    return tuple(keys) or None


def _set(table: dict[str, Any], keys: Keys, value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
    table[keys[-1]] = value


def quoted(key: str) -> str:
    """A key as TOML writes it."""
    return key if BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def literal(value: Any) -> str:
    """A number, or a list of lists of numbers, as TOML writes it."""
    return json.dumps(value)
