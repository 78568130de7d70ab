"""The settings of `penstock up`: one machine, all roles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from cli.output import Problem
from penstock.config import ENV_PREFIX, FILE, SECTIONS, TABLES, ConfigError, EngineName


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [up]."""

    data_dir: Path = Path(".penstock")
    """Folder of the queue, results, weights, logs and the running instance's state."""
    engine: EngineName = "llamacpp"
    """The engine of the one model served when no [models.<name>] is configured."""
    model: str = ""
    """Name of that model (default: by the engine), or of the configured model that commands use by default."""
    redis_memory: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """Share of the machine's memory that the embedded server may fill (its `maxmemory`). Rewriting its file may need as
    much again for a while."""
    workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of workers of every model, which overrides its own settings; 0 starts none."""


def settings_file(folder: Path) -> Path | None:
    """The path of penstock.toml in this folder; None if it does not exist."""
    path = folder / FILE
    return path if path.is_file() else None


def problem_of(error: ConfigError) -> Problem:
    """The error as a command ends with it."""
    message = f"{error.key}: {error.problem}"
    return Problem(message, cause=error.source, next_step=remedy(error), code="settings")


def remedy(error: ConfigError) -> str:
    """The next step: the error's own, or the page of variables if it lists the setting; else ""."""
    section = error.key.partition(".")[0]
    listed = error.key.startswith(ENV_PREFIX) or (section in SECTIONS and section not in TABLES)
    return error.hint or ("penstock help environment" if listed else "")
