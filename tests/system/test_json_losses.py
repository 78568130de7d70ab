"""kill -9 of a worker in the middle of JSON, with the real model: nobody is given two texts spliced into one."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from house import House, eventually
from stream_reader import StreamReader

pytestmark = pytest.mark.slow

ITEMS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["weir", "dam"]}, "minItems": ITEMS, "maxItems": ITEMS}
    },
    "required": ["names"],
    "additionalProperties": False,
}
"""Its shortest text has about 25 tokens: enough to be killed in its middle."""

WAIT_S = 150


def body(text: str, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}}
    return {
        "model": "small", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 300,
        "response_format": wanted,
    } | fields  # fmt: skip


def last_text(reader: StreamReader) -> str:
    """Of the events of a job, those behind the last reset."""
    deltas: list[str] = []
    for name, data in reader.named_events:
        if name == "stream.reset":
            deltas.clear()
        elif name == "delta":
            deltas.append(data["text"])
    return "".join(deltas)


def check(text: str) -> None:
    """It is one JSON text of the schema."""
    value = json.loads(text)
    assert list(value) == ["names"] and len(value["names"]) == ITEMS and set(value["names"]) <= {"weir", "dam"}


def test_json_survives_the_worker_that_began_it(real_house: House) -> None:
    """One text and two, streamed, in one piece and as events: what a reader has is valid, or the reader is told."""
    house = real_house
    with (house.folder / "penstock.toml").open("a") as settings:
        settings.write("options.slots = 8\n")
    house.environ["PENSTOCK_REDIS_LEASE_MS"] = "5000"  # a busy machine must not cost the second worker its lease
    doomed = house.start("workers")
    house.start_api()
    house.wait_ready()
    path = "/v1/chat/completions"
    stream = StreamReader(house.port, path, body("Stream.", stream=True, n=2))
    wholes = [StreamReader(house.port, path, body("Whole."), Idempotency_Key="whole") for _ in range(2)]
    job = json.loads(house.post("/v1/jobs", body("Events."))[2])["id"]
    events = StreamReader(house.port, f"/v1/jobs/{job}/events")
    begun = [stream.text, lambda: last_text(events)]
    eventually(lambda: all(len(text()) > 12 for text in begun), seconds=WAIT_S)
    os.kill(doomed.pid, signal.SIGKILL)
    house.start("workers")
    for reader in (stream, *wholes, events):
        reader.join(WAIT_S)
        assert not reader.is_alive()
    answers = [[choice["message"]["content"] for choice in json.loads(whole.data)["choices"]] for whole in wholes]
    assert [len(choices) for choices in answers] == [1, 1] and wholes[0].job == wholes[1].job, "one joins the other"
    names = [name for name, _ in events.named_events]
    assert "stream.reset" in names and names[-1] == "completed"
    for text in (*answers[0], *answers[1], last_text(events)):
        check(text)
    assert stream.error and stream.error["code"] == "resume_impossible", "it cannot be continued"
    found = json.loads(house.get(f"/v1/jobs/{stream.job}?wait=30")[1])
    assert found["status"] == "completed" and found["attempts"] == 2 and len(found["result"]["choices"]) == 2
    for choice in found["result"]["choices"]:
        check(choice["message"]["content"])
