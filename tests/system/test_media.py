"""Images, recordings and documents in front of an upstream server, by real processes: what dies, who sees it, batches,
replays, and the official client."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, content, ended
from fake_upstream import ANSWER, MODEL, FakeUpstream, serving
from house import House, eventually, key_rows, restartable, unstarted
from http_serving import POLL_S
from openai import OpenAI
from redis import Redis

pytestmark = pytest.mark.slow

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
PDF = b"%PDF-1.7\n" + b"\xff\0" * 30
WAV = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


@contextmanager
def in_thread(upstream: FakeUpstream) -> Iterator[FakeUpstream]:
    """It answers on an event loop of its own until the block ends."""
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        async with serving(upstream):
            ready.set()
            while not over.is_set():
                await asyncio.sleep(POLL_S)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield upstream
    finally:
        over.set()
        thread.join(10)


def settings(upstream: FakeUpstream, more: str = "") -> str:
    abilities = '["images", "audio", "files", "transcribe", "draw"]'
    model = f'engine = "upstream"\noptions.urls = ["{upstream.url}"]\noptions.name = "{MODEL}"\n'
    return f"{more}\n[redis]\npartitions = 3\n[models.m]\n{model}options.abilities = {abilities}\nmin_workers = 1\n"


@pytest.fixture
def upstream() -> Iterator[FakeUpstream]:
    with in_thread(FakeUpstream("vllm", step_s=0.02)) as upstream:
        yield upstream


@pytest.fixture
def house(tmp_path: Path, upstream: FakeUpstream) -> Iterator[House]:
    (tmp_path / "penstock.toml").write_text(settings(upstream))
    with unstarted(tmp_path) as house:
        house.start_all("workers", "offline")
        yield house


def asked(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 60} | more


def submitted(house: House, **more: Any) -> str:
    status, _, body = house.post("/v1/jobs", asked(IMAGE, **more))
    assert status == 202, body
    return str(json.loads(body)["id"])


def finished(house: House, job: str) -> dict[str, Any]:
    return dict(json.loads(house.get(f"/v1/jobs/{job}?wait=30")[1]))


def kept(house: House) -> list[bytes]:
    with Redis.from_url(house.redis_url) as redis:
        return list(redis.scan_iter("penstock:{*}:media:*"))


def steps(house: House) -> int:
    """How many all workers have logged."""
    with Redis.from_url(house.redis_url) as redis:
        return sum(redis.xlen(key) for key in redis.scan_iter("penstock:{*}:log:*"))


def killed_in_the_middle(house: House, worker: Any, upstream: FakeUpstream, sent: int) -> None:
    """The worker dies once it has logged a part of the server's next answer."""
    before = steps(house) if sent > 1 else 0
    eventually(lambda: len(upstream.sent) == sent and steps(house) > before)
    worker.kill()
    worker.wait()


def test_a_stream_goes_on_with_its_image_whoever_dies(house: House, upstream: FakeUpstream) -> None:
    """A worker in the middle, then an API process: the reader gets every token once and in order, at another API
    process, and the server has got the image each time."""
    worker = house._processes[0]
    job = submitted(house)
    killed_in_the_middle(house, worker, upstream, 1)
    house.start("workers")
    assert eventually(lambda: finished(house, job)["status"] == "completed")
    assert finished(house, job)["result"]["choices"][0]["message"]["content"] == "".join(ANSWER[:60])
    assert all(each.body["messages"][0]["content"] == [IMAGE] for each in upstream.sent) and len(upstream.sent) == 2
    events = house.events(job)
    house._processes[2].kill()
    house.start_api()
    assert house.events(job) == events
    for place, (event_id, _, _) in list(enumerate(events, 1))[::10]:
        assert house.events(job, event_id) == events[place:]
    assert kept(house) == []


def test_a_dead_letter_is_replayed_with_its_image(house: House, upstream: FakeUpstream) -> None:
    """Three workers die of it; its media stay beside it, and its replay has its own."""
    upstream.step_s = 1.0
    job = submitted(house)
    killed_in_the_middle(house, house._processes[0], upstream, 1)
    for attempt in (2, 3):
        killed_in_the_middle(house, house.start("workers"), upstream, attempt)
    eventually(lambda: json.loads(house.get(f"/v1/jobs/{job}")[1])["status"] == "failed")
    assert len(kept(house)) == 1
    upstream.step_s = 0.0
    house.start("workers")
    (letter,) = json.loads(house.get("/admin/dlq")[1])["data"]
    again = json.loads(house.post(f"/admin/dlq/{letter['id']}/replay", {})[2])["id"]
    assert finished(house, again)["status"] == "completed"
    assert upstream.sent[-1].body["messages"][0]["content"] == [IMAGE] and len(kept(house)) == 1


