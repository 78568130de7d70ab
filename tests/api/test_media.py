"""Images, recordings and documents in requests: what is refused, what a model's server gets, and what is kept."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from fake_upstream import ANSWER, MODEL, FakeUpstream, Fault, serving
from flow import until
from http_serving import QuietHandler, serving_http
from sim_worker import Running, has_deltas, lose_lease, recorder
from upstream_bench import FAST
from upstream_worker import StartUpstream, start_upstream

from api.openai.content import input_rules
from api.openai.media import MediaReader, media_type
from api.settings import ApiSettings, MediaSettings
from penstock.content import ContentSettings
from streaming.fleet.settings import ModelSettings
from streaming.jobs.job import Job
from streaming.jobs.media import MediaStore
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import QuotaSettings
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from workers import claimer
from workers.engines.upstream.settings import UpstreamSettings

__all__ = ["recorder", "start_upstream"]  # fixtures

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
GIF = b"GIF89a" + b"\0" * 40
WAV = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40
MP3 = b"ID3\x04" + b"\0" * 40
PDF = b"%PDF-1.7\n" + b"\xff\0" * 30
TEXT = b"It is 42."


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64(data)}"


def image(data: bytes = PNG, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data, kind), **more}}


def audio(data: bytes = WAV, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64(data), "format": form}}


def document(data: bytes = PDF, kind: str = "application/pdf") -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": url(data, kind), "filename": "a.pdf"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": list(parts)}], **more}


class Place:
    """An API process, a worker, and the server that it is in front of."""

    def __init__(self, api: LocalApi, start: StartUpstream, upstream: FakeUpstream) -> None:
        self.api, self._start, self.upstream = api, start, upstream
        self.inputs: tuple[Any, ...] = ("images", "audio", "files", "transcribe", "draw")

    async def work(self) -> None:
        settings = UpstreamSettings(**FAST, urls=(self.upstream.url,), name=MODEL, abilities=self.inputs)  # type: ignore[arg-type]
        running, services = await self._start(settings, model="sim"), self.api.services
        self.running: Running = running
        services.models = {"sim": ModelSettings(engine="upstream")}
        await services.fleet.publish_card(running.worker._card)
        services.cards = await services.fleet.cards()

    async def chat(self, *parts: dict[str, Any], **more: Any) -> Any:
        return await self.api.post("/v1/chat/completions", said(*parts, **more))

    async def refused(self, *parts: dict[str, Any], **more: Any) -> tuple[str, str]:
        """The field and the words of a refusal."""
        reply = await self.chat(*parts, **more)
        error = reply.json()["error"]
        assert reply.status_code == 400, reply.text
        return error["param"], error["message"]

    @property
    def got(self) -> Any:
        """The content of the last message that the server got."""
        return self.upstream.sent[-1].body["messages"][-1]["content"]

    async def kept(self) -> list[str]:
        """The media that the store has."""
        redis = self.api.services.store_client.redis
        return [key.decode() async for key in redis.scan_iter("penstock:{*}:media:*")]

    async def status_after_a_sweep(self, job: str, status: str) -> bool:
        await Reaper(self.api.services.store_client).sweep()
        return bool((await self.api.client.get(f"/v1/jobs/{job}")).json()["status"] == status)


@pytest.fixture
async def place(wire: RedisClient, start_upstream: StartUpstream, tmp_path: Path) -> AsyncIterator[Place]:
    upstream = FakeUpstream("vllm")
    keys = {"a": key_of("sk-a", "a"), "b": key_of("sk-b", "b")}
    async with (
        serving(upstream),
        api_in_process(RedisClient.open(wire.settings), keys, files=tmp_path) as api,
    ):
        api.client.headers["Authorization"] = "Bearer sk-a"
        place = Place(api, start_upstream, upstream)
        await place.work()
        yield place


def set_media(place: Place, **settings: Any) -> None:
    services = place.api.services
    services.media = MediaReader(MediaSettings(**settings), services.store_client, services.file_store)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_gets_all_as_it_was_sent(place: Place, stream: bool) -> None:
    """Images with their details, recordings and documents, in their places; nothing stays once the job has ended."""
    parts = [text("what"), image(detail="low"), audio(), audio(MP3, "mp3"), document(), text("is it?")]
    reply = await place.chat(*parts, max_tokens=3, stream=stream)
    assert reply.status_code == 200 and ANSWER[2] in reply.text
    assert place.got == parts and await place.kept() == []


OURS = {"uuid": "anothers image", "aws_key": "x"}


async def test_parts_bring_no_field_that_is_never_passed_on(place: Place) -> None:
    """Such as vLLM's key of an image that another tenant sent; nor do messages, calls and tools. All are named."""
    function: dict[str, Any] = {"name": "f", **OURS}
    called: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"} | OURS} | OURS
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [text("be") | OURS | {"fine": 1}], **OURS},
        {"role": "assistant", "tool_calls": [called]} | OURS,
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        {"role": "user", "content": [text("what") | OURS, image() | OURS]},
    ]
    tools = [{"type": "function", "function": function} | OURS]
    asked = {"model": "sim", "messages": messages, "tools": tools, "max_tokens": 1}
    reply = await place.api.post("/v1/chat/completions", asked)
    assert reply.status_code == 200, reply.text
    body = place.upstream.sent[-1].body
    sent = json.dumps([body["messages"], body["tools"]])
    assert '"fine": 1' in sent and not [name for name in OURS if f'"{name}"' in sent]
    ignored = reply.headers["x-ignored-fields"].split(", ")
    inner = ("", "content[].", "tool_calls[].", "tool_calls[].function.")
    assert {f"messages[].{path}uuid" for path in inner} | {"tools[].uuid", "tools[].function.uuid"} <= set(ignored)
    assert not [name for name in ignored if "fine" in name]


