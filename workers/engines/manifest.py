"""Checks a model's files against a list of their hashes before anything of them is loaded.

The list is what `sha256sum` writes: a hash and a path a line, the path relative to the folder the list lies in. Every
file that will be loaded has to be in it, so that nobody can add one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from workers.engines.base import EngineDead
from workers.engines.weights import file_sha256

LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
SHARD = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")
"""A GGUF file in pieces: the engine is given the first and loads them all."""


def check(manifest: Path, loaded: Iterable[Path]) -> None:
    """Every file that is one of `loaded`, or lies below it, is listed and unchanged. Raises EngineDead."""
    try:
        listed = read(manifest)
        for root in loaded:
            for path in _files(root):
                if path != _plain(manifest.absolute()):
                    _check(path, listed, manifest)
    except (OSError, UnicodeDecodeError) as error:
        raise EngineDead(f"the files of the model cannot be checked against {manifest}: {error}") from error


def read(manifest: Path) -> dict[Path, str]:
    """The hash of each file. Raises EngineDead for a line that is none, OSError, UnicodeDecodeError."""
    folder, listed = manifest.absolute().parent, dict[Path, str]()
    for number, line in enumerate(manifest.read_text(encoding="utf-8").splitlines(), 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise EngineDead(f"line {number} of {manifest} is no line of sha256sum. Write it anew with sha256sum.")
        listed[_plain(folder / match[2])] = match[1].lower()
    return listed


def shards(path: Path) -> list[Path]:
    """All the files a GGUF file consists of."""
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
    """Raises EngineDead for what is not on this machine: a name that an engine would fetch is not checked here."""
    if root.is_file():
        yield _plain(root.absolute())
        return
    if not root.is_dir():
        raise EngineDead(
            f"{root} is no file or folder of this machine, so its files cannot be checked against a manifest."
        )
    for folder, _, names in os.walk(root.absolute(), followlinks=True, onerror=_fail):
        for name in sorted(names):
            yield _plain(Path(folder) / name)


def _plain(path: Path) -> Path:
    """Without `.` and `..`; links keep their own names."""
    return Path(os.path.normpath(path))


def _fail(error: OSError) -> None:
    """A folder that cannot be read might hold anything."""
    raise error
