"""Where settings come from: the flag, the variable, or the line of the settings file that set a key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.text import read_text

MAX_PARSES = 100
"""Of a settings file, to find the line of one key: a supervisor that serves others may ask."""
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
    path: Path | None = None

    def of(self, key: str) -> str:
        """What set this key, such as "api.port": "set in penstock.toml, line 3"; "" if nothing did."""
        section, _, name = key.partition(".")
        if (section, name) in self.flags:
            return f"set by the flag {self._flag((section, name))}"
        if variable := self.variables.get((section, name)):
            return f"set by the variable {variable}"
        if self.path is None:
            return ""
        try:
            line = line_of(read_text(self.path), key)
        except (OSError, ValueError):  # the error that is told has this as its cause
            return ""
        here = Path.cwd()
        shown = self.path.relative_to(here) if self.path.is_relative_to(here) else self.path
        return f"set in {shown}, line {line}" if line else ""

    def _flag(self, target: tuple[str, str]) -> str:
        names = (f"--{name.replace('_', '-')}" for name, setting in FLAGS.items() if setting == target)
        return next(names, "on the command line")


def line_of(text: str, key: str) -> int:
    """The line of a TOML text that sets `key`, which may be a table's name; 0 if none does, or if MAX_PARSES do not
    find it. Raises ValueError if the text is no TOML.

    The parser tells no lines. So this bisects the lines where the statement may begin: before the right one and all
    earlier ones the text does not set the key, before all later ones it does.
    """
    if not _has(tomllib.loads(text), key):
        return 0
    lines, name = text.split("\n"), key.rpartition(".")[2]
    # A key may be written with escapes, or stand in an inline table behind a value of several lines.
    left = [number for number, line in enumerate(lines) if any(mark in line for mark in (name, "\\", "{"))]
    line = 0
    for _ in range(MAX_PARSES):
        if not left:
            return line
        middle = len(left) // 2
        try:
            before = tomllib.loads("\n".join(lines[: left[middle]]))
        except tomllib.TOMLDecodeError:
            del left[middle]  # within a value of several lines
            continue
        if _has(before, key):
            left = left[:middle]
        else:
            line, left = left[middle] + 1, left[middle + 1 :]
    return 0


def _has(table: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key is set; names of tables may have dots themselves."""
    return key in table or any(
        isinstance(value, dict) and key.startswith(f"{name}.") and _has(value, key[len(name) + 1 :])
        for name, value in table.items()
    )