async def test_equal_bytes_are_kept_once_and_beside_the_record(place: Place) -> None:
    place.upstream.open.clear()
    job = (await place.api.post("/v1/jobs", said(image(), image(GIF, "image/gif"), image(), n=2, max_tokens=3))).json()
    (key,) = await place.kept()
    redis, services = place.api.services.store_client.redis, place.api.services
    assert await redis.hgetall(key) == {b"0": PNG, b"1": GIF}
    record = await services.job_reader.outline(job["id"])
    assert record.job.media and b64(PNG) not in str(await redis.hgetall(key.replace("media", "job")))
    place.upstream.open.set()
    ended = (await place.api.client.get(f"/v1/jobs/{job['id']}?wait=20&include=input")).json()
    assert ended["status"] == "completed" and len(ended["result"]["choices"]) == 2
    assert [part["image_url"]["url"] for part in ended["input"]["messages"][0]["content"]] == [
        "media:0", "media:1", "media:0",
    ]  # fmt: skip


FIRST_BYTES = [
    (PNG, "image/png"), (b"\xff\xd8\xff\xe0\0\x10JFIF", "image/jpeg"), (GIF, "image/gif"), (b"GIF87a\0", "image/gif"),
    (b"RIFF\x24\0\0\0WEBPVP8 ", "image/webp"), (WAV, "audio/wav"), (PDF, "application/pdf"), (MP3, "audio/mpeg"),
    *((bytes([0xFF, second]) + bytes(9), "audio/mpeg") for second in (0xFB, 0xFA, 0xF3, 0xF2, 0xE3)),
    (b"fLaC\0\0\0\x22", "audio/flac"), (b"OggS\0\x02", "audio/ogg"), (b"\0\0\0\x20ftypM4A ", "audio/mp4"),
    (b"\x1aE\xdf\xa3\x9fB", "audio/webm"),
    *((other, "") for other in (b"", b"\xff", b"hello", b"RIFF\x24\0\0\0AVI ", b"GIF88a", b"ftypM4A ",
                               b"\xff\xf1\x50", b"\xff\xfd\x90", b"\xff\xfe\0")),
]  # fmt: skip


