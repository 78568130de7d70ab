"""Adapters through real processes: the text of each, also after the loss of a worker and in batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from batching import begin, client, content, ended
from house import House, eventually, free_port
from stream_reader import StreamReader, events_in

from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

pytestmark = pytest.mark.slow

TOKENS = 300
SETTINGS = """
[models.sim]
engine = "sim"
adapters = { sql = "/sql", law = "/law" }
options = { step_ms = 4.0, max_adapters = 1 }
"""


def said(text: str, adapter: str, tokens: int = TOKENS) -> str:
    """What the simulated engine answers with an adapter."""
    prompt = prompt_text((ChatTurn("user", text),)) + (f"\nadapter={adapter}" if adapter else "")
    return "".join(token_text(prompt, index) for index in range(tokens))


def name_of(adapter: str) -> str:
    return f"sim:{adapter}" if adapter else "sim"


def test_a_text_keeps_its_adapter_when_its_worker_is_killed(empty_house: House) -> None:
    """Another worker continues each answer with the adapter that began it; its loads are counted."""
    house = empty_house
    (house.folder / "penstock.toml").write_text(SETTINGS)
    house.start("scheduler")
    first = house.start("workers", "--id", "worker-1")
    house.start_api()
    house.wait_ready()
    readers = {}
    for adapter in ("", "sql", ""):
        messages = [{"role": "user", "content": f"kill {len(readers)}"}]
        body: dict[str, Any] = {"model": name_of(adapter), "messages": messages, "max_tokens": TOKENS, "stream": True}
        readers[len(readers)] = adapter, StreamReader(house.port, "/v1/chat/completions", body)
    eventually(lambda: all(len(reader.text()) > 200 for _, reader in readers.values()))
    house.start("workers", "--id", "worker-2")
    first.kill()
    for number, (adapter, reader) in readers.items():
        reader.join(60)
        assert reader.is_whole and not reader.error and reader.text() == said(f"kill {number}", adapter)
        job = json.loads(house.get(f"/v1/jobs/{reader.job}")[1])
        assert (job["attempts"], job["model"]) == (2, name_of(adapter))


def test_adapters_take_turns_in_one_worker(empty_house: House) -> None:
    """One is loaded at a time; lines of a batch and chats each get the text of their own."""
    house = empty_house
    (house.folder / "penstock.toml").write_text(SETTINGS)
    house.start_all("workers", "offline")
    lines = []
    for number, adapter in enumerate(["", "sql", "law"] * 4):
        body = {"model": name_of(adapter), "messages": [{"role": "user", "content": "same"}], "max_tokens": 20}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(line | {"body": body | {"temperature": 0}})  # equal lines of an adapter are computed once
    openai = client(house)
    batch = ended(openai, begin(openai, lines))
    for output, line in zip(content(openai, batch.output_file_id), lines, strict=True):
        answer, name = output["response"]["body"], line["body"]["model"]
        assert answer["model"] == name
        adapter = name.removeprefix("sim").removeprefix(":")
        assert answer["choices"][0]["message"]["content"] == said("same", adapter, 20)


def test_readers_and_replays_have_the_adapter(empty_house: House) -> None:
    """With several partitions: a reader goes on at another API process, and what killed its workers is tried again."""
    house = empty_house
    (house.folder / "penstock.toml").write_text(SETTINGS)
    house.environ |= {"PENSTOCK_REDIS_PARTITIONS": "4", "PENSTOCK_SIM_FAULTS": "true"}
    house.start("scheduler")
    first, port = house.start_api(), free_port()
    house.start_api(port)
    house.start("workers", "--id", "worker-1")
    house.wait_ready()
    asked = {"model": "law", "messages": [{"role": "user", "content": "resume"}], "max_tokens": TOKENS}
    job = json.loads(house.post("/v1/jobs", asked)[2])
    reader = StreamReader(house.port, f"/v1/jobs/{job['id']}/events")
    eventually(lambda: reader.data.count(b"\n\n") > 20)
    first.kill()
    reader.join(60)
    seen = [event for event in events_in(reader.data) if event.id]
    later = StreamReader(port, f"/v1/jobs/{job['id']}/events", Last_Event_ID=seen[-1].id)
    later.join(60)
    events = [*seen, *events_in(later.data)]
    assert "".join(event.data.get("text", "") for event in events) == said("resume", "law")

    poison = {"model": "sql", "messages": [{"role": "user", "content": "[[crash@4]]"}], "max_tokens": 9}
    status, _, body = house.request("POST", "/v1/jobs", poison, port=port)
    assert status == 202
    for number in (2, 3):
        house.start("workers", "--id", f"worker-{number}")
    house.start_api()
    (letter,) = eventually(lambda: json.loads(house.get("/admin/dlq")[1])["data"])
    assert letter["job_id"] == json.loads(body)["id"]
    again = json.loads(house.post(f"/admin/dlq/{letter['id']}/replay", {})[2])
    assert again["model"] == "sim:sql" and again["status"] == "queued"
