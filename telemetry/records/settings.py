"""Settings of the records on the local disk: section [records]."""

from __future__ import annotations

from typing import Annotated

import msgspec

MIN_FILE_BYTES = 4096


class RecordSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [records]. The records stay on this machine."""

    enabled: bool = True
    """Whether records are kept."""
    dir: str = ""
    """Folder of the records; "": none are kept. `penstock up` uses records/ in its data folder if this is not set."""
    max_bytes: Annotated[int, msgspec.Meta(ge=MIN_FILE_BYTES)] = 2 * 1024**3
    """Of all files of the folder; the oldest go first."""
    keep_s: Annotated[float, msgspec.Meta(gt=0)] = 7 * 86_400.0
    """A file that was not written for so long is removed."""
    file_bytes: Annotated[int, msgspec.Meta(ge=MIN_FILE_BYTES)] = 64 * 1024**2
    """A process begins a new file when its present one has this size."""
    file_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """A process begins a new file when its present one is this old."""
    sample_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Between two samples of a process."""