@pytest.mark.parametrize(("data", "kind"), FIRST_BYTES)
def test_the_first_bytes_say_what_it_is(data: bytes, kind: str) -> None:
    """ADTS, other layers of MPEG and byte order marks are no MP3."""
    assert media_type(data) == kind


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (image(GIF), "image_url.url", "first bytes are of image/gif"),
    (image(b"plain"), "image_url.url", "is none of image/png"),
    (image(PDF, "application/pdf"), "image_url.url", "is none of image/png"),
    (audio(MP3), "input_audio.data", "first bytes are of audio/mpeg"),
    (audio(PNG), "input_audio.data", "is none of audio/wav"),
    (document(PNG), "file.file_data", "is none of application/pdf"),
    (document(b"\xff\xfe\0", "text/plain"), "file.file_data", "is none of application/pdf"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%%"}}, "image_url.url", "valid base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url.url", "data: URL with base64"),
    ({"type": "image_url", "image_url": {"url": "media:0"}}, "image_url.url", "data: URL"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url", "data: URL"),
    ({"type": "input_audio", "input_audio": {"data": "media:0", "format": "wav"}}, "input_audio.data", "base64"),
    ({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, "image_url.url", "[media] links"),
    ({"type": "image_url", "image_url": {"url": "https://a.example/".ljust(8193, "x")}}, "image_url.url", "8192"),
    ({"type": "file", "file": {"file_id": "file-000"}}, "file.file_id", "names no file of yours"),
    ({"type": "file", "file": {}}, "file", "file_data or file_id"),
    ({"type": "input_audio"}, "input_audio", "is required"),
]


@pytest.mark.parametrize(("part", "field", "words"), REFUSED)
async def test_what_is_wrong_is_named(place: Place, part: dict[str, Any], field: str, words: str) -> None:
    param, message = await place.refused(text("a"), part)
    assert param.startswith("messages[0].content[1]") and param.endswith(field) and words in message
    assert place.upstream.sent == [] and await place.kept() == []


async def test_bounds_of_size_and_count(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names its setting. A body may be larger than others only by its media."""
    set_media(place, max_bytes=1024, max_request_bytes=1500, max_parts=3)
    assert "[media] max_bytes" in (await place.refused(image(PNG + bytes(1000))))[1]
    assert "[media] max_parts" in (await place.refused(*[image()] * 4))[1]
    form = {"file": ("a.png", PNG + bytes(1000))}
    file = (await place.api.client.post("/v1/files", files=form, data={"purpose": "vision"})).json()["id"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", None)  # it may be larger than the memory
        assert "[media] max_bytes" in (await place.refused({"type": "file", "file": {"file_id": file}}))[1]
    two = [image(PNG + bytes([each]) * 800) for each in (1, 2)]
    assert "[media] max_request_bytes" in (await place.refused(*two))[1]
    assert (await place.chat(image(), image(), image(), max_tokens=1)).status_code == 200
    set_media(place)
    place.api.services.settings = ApiSettings(body_limit=4096)
    assert (await place.chat(image(PNG + bytes(9000)), max_tokens=1)).status_code == 200
    for parts in ([image(), text("a" * 5000)], [text("a" * 5000)]):
        assert (await place.chat(*parts)).status_code == 413
    place.api.services.cards = {}
    assert (await place.chat(image(PNG + bytes(9000)), max_tokens=1)).status_code == 413


async def test_large_bodies_share_the_memory_of_a_process(place: Place) -> None:
    """Beside others one may wait; alone it is taken, and is counted until its job is accepted, or it is refused."""
    large, services = image(PNG + bytes(2 << 20)), place.api.services
    services.large_bytes = others = 127 << 20
    for _ in range(2):
        reply = await place.chat(large, max_tokens=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            503,
            "no_capacity",
        ) and "Retry-After" in reply.headers
        reply = await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV + bytes(3 << 20))})
        assert reply.status_code == 503 and services.large_bytes == others
    assert (await place.chat(image(), max_tokens=1)).status_code == 200
    services.large_bytes = 0
    place.upstream.open.clear()
    assert (await place.chat(large, n=0)).status_code == 400 and services.large_bytes == 0
    job = await place.api.post("/v1/jobs", said(large, max_tokens=1))
    assert job.status_code == 202 and services.large_bytes == 0
    place.upstream.open.set()


@pytest.mark.parametrize(("lacks", "part"), [("images", image()), ("audio", audio()), ("files", document())])
async def test_a_model_without_it_is_said_so(place: Place, lacks: str, part: dict[str, Any]) -> None:
    place.inputs = tuple({"images", "audio", "files"} - {lacks})
    await place.work()
    param, message = await place.refused(text("a"), part)
    assert param == "messages" and lacks in message and "GET /v1/models" in message
    card = (await place.api.client.get("/v1/models/sim")).json()["capabilities"]
    assert [name for name in ("images", "audio", "files") if not card[name]] == [lacks]


async def test_plain_text_becomes_a_part_of_the_conversation(place: Place) -> None:
    """So every model reads it."""
    place.inputs = ()
    await place.work()
    for kind in ("text/plain", "text/markdown", "application/json"):
        assert (await place.chat(text("Read: "), document(TEXT, kind), max_tokens=1)).status_code == 200
        assert place.got == "Read: It is 42."


async def uploaded(place: Place, name: str, data: bytes) -> str:
    made = await place.api.client.post("/v1/files", data={"purpose": "user_data"}, files={"file": (name, data)})
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


async def test_a_document_of_text_counts_as_its_text(place: Place) -> None:
    """Once it is read, whatever was estimated before: its turn, its limits and the bytes it may write go by it."""
    place.running.worker._claimer.hold(60_000)
    redis, sizes = place.api.services.store_client.redis, list[int]()
    for part in (text("a" * 40_000), document(b"a" * 40_000, "text/plain"), image()):
        job = (await place.api.post("/v1/jobs", said(part, max_tokens=1))).json()["id"]
        sizes.append(int((await redis.hget(partition_key(0, "job", job), "order")).split(b":")[0]))
    assert 9_000 < sizes[0] == sizes[1] and sizes[2] < 2_000


async def test_texts_of_files_are_bounded_as_a_body_is(place: Place) -> None:
    """However many parts name one, and with the text around them. Rules look at large ones in a thread."""
    part = {"type": "file", "file": {"file_id": await uploaded(place, "a.txt", b"ab " * 1000)}}
    assert (await place.chat(part, part, max_tokens=1)).status_code == 200
    place.api.services.settings = ApiSettings(body_limit=8000)
    param, message = await place.refused(*[part] * 3)
    assert param == "messages[0].content[2].file.file_id" and "8000 bytes of text" in message
    assert (await place.chat(part, part, text("a" * 2500))).status_code == 413
    looked: list[int] = []
    place.api.services.content = rules = input_rules(
        {"r": ContentSettings(deny=("falcon",), default=True)}, {}, place.api.services.metrics
    )
    assert rules is not None
    checked = rules.checked
    rules.checked = lambda job, looks=0: (looked.append(threading.get_ident()), checked(job, looks))[1]  # type: ignore
    place.api.services.settings = ApiSettings()
    assert (await place.chat(part, part, part, max_tokens=1)).status_code == 200
    assert looked and threading.get_ident() not in looked


async def test_a_file_is_its_tenants(place: Place) -> None:
    """By its id it may stand for an image or a document; another tenant has no such file."""
    ids = []
    for name, data in (("a.png", PNG), ("b.pdf", PDF)):
        sent = {"file": (name, data)}
        made = await place.api.client.post("/v1/files", data={"purpose": "user_data"}, files=sent)
        assert made.status_code == 200, made.text
        ids.append(made.json()["id"])
    parts = [{"type": "input_image", "file_id": ids[0]}, {"type": "input_file", "file_id": ids[1]}]
    asked = {"model": "sim", "input": [{"role": "user", "content": parts}], "max_output_tokens": 1}
    assert (await place.api.post("/v1/responses", asked)).status_code == 200
    shown = {"type": "file", "file": {"filename": "b.pdf", "file_data": url(PDF, "application/pdf")}}
    assert place.got == [image(), shown]
    reply = await place.api.post("/v1/responses", asked, Authorization="Bearer sk-b")
    assert reply.status_code == 400 and "names no file of yours" in reply.text


async def test_a_response_is_continued_with_its_images(place: Place) -> None:
    """Also one that refers to an item; another tenant cannot. Without `store` nothing stays."""
    part = {"type": "input_image", "image_url": url(PNG), "detail": "high"}
    asked = {"model": "sim", "input": [{"role": "user", "content": [part]}], "max_output_tokens": 2}
    first = (await place.api.post("/v1/responses", asked)).json()
    assert len(await place.kept()) == 1
    items = (await place.api.client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"] == [{"type": "input_image", "detail": "high", "image_url": None, "file_id": None}]
    then = {"model": "sim", "input": "and?", "previous_response_id": first["id"], "max_output_tokens": 2}
    for _ in range(2):
        second = await place.api.post("/v1/responses", then)
        assert second.status_code == 200, second.text
        assert place.upstream.sent[-1].body["messages"][0]["content"] == [image(detail="high")]
        then["previous_response_id"] = second.json()["id"]
    named = {"model": "sim", "input": [{"type": "item_reference", "id": items[0]["id"]}], "max_output_tokens": 2}
    assert (await place.api.post("/v1/responses", named)).status_code == 200
    assert place.got == [image(detail="high")]
    for body in (then, named):
        assert (await place.api.post("/v1/responses", body, Authorization="Bearer sk-b")).status_code in (400, 404)
    for each in await place.kept():
        await place.api.services.store_client.redis.delete(each)
    lost = await place.api.post("/v1/responses", then)
    assert lost.status_code == 400 and "no longer kept" in lost.text
    assert (await place.api.post("/v1/responses", {**asked, "store": False})).status_code == 200
    assert await place.kept() == []


async def test_a_deleted_response_leaves_nothing(place: Place) -> None:
    part = {"type": "input_image", "image_url": url(PNG)}
    asked = {"model": "sim", "input": [{"role": "user", "content": [part]}], "max_output_tokens": 2}
    made = (await place.api.post("/v1/responses", asked)).json()
    assert (await place.api.client.delete(f"/v1/responses/{made['id']}")).status_code == 200
    assert await place.kept() == []


async def test_a_conversation_keeps_no_images_and_says_so(place: Place) -> None:
    part = {"role": "user", "content": [{"type": "input_image", "image_url": url(PNG)}]}
    refused = await place.api.post("/v1/conversations", {"items": [part]})
    assert refused.status_code == 400 and "previous_response_id" in refused.text
    made = (await place.api.post("/v1/conversations", {})).json()["id"]
    reply = await place.api.post("/v1/responses", {"model": "sim", "input": [part], "conversation": made})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


async def test_a_message_has_images_and_documents(place: Place) -> None:
    """As blocks of Anthropic's API, by each kind of source; a server gets them as in a chat."""
    made = await place.api.client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("b.pdf", PDF)})
    link = "https://a.example/x.png"
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(PNG)}},
        {"type": "image", "source": {"type": "url", "url": link}},
        {"type": "document", "source": {"type": "file", "file_id": made.json()["id"]}, "title": "B"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is 42."}},
        {"type": "text", "text": "Well?"},
    ]
    asked = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
    refused = await place.api.post("/v1/messages", asked)
    assert refused.status_code == 400 and "[media] links" in refused.text
    set_media(place, links="pass")
    reply = await place.api.post("/v1/messages", asked)
    assert reply.status_code == 200, reply.text
    pdf = {"type": "file", "file": {"filename": "B", "file_data": url(PDF, "application/pdf")}}
    linked = {"type": "image_url", "image_url": {"url": link}}
    assert place.got == [image(), linked, pdf, text("It is 42."), text("Well?")]
    blocks[0]["source"] = {"type": "url", "url": "media:0"}
    refused = await place.api.post("/v1/messages", asked)
    assert refused.status_code == 400 and "data: URL" in refused.text


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(PNG)}}
BOOK = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is 42."}}


def tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def result(call: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": list(blocks)}


async def test_a_tool_returns_images_and_documents(place: Place) -> None:
    """In all dialects that have them, a server gets media behind all results, in the turn of the user."""
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    results = [result("a", text("shot:"), BLOCK, BOOK), result("b", text("none"))]
    begun = [{"role": "user", "content": "go"}, {"role": "assistant", "content": calls}]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {"model": "sim", "max_tokens": 2, "tools": tools}
    for last, got in (([*results, text("Well?")], [image(), text("Well?")]), (results, [image()])):
        messages = [*begun, {"role": "user", "content": last}]
        reply = await place.api.post("/v1/messages", asked | {"messages": messages})
        assert reply.status_code == 200, reply.text
        sent = [(each["role"], each["content"]) for each in place.upstream.sent[-1].body["messages"][2:]]
        assert sent == [("tool", "shot:It is 42."), ("tool", "none"), ("user", got)]
    for fields in ({}, {"tools": tools}):
        counted = await place.api.post("/v1/messages/count_tokens", {"model": "sim", "messages": messages, **fields})
        usage = (await place.api.post("/v1/messages", asked | {"messages": messages, "tools": None, **fields})).json()
        assert counted.json() == {"input_tokens": tokens(usage["usage"])}, counted.text
    output = [{"type": "input_text", "text": "shot:"}, {"type": "input_image", "image_url": url(PNG)}]
    items: list[Any] = [
        {"role": "user", "content": "go"},
        *({"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"),
        {"type": "function_call_output", "call_id": "a", "output": output},
        {"type": "function_call_output", "call_id": "b", "output": "none"},
        {"role": "developer", "content": "Be brief."},
    ]
    made = await place.api.post("/v1/responses", {"model": "sim", "max_output_tokens": 2, "input": items})
    assert made.status_code == 200, made.text
    sent = [(each["role"], each["content"]) for each in place.upstream.sent[-1].body["messages"][-4:]]
    assert sent == [("tool", "shot:"), ("tool", "none"), ("user", [image()]), ("system", "Be brief.")]
    shown = (await place.api.client.get(f"/v1/responses/{made.json()['id']}/input_items?order=asc")).json()["data"]
    assert [each.get("role", each["type"]) for each in shown[3:]] == [
        *["function_call_output"] * 2,
        "user",
        "developer",
    ]


async def test_a_model_that_sees_nothing_says_so_of_results_too(place: Place) -> None:
    place.inputs = ()
    await place.work()
    for blocks, status in (([BLOCK], 400), ([BOOK], 200)):
        messages = [{"role": "user", "content": [result("a", *blocks)]}]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = await place.api.post(path, {"model": "sim", "max_tokens": 2, "messages": messages})
            assert reply.status_code == status and ("sees no images" in reply.text) is (status == 400), reply.text


async def test_links_are_fetched_only_from_where_they_may_lead(place: Place) -> None:
    """Public addresses, or those of the settings; a redirect too."""
    shown: list[tuple[int, bytes, dict[str, str]]] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name http.server looks for
            status, body, headers = shown.pop(0)
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        there = f"http://127.0.0.1:{server.server_port}/a.png"
        link = {"type": "image_url", "image_url": {"url": there}}
        moved = (302, b"", {"location": "/b.png"})
        here = {"links": "fetch", "networks": ("127.0.0.0/8",)}
        set_media(place, links="fetch")
        assert "not public" in (await place.refused(link))[1]
        set_media(place, **here)
        for shown in ([(200, PNG, {})], [moved, (200, PNG, {})]):
            assert (await place.chat(link, max_tokens=1)).status_code == 200 and shown == []
            assert place.got == [image()]
        for shown, words in (
            ([(200, PDF, {})], "is none of image/png"),
            ([(404, b"", {})], "answered 404"),
            ([moved] * 4, "redirects"),
            ([(302, b"", {"location": "http://[::1]:1/"})], "not public"),
            ([(302, b"", {"location": "file:///etc/passwd"})], "could not be fetched"),
        ):
            assert words in (await place.refused(link))[1] and shown == []
        set_media(place, **here, max_bytes=1024)
        shown = [(200, PNG + bytes(2000), {})]
        assert "[media] max_bytes" in (await place.refused(link))[1]
        set_media(place, links="pass")
        assert (await place.chat(link, max_tokens=1)).status_code == 200
        assert place.got == [link]


MALFORMED = ["http://[::1", "http://a:99999/", "http://ex\u00e4mple.com/\u00fc.png", "http://a..b/", "http://\x00/"]


@pytest.mark.parametrize("link", MALFORMED)
async def test_a_malformed_link_is_refused(place: Place, link: str) -> None:
    set_media(place, links="fetch")
    part = {"type": "image_url", "image_url": {"url": link}}
    param, message = await place.refused(text("a"), part)
    assert param.endswith("image_url.url") and "could not be fetched" in message


async def test_links_of_one_tenant_leave_places_to_others(place: Place) -> None:
    """They are followed at once, within one time; those of another tenant meanwhile."""
    held: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n")
        if b"slow" in asked:
            held.append(writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PNG) + PNG)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        links = [{"type": "image_url", "image_url": {"url": f"{here}/slow/{at}"}} for at in range(30)]
        set_media(place, links="fetch", networks=("127.0.0.0/8",), link_timeout_s=2)
        slow = [asyncio.create_task(place.chat(*links, max_tokens=1)) for _ in range(8)]
        await until(lambda: len(held) >= 4)
        asked = said({"type": "image_url", "image_url": {"url": f"{here}/a.png"}}, max_tokens=1)
        assert (await place.api.post("/v1/chat/completions", asked, Authorization="Bearer sk-b")).status_code == 200
        assert not any(each.done() for each in slow)
        answers = await asyncio.gather(*slow)
        assert {each.status_code for each in answers} == {400, 503}
        assert all("Retry-After" in each.headers for each in answers if each.status_code == 503)
    finally:
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("pace_s", [0.0, 0.02])
async def test_a_link_that_does_not_end_is_given_up(place: Place, pace_s: float) -> None:
    """One that brings much after `max_bytes`, of which no more is read; one that brings little, after its time."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + PNG)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"x" * (1 if pace_s else 65536))
                await writer.drain()
                await asyncio.sleep(pace_s)
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        set_media(place, links="fetch", networks=("127.0.0.0/8",), link_timeout_s=0.5 if pace_s else 30)
        there = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
        for parts in (1, 3):
            ended.clear()
            links = [{"type": "image_url", "image_url": {"url": f"{there}?{at}"}} for at in range(parts)]
            param, message = await place.refused(*links)
            assert param.endswith("image_url.url")
            assert ("within 0.5 s" if pace_s else "[media] max") in message
            await asyncio.wait_for(ended.wait(), 20)
    finally:
        server.close()
        await server.wait_closed()


async def test_a_bad_part_is_refused_before_the_links_behind_it_answer(place: Place) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until its client leaves
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        set_media(place, links="fetch", networks=("127.0.0.0/8",), link_timeout_s=60)
        there = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
        bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}
        link = {"type": "image_url", "image_url": {"url": there}}
        async with asyncio.timeout(30):
            assert "not valid base64" in (await place.refused(bad, link))[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_a_key_covers_its_images(place: Place) -> None:
    """The same request is one job; another image is another request."""
    first = await place.api.post("/v1/jobs", said(image(), max_tokens=1), Idempotency_Key="k")
    again = await place.api.post("/v1/jobs", said(image(), max_tokens=1), Idempotency_Key="k")
    assert first.json()["id"] == again.json()["id"]
    other = await place.api.post("/v1/jobs", said(image(GIF, "image/gif"), max_tokens=1), Idempotency_Key="k")
    assert other.status_code in (409, 422)


async def test_media_count_as_bytes_of_their_request(place: Place) -> None:
    """In quotas, and in the share of the store."""
    place.api.services.general_quotas = QuotaSettings(job_bytes=5000)
    assert (await place.chat(image(), max_tokens=1)).status_code == 200
    reply = await place.chat(image(PNG + bytes(5000)), max_tokens=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "quota_exceeded")
    assert await place.kept() == []


LATER = {"delay_ms": 3_600_000}


@pytest.mark.parametrize("queue", [{}, LATER, {"max_queue_ms": 1}])
async def test_media_go_with_a_job_that_ends_before_it_began(place: Place, queue: dict[str, Any]) -> None:
    """Cancelled, also before its time, or expired; and so do the bytes that were counted for it."""
    place.running.worker._claimer.hold(60_000)
    job = (await place.api.post("/v1/jobs", said(image(), max_tokens=1, queue=queue))).json()["id"]
    assert len(await place.kept()) == 1
    if "max_queue_ms" in queue:
        await until(lambda: place.status_after_a_sweep(job, "expired"))
    else:
        assert (await place.api.post(f"/v1/jobs/{job}/cancel", {})).json()["status"] == "cancelled"
    assert await place.kept() == []


async def test_media_of_a_running_job_go_with_its_cancel(place: Place) -> None:
    place.upstream.open.clear()
    job = (await place.api.post("/v1/jobs", said(image(), max_tokens=9))).json()["id"]
    await until(lambda: bool(place.upstream.sent))
    await place.api.post(f"/v1/jobs/{job}/cancel", {})
    assert (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()["status"] == "cancelled"
    assert await place.kept() == []


async def test_a_job_for_later_has_its_media_at_its_time(place: Place) -> None:
    job = (await place.api.post("/v1/jobs", said(image(), max_tokens=1, queue={"delay_ms": 300}))).json()["id"]
    assert len(await place.kept()) == 1 and place.upstream.sent == []
    await until(lambda: place.status_after_a_sweep(job, "completed"))
    assert place.got == [image()] and await place.kept() == []


async def test_content_rules_look_at_the_texts_around(place: Place) -> None:
    rules = {"r": ContentSettings(deny=("falcon", b64(PNG)[20:60]), action="redact", default=True)}
    place.api.services.content = input_rules(rules, {}, place.api.services.metrics)
    parts = [text("a falcon"), image(), document(b"no falcon", "text/plain")]
    assert (await place.chat(*parts, max_tokens=1)).status_code == 200
    assert place.got == [text("a [redacted: r]"), image(), text("no [redacted: r]")]


async def test_another_worker_goes_on_with_the_image(place: Place) -> None:
    """After the loss of the first one in the middle of the answer: with what was shown, and the image."""
    place.upstream.step_s = 0.02
    job = (await place.api.post("/v1/jobs", said(image(), max_tokens=60))).json()["id"]
    store = place.api.services.store_client
    await until(lambda: has_deltas(store, job, 5))
    await lose_lease(store, place.running.worker)
    await place.work()
    ended = (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()
    assert ended["status"] == "completed"
    assert ended["result"]["choices"][0]["message"]["content"] == "".join(ANSWER[:60])
    first, last = place.upstream.sent[0].body["messages"], place.upstream.sent[-1].body["messages"]
    assert len(place.upstream.sent) == 2 and first[0] == last[0]
    assert last[0]["content"] == [image()] and last[1]["role"] == "assistant"


async def test_lost_media_end_the_job(place: Place) -> None:
    """With words for its owner."""
    place.running.worker._claimer.hold(60_000)
    job = (await place.api.post("/v1/jobs", said(image(), max_tokens=1))).json()["id"]
    (key,) = await place.kept()
    await place.api.services.store_client.redis.delete(key)
    place.running.worker._claimer.hold(0)
    ended = (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "media_lost")
    assert place.upstream.sent == []


async def test_a_text_waits_for_no_media_that_are_claimed_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, read = asyncio.Event(), MediaStore.restored

    async def restored(store: MediaStore, job: Job) -> Job:
        await here.wait()
        return await read(store, job)

    monkeypatch.setattr(MediaStore, "restored", restored)
    place.running.worker._claimer.hold(60_000)
    slow = (await place.api.post("/v1/jobs", said(image(), max_tokens=1))).json()["id"]
    plain = (await place.api.post("/v1/jobs", said(text("hi"), max_tokens=1))).json()["id"]
    place.running.worker._claimer.hold(0)
    for job in (plain, slow):
        ended = (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()
        assert ended["status"] == "completed"
        here.set()


async def test_a_worker_has_the_media_of_few_jobs_in_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones are loaded once others have ended; one that is cancelled meanwhile ends before."""
    running, read = list[int](), MediaStore.restored

    async def restored(store: MediaStore, job: Job) -> Job:
        running.append(place.running.worker.running)
        return await read(store, job)

    monkeypatch.setattr(MediaStore, "restored", restored)
    monkeypatch.setattr(claimer, "MAX_MEDIA_BYTES", 2 * len(PNG) + 10)
    place.upstream.open.clear()
    place.running.worker._claimer.hold(60_000)
    jobs = [(await place.api.post("/v1/jobs", said(image(), max_tokens=1))).json()["id"] for _ in range(6)]
    place.running.worker._claimer.hold(0)
    await until(lambda: len(place.upstream.sent) == 2)
    assert (await place.api.client.post(f"/v1/jobs/{jobs[2]}/cancel")).status_code == 200
    ended = (await place.api.client.get(f"/v1/jobs/{jobs[2]}?wait=20")).json()
    assert ended["status"] == "cancelled" and len(place.upstream.sent) == 2
    place.upstream.open.set()
    for job in jobs[:2] + jobs[3:]:
        ended = (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()
        assert ended["status"] == "completed"
    assert len(running) == 6 and [each for each in running if each > 1] == [2], running


async def test_a_drain_waits_for_no_room_for_media(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker has claimed, and has no room for, it puts back."""
    monkeypatch.setattr(claimer, "MAX_MEDIA_BYTES", len(PNG))
    place.upstream.open.clear()
    place.running.worker._claimer.hold(60_000)
    jobs = [(await place.api.post("/v1/jobs", said(image(), max_tokens=1))).json()["id"] for _ in range(2)]
    place.running.worker._claimer.hold(0)
    await until(lambda: len(place.upstream.sent) == 1)
    place.running.stop.set()

    async def is_put_back() -> bool:
        return bool((await place.api.client.get(f"/v1/jobs/{jobs[1]}")).json()["status"] == "queued")

    await until(is_put_back)
    place.upstream.open.set()
    await place.running.task
    await place.work()
    for job in jobs:
        ended = (await place.api.client.get(f"/v1/jobs/{job}?wait=20")).json()
        assert (ended["status"], ended["attempts"]) == ("completed", 1 + jobs.index(job)), ended


# --- transcripts and images ------------------------------------------------------------------------------------------


async def form(place: Place, path: str, files: Any, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    data = {"model": "sim"} | fields
    return await place.api.client.post(path, data=data, files=files, headers=headers)


TRANSCRIPTS = "/v1/audio/transcriptions"


async def test_a_recording_is_written_down(place: Place) -> None:
    """The server gets the fields and the file; nothing stays."""
    fields = {"language": "en", "temperature": "0.5", "timestamp_granularities[]": ["word"], "prompt": "names: Ada"}
    reply = await form(place, TRANSCRIPTS, {"file": ("a b.wav", WAV)}, **fields)
    assert reply.status_code == 200 and reply.json() == {"text": "hello"} and reply.headers["x-job-id"]
    sent = place.upstream.sent[-1]
    assert sent.path == TRANSCRIPTS and sent.body == {
        "model": MODEL, "language": "en", "temperature": "0.5", "timestamp_granularities[]": "word",
        "prompt": "names: Ada", "file": ("a b.wav", "audio/wav", WAV),
    }  # fmt: skip
    assert await place.kept() == []
    assert (await form(place, "/v1/audio/translations", {"file": ("a.mp3", MP3)})).status_code == 200
    assert place.upstream.sent[-1].path == "/v1/audio/translations"


@pytest.mark.parametrize("kind", ["text", "srt", "vtt", "verbose_json"])
async def test_a_transcript_has_the_form_that_was_asked_for(place: Place, kind: str) -> None:
    """As it is, where that is no JSON; a job's result has its text."""
    place.upstream.made = "1\n00:00 --> 00:01\nhello" if kind != "verbose_json" else {"text": "hello", "words": []}
    reply = await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV)}, response_format=kind)
    if kind == "verbose_json":
        assert reply.json() == place.upstream.made
        return
    assert reply.text == place.upstream.made and reply.headers["content-type"].startswith("text/plain")
    job = await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"Prefer": "respond-async"}, response_format=kind)
    assert job.status_code == 202
    ended = (await place.api.client.get(f"/v1/jobs/{job.json()['id']}?wait=20")).json()
    assert ended["status"] == "completed" and ended["result"] == {"text": place.upstream.made}