def test_media_survive_the_loss_of_the_store(tmp_path: Path, upstream: FakeUpstream) -> None:
    """Accepted, then Redis is killed: once it is back, the job runs with its image."""
    (tmp_path / "penstock.toml").write_text(settings(upstream))
    with restartable(tmp_path) as (house, restart):
        house.start_api()
        house.start("workers")
        house.wait_ready()
        upstream.open.clear()
        job = submitted(house)
        restart()
        upstream.open.set()
        assert eventually(lambda: finished(house, job)["status"] == "completed", Exception)
        assert upstream.sent[-1].body["messages"][0]["content"] == [IMAGE]


def test_lines_of_a_batch_have_images_and_files(house: House, upstream: FakeUpstream) -> None:
    """As data and by the id of a file; a line whose file is none fails alone."""
    upstream.step_s = 0.0
    openai = client(house)
    file = openai.files.create(file=("a.pdf", PDF), purpose="user_data").id
    parts = [IMAGE, {"type": "file", "file": {"file_id": file}}, {"type": "file", "file": {"file_id": "file-0"}}]
    lines = [{"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions",
              "body": asked({"type": "text", "text": f"{number}"}, part, max_tokens=3)}
             for number, part in enumerate(parts)]  # fmt: skip
    done = ended(openai, begin(openai, lines))
    assert done.request_counts is not None and (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    got = {each.body["messages"][0]["content"][1]["type"] for each in upstream.sent}
    assert got == {"image_url", "file"} and kept(house) == []
    assert "names no file of yours" in json.dumps(content(openai, done.error_file_id))


def test_the_official_client_sends_all_of_it(house: House, upstream: FakeUpstream) -> None:
    """Streams, parts, files, transcripts and images."""
    upstream.step_s = 0.0
    openai: OpenAI = client(house)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]
    chunks = list(openai.chat.completions.create(model="m", messages=messages, max_tokens=3, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "".join(ANSWER[:3])
    part: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
    first = openai.responses.create(model="m", input=[{"role": "user", "content": [part]}], max_output_tokens=3)
    openai.responses.create(model="m", input="and?", previous_response_id=first.id, max_output_tokens=3)
    assert upstream.sent[-1].body["messages"][0]["content"][0]["image_url"]["url"] == URL
    assert openai.audio.transcriptions.create(model="m", file=("a.wav", WAV)).text == "hello"
    plain: Any = openai.audio.transcriptions.create(model="m", file=("a.wav", WAV), response_format="text")
    assert "hello" in plain
    upstream.made = {"created": 1, "data": [{"b64_json": "AAAA"}]}
    drawn = openai.images.generate(model="m", prompt="a cat", n=1, size="1024x1024")
    assert drawn.data is not None and drawn.data[0].b64_json == "AAAA"
    edited = openai.images.edit(model="m", image=("a.png", PNG), prompt="a dog")
    assert edited.data is not None and upstream.sent[-1].body["image"] == ("a.png", "image/png", PNG)


def test_nobody_gets_anothers_media(tmp_path: Path, upstream: FakeUpstream) -> None:
    """By the id of a file, of a response or of an item, which are those of another tenant."""
    (tmp_path / "penstock.toml").write_text(settings(upstream, key_rows(a="", b="")))
    upstream.step_s = 0.0
    with unstarted(tmp_path) as house:
        house.start_all("workers")
        a, b = client(house, "a"), client(house, "b")
        file = a.files.create(file=("a.png", PNG), purpose="vision").id
        part: Any = {"type": "input_image", "file_id": file, "detail": "auto"}
        mine = a.responses.create(model="m", input=[{"role": "user", "content": [part]}], max_output_tokens=3)
        item = a.responses.input_items.list(mine.id).data[0].id
        sent = len(upstream.sent)
        headers = {"Authorization": "Bearer b"}
        for more in (
            {"input": [{"role": "user", "content": [part]}]},
            {"input": "and?", "previous_response_id": mine.id},
            {"input": [{"type": "item_reference", "id": item}]},
        ):
            status, _, body = house.post("/v1/responses", {"model": "m", **more}, headers)
            assert status in (400, 404), body
        assert len(upstream.sent) == sent and list(b.files.list()) == []


def test_a_full_store_refuses_media_before_it_keeps_them(tmp_path: Path, upstream: FakeUpstream) -> None:
    """As a body is refused, with what to do; what was accepted is computed."""
    (tmp_path / "penstock.toml").write_text(settings(upstream))
    upstream.open.clear()
    big = base64.b64encode(PNG + bytes(3_000_000)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{big}"}}
    with unstarted(tmp_path, "--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as house:
        house.start_all("workers")
        answers = []
        for _ in range(12):
            answers.append(house.post("/v1/jobs", asked(image, max_tokens=3)))
        accepted = [json.loads(body)["id"] for status, _, body in answers if status == 202]
        refused = [json.loads(body)["error"]["code"] for status, _, body in answers if status != 202]
        assert accepted and refused and set(refused) == {"no_capacity"}, answers
        assert len(kept(house)) == len(accepted)
        upstream.open.set()
        for job in accepted:
            assert finished(house, job)["status"] == "completed"
        assert kept(house) == []
