"""Multipart uploads: cut anywhere they are the same, what is wrong is refused, and nothing of it stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.files import Allowance, FileLimits, receive
from api.openai.errors import ApiError
from streaming.batches.file_store import FileStore
from streaming.errors import QuotaExceeded

KIND = "multipart/form-data; boundary=cut"
LIMIT = 4096
ROOM = 1 << 40
"""On the disk."""


def form(data: bytes = b"one\ntwo\n", name: str = "in.jsonl", purpose: str = "batch") -> bytes:
    return (
        b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode() + b"\r\n"
        b'--cut\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n" + data + b"\r\n--cut--\r\n"
    )


async def chunks(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def allowed(limit: int = LIMIT) -> Allowance:
    """No quota."""
    return Allowance(Counter(), "t", limit, FileLimits(0, None, ROOM, 0))


async def take(file_store: FileStore, parts: Sequence[bytes], kind: str = KIND, limit: int = LIMIT) -> Any:
    return await receive(chunks(parts), kind, file_store, allowed(limit), 5)


@pytest.fixture
def file_store(tmp_path: Path) -> FileStore:
    file_store = FileStore(tmp_path / "files")
    file_store.prepare()
    return file_store


def left(file_store: FileStore) -> list[Path]:
    return list((file_store.folder / "incoming").iterdir())


async def test_cut_at_every_byte_it_is_the_same(file_store: FileStore) -> None:
    """Boundaries, headers and data may lie across any two chunks."""
    whole = form(b"a\r\n--cu\n--cut\nb")
    for at in range(len(whole)):
        upload = await take(file_store, [whole[:at], whole[at:]])
        upload.incoming.close()
        assert upload.incoming.path.read_bytes() == b"a\r\n--cu\n--cut\nb"
        assert (upload.fields, upload.name, upload.lines) == ({"purpose": "batch"}, "in.jsonl", 3)
        upload.incoming.discard()
    assert left(file_store) == []


@pytest.mark.parametrize(
    ("parts", "kind", "status"),
    [
        *(([sent], KIND, status) for sent, status in (
            (form(b"x" * (LIMIT + 1)), 413), (form()[:-10], 400), (b"nonsense", 400), (form()[:-8] + form(), 400),
            (form().replace(b'name="file"', b'name="other"'), 400), (form(purpose="p" * 2000), 400),
        )),
        *(([form()], kind, 415) for kind in ("multipart/form-data", "application/json", f'{KIND[:-3]}""', KIND[:-3])),
        *(([form()], KIND[:-3] + "A" * length, 400) for length in (256, 257, 10_000)),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_and_leaves_nothing(
    file_store: FileStore, parts: list[bytes], kind: str, status: int
) -> None:
    """The right status, and no file."""
    with pytest.raises(ApiError) as refused:
        await take(file_store, parts, kind)
    assert refused.value.status == status
    assert left(file_store) == []


def with_fields(count: int) -> bytes:
    """A form of so many parts: one is the file, one the purpose."""
    parts = [f'--cut\r\nContent-Disposition: form-data; name="f{number}"\r\n\r\nx\r\n' for number in range(count - 2)]
    return "".join(parts).encode() + form()


def with_header(size: int) -> bytes:
    """A form whose file's part has a header of so many bytes, name and value together."""
    return form().replace(b"Content-Type: application/jsonl", b"X-Long: " + b"x" * (size - len("X-Long")))


@pytest.mark.parametrize(
    ("made", "most", "words"), [(with_fields, 16, "more than 16 parts"), (with_header, 4096, "too long a header")]
)
async def test_parts_and_their_headers_are_bounded(
    file_store: FileStore, made: Callable[[int], bytes], most: int, words: str
) -> None:
    """By ourselves, whatever bounds the parser has: to the last one they are taken, one more is refused."""
    upload = await take(file_store, [made(most)])
    assert upload.name == "in.jsonl"
    upload.incoming.discard()
    with pytest.raises(ApiError, match=words) as refused:
        await take(file_store, [made(most + 1)])
    assert refused.value.status == 400
    assert left(file_store) == []


class Endless:
    """A form that does not end; `given`: how many pieces of its file were asked for."""

    def __init__(self, size: int) -> None:
        self.given, self._size = 0, size

    async def pieces(self) -> AsyncIterator[bytes]:
        yield form()[:-15]
        while True:
            self.given += 1
            yield b"x" * self._size


async def test_the_limit_holds_while_it_is_read(file_store: FileStore) -> None:
    """What comes behind the limit is not even asked for."""
    endless = Endless(1024)
    with pytest.raises(ApiError) as refused:
        await receive(endless.pieces(), KIND, file_store, allowed(), 5)
    assert refused.value.status == 413 and endless.given <= LIMIT // 1024 + 1
    assert left(file_store) == []


async def test_the_quota_holds_while_it_is_read(file_store: FileStore) -> None:
    """What a tenant keeps and what it sends beside this are taken off, and nothing of it is counted behind its end."""
    endless, coming = Endless(100), Counter({"t": 500, "other": 10**9})
    with (
        pytest.raises(QuotaExceeded) as refused,
        Allowance(coming, "t", LIMIT, FileLimits(1000, 2500, ROOM, 0)) as allowance,
    ):
        await receive(endless.pieces(), KIND, file_store, allowance, 5)
    assert (refused.value.name, refused.value.used, refused.value.limit) == ("file_bytes", 1500, 2500)
    assert endless.given <= 1000 // 100 + 1 and coming == {"t": 500, "other": 10**9} and left(file_store) == []


async def test_an_upload_leaves_the_disk_its_free_bytes(file_store: FileStore) -> None:
    """What others send at the same time is taken off."""
    endless, coming = Endless(100), Counter({"other": 500})
    with (
        pytest.raises(ApiError) as refused,
        Allowance(coming, "t", LIMIT, FileLimits(0, None, 2500, 1000)) as allowance,
    ):
        await receive(endless.pieces(), KIND, file_store, allowance, 5)
    assert (refused.value.status, refused.value.code) == (503, "no_capacity")
    assert endless.given <= 1000 // 100 + 1 and coming == {"other": 500} and left(file_store) == []


@pytest.mark.parametrize(("length", "raised"), [(LIMIT + 65_537, ApiError), (66_600, QuotaExceeded), (66_000, None)])
def test_a_length_says_enough(length: int, raised: type[Exception] | None) -> None:
    """The size limit first: what exceeds that never fits."""
    with Allowance(Counter(), "t", LIMIT, FileLimits(1000, 2000, ROOM, 0)) as allowance:
        if raised is None:
            allowance.check_length(length)
            return
        with pytest.raises(raised):
            allowance.check_length(length)


async def test_a_sender_that_stops_is_cut_off(file_store: FileStore) -> None:
    """408, and nothing stays."""

    async def stalled() -> AsyncIterator[bytes]:
        yield form()[:-15]
        await asyncio.Event().wait()

    with pytest.raises(ApiError) as refused:
        await receive(stalled(), KIND, file_store, allowed(), 0.05)
    assert refused.value.status == 408
    assert left(file_store) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc/passwd", "passwd"), ("C:\\\\x\\\\y.jsonl", "y.jsonl"), ("a\x1b[31mb", "a[31mb"), ("..", "file")],
)
async def test_names_are_for_people_only(file_store: FileStore, name: str, shown: str) -> None:
    """No path, nothing a terminal would obey; the bytes lie elsewhere anyway."""
    upload = await take(file_store, [form(name=name)])
    assert upload.name == shown
    assert upload.incoming.path.parent == file_store.folder / "incoming"
    upload.incoming.discard()