async def test_images_are_drawn_and_edited(place: Place) -> None:
    """Also as jobs; two servers' breaks cost nothing but time."""
    place.upstream.made = {"created": 1, "data": [{"b64_json": b64(PNG)}], "usage": {"input_tokens": 7}}
    asked = {"model": "sim", "prompt": "a cat", "n": 1, "size": "1024x1024", "background": "transparent"}
    place.upstream.faults.append(Fault(reset=True))
    reply = await place.api.post("/v1/images/generations", asked)
    assert reply.status_code == 200 and reply.json() == place.upstream.made
    assert place.upstream.sent[-1].body == asked | {"model": MODEL}
    files = [("image[]", ("a.png", PNG)), ("mask", ("m.png", PNG))]
    reply = await form(place, "/v1/images/edits", files, prompt="a dog", n="1")
    assert reply.status_code == 200, reply.text
    edited = (await place.api.client.get(f"/v1/jobs/{reply.headers['x-job-id']}")).json()
    assert edited["endpoint"] == "/v1/images/edits"
    assert place.upstream.sent[-1].body == {
        "model": MODEL, "prompt": "a dog", "n": "1",
        "image[]": ("a.png", "image/png", PNG), "mask": ("m.png", "image/png", PNG),
    }  # fmt: skip
    job = (await place.api.post("/v1/jobs", asked | {"endpoint": "/v1/images/generations"})).json()
    ended = (await place.api.client.get(f"/v1/jobs/{job['id']}?wait=20")).json()
    assert ended["status"] == "completed" and ended["result"] == place.upstream.made


