"""The settings of `penstock up`: one machine, all roles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from runtime.config import FILE, EngineName


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [up]."""

    data_dir: Path = Path(".penstock")
    """Queue, results, weights, logs and the running instance's state."""
    engine: EngineName = "llamacpp"
    """The engine of the one model served when no [models.<name>] is configured."""
    model: str = ""
    """Name of that model (default: by the engine), or of the configured model the commands use by default."""
    redis_memory: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """Share of the machine's memory that the embedded server may fill (its `maxmemory`). Rewriting its file may need as
    much again for a while."""
    workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Workers of every model, whatever its own settings say; 0 starts none."""


def settings_file(folder: Path) -> Path | None:
    """penstock.toml in this folder, if there is one."""
    path = folder / FILE
    return path if path.is_file() else None
