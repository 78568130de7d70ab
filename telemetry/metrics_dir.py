"""Metrics folder: the files in which the processes of one machine share their numbers, and how they are summed up.

prometheus_client is imported inside the functions, as telemetry/metrics.py explains.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.files import file_lock

if TYPE_CHECKING:
    from prometheus_client import Metric

DEAD = "dead"
"""Stands for a pid in the names of the files that hold what ended processes counted."""


def clear(metrics_dir: str) -> None:
    """Forget everything an earlier deployment counted. Call before the first process starts."""
    folder = Path(metrics_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.db*"):
        path.unlink()


def reap(metrics_dir: str, pid: int) -> None:
    """Take a process that has ended out of the folder: its gauges go, its counts are kept in the file of the dead.

    Idempotent. Without it each process ever started would leave its files there for good.
    """
    folder = Path(metrics_dir)
    with file_lock(folder / "lock"):
        drop_live_gauges(folder, pid)
        for kind in ("counter", "histogram"):
            _bury(folder / f"{kind}_{pid}.db", folder / f"{kind}_{DEAD}.db")


def _bury(source: Path, grave: Path) -> None:
    """Add the values of one file to those of another, and remove it. A reader, kept out by the lock, sees no half."""
    from prometheus_client import mmap_dict  # noqa: PLC0415 - see the module's docstring

    if not source.exists():
        return
    dict_of: Any = mmap_dict.MmapedDict  # not annotated by the library
    totals: dict[str, float] = {}
    for path in filter(_has_values, (grave, source)):
        for key, value, *_ in dict_of.read_all_values_from_file(str(path)):
            totals[key] = totals.get(key, 0.0) + value
    fresh = grave.with_suffix(".db.new")
    fresh.unlink(missing_ok=True)
    file = dict_of(str(fresh))
    for key, value in totals.items():
        file.write_value(key, value, 0.0)
    file.close()
    fresh.replace(grave)
    source.unlink()


def merged(folder: Path) -> Iterable[Metric]:
    """The sum over all processes. Gauges of a process that is gone are left out even if nobody reaped it yet."""
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415 - see the module's docstring

    with file_lock(folder / "lock", shared=True):
        files = [str(path) for path in folder.glob("*.db") if _has_values(path) and not _is_stale(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return list(merged)


def _has_values(path: Path) -> bool:
    """False for a file that another process is just creating: the library cannot read it."""
    return path.exists() and path.stat().st_size > 0


def _is_stale(path: Path) -> bool:
    kind, _, pid = path.stem.rpartition("_")
    return kind.startswith("gauge_live") and not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's process, so there is one
    return True


def drop_live_gauges(folder: Path, pid: int) -> None:
    for path in folder.glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)