async def test_what_is_wrong_with_a_form_is_named(place: Place) -> None:
    wrong: list[tuple[str, Any, dict[str, Any], str]] = [
        (TRANSCRIPTS, {"file": ("a.wav", PNG)}, {}, "file"),
        (TRANSCRIPTS, {"other": (None, "x")}, {}, "file"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"response_format": "xml"}, "response_format"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"temperature": "hot"}, "temperature"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"temperature": "nan"}, "temperature"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"x": "1", "x[]": "2"}, "x[]"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"x[]": "1", "x": "2"}, "x"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"x": ["1", "2"]}, "x"),
        (TRANSCRIPTS, {"file": ("", b"")}, {}, "file"),
        (TRANSCRIPTS, {"file": ("a.wav", WAV)}, {"stream": "true"}, "stream"),
        ("/v1/images/edits", {"image": ("a.png", WAV)}, {"prompt": "a"}, "image"),
        ("/v1/images/edits", {"image": ("a.png", PNG)}, {}, "prompt"),
    ]
    for path, files, fields, param in wrong:
        reply = await form(place, path, files, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert (await place.api.post(TRANSCRIPTS, {"model": "sim"})).status_code == 415
    set_media(place, max_bytes=1024)
    assert "[media] max_bytes" in (await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV + bytes(2000))})).text
    place.api.services.media_settings = MediaSettings(max_request_bytes=1024)
    assert (await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV + bytes(99_000))})).status_code == 413
    assert place.upstream.sent == []


