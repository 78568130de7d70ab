"""Integrity check: compares a model's files with a manifest of SHA-256 hashes before an engine loads them.

A manifest is the output of `sha256sum`: per line a hash and a path relative to the manifest's folder. Every file that
the engine loads must be listed, so that no file can be added unnoticed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.engine import EngineDead
from penstock.text import read_text

LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


SHARD = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")
"""Name of one shard of a GGUF file: the engine gets the first and loads them all."""


def check(manifest: Path, loaded: Iterable[Path]) -> None:
    """Check that every file at or below `loaded` is listed and unchanged. Raises EngineDead."""
    try:
        listed = read(manifest)
        for root in loaded:
            for path in _files(root):
                if path != _normalised(manifest.absolute()):
                    _check(path, listed, manifest)
    except (OSError, ValueError) as error:
        raise EngineDead(f"the files of the model cannot be checked against {manifest}: {error}") from error


def read(manifest: Path) -> dict[Path, str]:
    """The hash of each file. Raises EngineDead for a malformed line, OSError, ValueError."""
    folder, listed = manifest.absolute().parent, dict[Path, str]()
    for number, line in enumerate(read_text(manifest).splitlines(), 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise EngineDead(f"line {number} of {manifest} is no line of sha256sum. Write it anew with sha256sum.")
        listed[_normalised(folder / match[2])] = match[1].lower()
    return listed


def shards(path: Path) -> list[Path]:
    """All shards of a GGUF file."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    return sorted(
        each for each in path.parent.iterdir() if (m := SHARD.fullmatch(each.name)) and m.groups() == match.groups()
    )


def _check(path: Path, listed: dict[Path, str], manifest: Path) -> None:
    expected = listed.get(path)
    if expected is None:
        raise EngineDead(f"{path} is not in {manifest}, so nobody vouches for it. Remove it, or list it after a look.")
    if file_sha256(path) != expected:
        raise EngineDead(f"{path} is not the file that {manifest} lists (its SHA-256 differs). Get it again.")


def _files(root: Path) -> Iterator[Path]:
    """The files at or below `root`. Raises EngineDead if it is not on this machine: a hub name cannot be checked."""
    if root.is_file():
        yield _normalised(root.absolute())
        return
    if not root.is_dir():
        raise EngineDead(
            f"{root} is no file or folder of this machine, so its files cannot be checked against a manifest."
        )
    for folder, _, names in os.walk(root.absolute(), followlinks=True, onerror=_fail):
        for name in sorted(names):
            yield _normalised(Path(folder) / name)


def _normalised(path: Path) -> Path:
    """The path without `.` and `..`; symbolic links are not resolved."""
    return Path(os.path.normpath(path))


def _fail(error: OSError) -> None:
    raise error  # an unreadable folder might hold any file


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes, as hex digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
