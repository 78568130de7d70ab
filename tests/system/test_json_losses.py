"""kill -9 of a worker in the middle of JSON, with the real model: nobody is given two texts spliced into one."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from http.client import HTTPConnection
from typing import Any

import pytest
from house import House, eventually

pytestmark = pytest.mark.slow

ITEMS = 12
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["weir", "dam"]}, "minItems": ITEMS, "maxItems": ITEMS}
    },
    "required": ["names"],
    "additionalProperties": False,
}
"""Its shortest text has about 50 tokens: enough to be killed in its middle."""

WAIT_S = 150


def body(text: str, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}}
    return {
        "model": "small", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 300,
        "response_format": wanted,
    } | fields  # fmt: skip


class Reader(threading.Thread):
    """Reads one answer in the background, whole or as server-sent events; asserts nothing."""

    def __init__(
        self, house: House, method: str, path: str, fields: dict[str, Any] | None = None, key: str = ""
    ) -> None:
        super().__init__(daemon=True)
        self.texts: defaultdict[int, str] = defaultdict(str)
        """By choice, what came since the last stream.reset."""
        self.resets = 0
        self.error, self.last, self.job, self.status = "", "", "", 0
        self.whole = b""
        self._house, self._request = house, (method, path, fields, key)
        self.start()

    def run(self) -> None:
        method, path, fields, key = self._request
        connection = HTTPConnection("127.0.0.1", self._house.port, timeout=WAIT_S)
        data = None if fields is None else json.dumps(fields)
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        self.status, self.job = response.status, response.headers["x-job-id"] or ""
        if "event-stream" not in (response.headers["content-type"] or ""):
            self.whole = response.read()
        else:
            for line in response:
                self._read(line)
        connection.close()

    def _read(self, line: bytes) -> None:
        if line.startswith(b"event: "):
            self.last = line[7:].decode().strip()
            if self.last == "stream.reset":
                self.resets += 1
                self.texts.clear()
        elif line.startswith(b"data: {"):
            self._take(json.loads(line[6:]))

    def _take(self, data: dict[str, Any]) -> None:
        if data.get("error"):
            self.error = data["error"]["code"]
        for choice in data.get("choices", ()):
            self.texts[choice["index"]] += (choice.get("delta") or {}).get("content") or ""
        if self.last == "delta":
            self.texts[data["index"]] += data["text"]

    def choices(self) -> list[str]:
        """Of an answer in one piece."""
        assert self.status == 200, self.whole
        return [choice["message"]["content"] for choice in json.loads(self.whole)["choices"]]


def check(text: str) -> None:
    """It is one JSON text of the schema."""
    value = json.loads(text)
    assert list(value) == ["names"] and len(value["names"]) == ITEMS and set(value["names"]) <= {"weir", "dam"}


def test_json_survives_the_worker_that_began_it(real_house: House) -> None:
    """One text and two, streamed, in one piece and as events: what a reader has is valid, or the reader is told."""
    house = real_house
    with (house.folder / "penstock.toml").open("a") as settings:
        settings.write("options.slots = 8\n")
    doomed = house.start("workers")
    house.start_api()
    house.wait_ready()
    path = "/v1/chat/completions"
    streams = [Reader(house, "POST", path, body("Stream.", stream=True, n=n)) for n in (1, 2)]
    wholes = [Reader(house, "POST", path, body("Whole.", n=2), key="whole") for _ in range(2)]  # one joins the other
    job = json.loads(house.post("/v1/jobs", body("Events."))[2])["id"]
    events = Reader(house, "GET", f"/v1/jobs/{job}/events")
    eventually(lambda: all(len(reader.texts[0]) > 12 for reader in (*streams, events)), seconds=WAIT_S)
    os.kill(doomed.pid, signal.SIGKILL)
    house.start("workers")
    for reader in (*streams, *wholes, events):
        reader.join(WAIT_S)
        assert not reader.is_alive()
    assert [len(whole.choices()) for whole in wholes] == [2, 2] and wholes[0].job == wholes[1].job
    assert events.resets >= 1 and events.last == "completed"
    for text in (*wholes[0].choices(), *wholes[1].choices(), events.texts[0]):
        check(text)
    for stream, n in zip(streams, (1, 2), strict=True):
        assert stream.error == "resume_impossible", "a text that cannot be continued ends with an error"
        found = json.loads(house.get(f"/v1/jobs/{stream.job}?wait=30")[1])
        assert found["status"] == "completed" and found["attempts"] == 2
        answers = found["result"]["choices"]
        assert len(answers) == n
        for choice in answers:
            check(choice["message"]["content"])