def raw_form(*parts: str, boundary: str = "b", end: str = "--b--\r\n") -> dict[str, Any]:
    body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + end
    return {"content": body, "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}


FILE = f'name="file"; filename="a.wav"\r\n\r\n{WAV.decode()}'
NAMED = 'name="model"\r\n\r\nsim'


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (raw_form(NAMED, FILE, boundary="c"), "not valid"),
        (raw_form(NAMED, FILE, boundary=""), "multipart"),
        (raw_form(NAMED, FILE, end=""), "ends before"),
        (raw_form(NAMED, FILE, end="--b"), "ends before"),
        (raw_form(), "model"),
        (raw_form(NAMED), "file"),
        (raw_form(NAMED, FILE, "no=1\r\n\r\nx"), "must be provided"),
        (raw_form(NAMED, *['name="x[]"\r\n\r\n1'] * 10_000, FILE), "Too many fields"),
        (raw_form(NAMED, *[FILE] * 17), "Too many files"),
        (raw_form(NAMED, f'name="x"\r\n\r\n{"a" * (3 << 20)}', FILE), "maximum size"),
        (raw_form(NAMED, f'name="file"; filename="{"a" * 99_000}"\r\n\r\nRIFF'), "not valid"),
    ],
)
async def test_a_malformed_form_is_refused(place: Place, sent: dict[str, Any], words: str) -> None:
    reply = await place.api.client.post(TRANSCRIPTS, **sent)
    assert reply.status_code in (400, 415) and words in reply.text
    assert place.upstream.sent == [] and place.api.services.large_bytes == 0


