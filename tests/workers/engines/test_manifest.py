"""A model's files are what their manifest lists, or nothing of them is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine import EngineDead
from workers.engines import manifest
from workers.engines.llamacpp.engine import LlamacppEngine
from workers.engines.llamacpp.settings import LlamacppSettings

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "deep/model-00001.safetensors": b"weights"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with its manifest beside it, as sha256sum writes one."""
    for name, data in FILES.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    listed = [f"{hashlib.sha256(data).hexdigest()}  model/{name}\n" for name, data in FILES.items()]
    (tmp_path / "SHA256SUMS").write_text("".join(listed))
    return tmp_path


def refused(folder: Path, *loaded: Path) -> str:
    with pytest.raises(EngineDead) as raised:
        manifest.check(folder / "SHA256SUMS", loaded or [folder / "model"])
    return str(raised.value)


def test_what_is_listed_and_unchanged_is_loaded(folder: Path) -> None:
    """A folder or single files, also with the manifest among them, however the paths are written."""
    manifest.check(folder / "SHA256SUMS", [folder / "model"])
    manifest.check(folder / "SHA256SUMS", [folder / "model" / ".." / "model" / "config.json"])
    manifest.check(folder / "model" / ".." / "SHA256SUMS", [folder])


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_refused(folder: Path, name: str) -> None:
    """Also one of the same length."""
    path = folder / "model" / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert "SHA-256 differs" in refused(folder) and name in refused(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "model" / "modeling_toy.py").write_text("import os"), "nobody vouches"),
        (lambda folder: (folder / "model" / "deep" / ".hidden").write_text(""), "nobody vouches"),
        (lambda folder: (folder / "model" / "link").symlink_to("/etc/hostname"), "nobody vouches"),
        (lambda folder: (folder / "SHA256SUMS").write_text(""), "nobody vouches"),
        (lambda folder: (folder / "model" / "SHA256SUMS").write_text(""), "nobody vouches"),
        (lambda folder: (folder / "SHA256SUMS").write_text("what  model/config.json\n"), "line 1"),
        (lambda folder: (folder / "SHA256SUMS").write_text(f"{'0' * 63}  model/config.json\n"), "line 1"),
        (lambda folder: (folder / "SHA256SUMS").write_text(f"\\{'0' * 64}  model/config.json\n"), "line 1"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "cannot be checked"),
        (lambda folder: (folder / "model" / "deep").rename(folder / "elsewhere"), ""),
    ],
)
def test_what_nobody_vouches_for_is_refused(folder: Path, change: Callable[[Path], object], words: str) -> None:
    """A file that was added, a list that is gone or is none. (A file that is gone is the engine's to miss.)"""
    change(folder)
    if words:
        assert words in refused(folder)
    else:
        manifest.check(folder / "SHA256SUMS", [folder / "model"])


def test_both_forms_of_a_line_are_read(folder: Path) -> None:
    """sha256sum marks a file that it read as binary; other programs write capitals."""
    path = folder / "SHA256SUMS"
    lines = [line.split() for line in path.read_text().splitlines()]
    path.write_text("".join([f"{digest.upper()} *{name}\n" for digest, name in lines]))
    manifest.check(path, [folder / "model"])


def test_what_lies_behind_a_link_or_cannot_be_listed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "modeling_toy.py").write_text("import os")
    (folder / "model" / "more").symlink_to(folder / "other")
    assert "nobody vouches" in refused(folder)
    (folder / "model" / "more").unlink()
    scandir = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert "Permission denied" in refused(folder)


def test_a_name_the_engine_would_fetch_is_refused(folder: Path) -> None:
    """What does not lie here cannot be checked here."""
    assert "no file or folder of this machine" in refused(folder, Path("meta-llama/Llama-3.1-8B"))


def test_every_piece_of_a_file_in_pieces_is_checked(tmp_path: Path) -> None:
    """llama.cpp is given the first and loads the others."""
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in (*names, "m.gguf", "m-00001-of-00002.gguf", "other-00001-of-00003.gguf"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in manifest.shards(tmp_path / names[0])] == names
    assert manifest.shards(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


async def test_llamacpp_opens_no_file_that_differs(folder: Path) -> None:
    """The check comes before anything reads the model file."""
    path, phases = folder / "model" / "config.json", list[str]()
    settings = LlamacppSettings(path=path, manifest=folder / "SHA256SUMS")
    path.write_bytes(b"GGUF, but another")
    with pytest.raises(EngineDead, match="SHA-256 differs"):
        await LlamacppEngine("toy", settings, path).start(lambda _: None, phases.append)
    assert phases == ["checking the model file against its manifest"]
    path.write_bytes(FILES["config.json"])
    with pytest.raises(EngineDead, match="GGUF"):  # it is as listed, and no model
        await LlamacppEngine("toy", settings, path).start(lambda _: None, phases.append)


@pytest.mark.parametrize("changed", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "sql.gguf", "law.gguf"])
async def test_llamacpp_opens_no_shard_and_no_adapter_that_differs(tmp_path: Path, changed: str) -> None:
    """Nor an adapter that is not there, whatever the manifest says of it."""
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "sql.gguf", "law.gguf"]
    for name in names:
        (tmp_path / name).write_text(name)
    listed = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in names]
    (tmp_path / "SHA256SUMS").write_text("".join(listed))
    path, adapters = tmp_path / names[0], {name: str(tmp_path / f"{name}.gguf") for name in ("sql", "law")}

    async def problem(**more: str) -> str:
        settings = LlamacppSettings(path=path, manifest=tmp_path / "SHA256SUMS")
        with pytest.raises(EngineDead) as raised:
            await LlamacppEngine("toy", settings, path, adapters | more).start(lambda _: None, lambda _: None)
        return str(raised.value)

    assert "SHA-256" not in await problem()
    (tmp_path / changed).write_text("another")
    assert "SHA-256 differs" in await problem()
    (tmp_path / changed).write_text(changed)
    assert "no file or folder" in await problem(tax=str(tmp_path / "none.gguf"))
