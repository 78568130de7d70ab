"""Which Penstock this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version; "source" when it runs from a checkout that is not installed."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "source"