async def test_a_large_form_is_on_no_disk(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An API process has little of it, and counts the memory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    recording = WAV + bytes(5 << 20)
    assert (await form(place, TRANSCRIPTS, {"file": ("a.wav", recording)})).status_code == 200
    assert place.upstream.sent[-1].body["file"] == ("a.wav", "audio/wav", recording)


async def test_a_model_that_cannot_refuses_tasks(place: Place) -> None:
    place.inputs = ()
    await place.work()
    reply = await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV)})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model") and "transcribe" in reply.text
    reply = await place.api.post("/v1/images/generations", {"model": "sim", "prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model") and "draw" in reply.text


async def test_an_answer_that_is_too_large_fails_at_once(place: Place) -> None:
    """With its bound: another try would bring as much."""
    place.upstream.made = {"data": [{"b64_json": "A" * (8 << 20)}]}
    reply = await place.api.post("/v1/images/generations", {"model": "sim", "prompt": "a"})
    assert reply.status_code == 400 and "more than 8388608 bytes" in reply.text
    assert len(place.upstream.sent) == 1


async def test_a_repeated_form_is_one_job(place: Place) -> None:
    """Whatever its boundary; another recording is another request."""
    key = {"Idempotency-Key": "k"}
    ids = {(await form(place, TRANSCRIPTS, {"file": ("a.wav", WAV)}, key)).headers["x-job-id"] for _ in range(2)}
    assert len(ids) == 1 and len(place.upstream.sent) == 1
    assert (await form(place, TRANSCRIPTS, {"file": ("a.wav", MP3)}, key)).status_code == 422


async def test_a_key_covers_the_names_of_files(place: Place) -> None:
    """An image and a mask that are exchanged are another request."""
    a, b, key = ("a.png", PNG), ("b.png", PNG + b"b"), {"Idempotency-Key": "k"}
    place.upstream.made = {"data": []}
    first = await form(place, "/v1/images/edits", {"image": a, "mask": b}, key, prompt="p")
    assert first.status_code == 200, first.text
    for other in ({"mask": a, "image": b}, {"image": ("c.png", PNG), "mask": b}):
        assert (await form(place, "/v1/images/edits", other, key, prompt="p")).status_code == 422
    again = await form(place, "/v1/images/edits", {"image": a, "mask": b}, key, prompt="p")
    assert again.headers["x-job-id"] == first.headers["x-job-id"]
