"""Content rules in real processes: what a reader sees through the death of a worker, and what the door refuses."""

from __future__ import annotations

import json

import pytest
from batching import said
from house import House, eventually
from stream_reader import StreamReader

from penstock.content import marker

pytestmark = pytest.mark.slow

TOKENS = 400
ASKED = "kill me"


def phrase(number: int) -> str:
    """Two words of the answer: the second token of each is in another delta than the first."""
    words = said(ASKED, TOKENS).split()
    return f"{words[number]} {words[number + 1]}"


def test_a_redacted_stream_survives_its_worker_and_a_blocked_request_is_refused(empty_house: House) -> None:
    """A reader on the same open connection, and one who comes later, see the filter of the whole answer."""
    house, denied = empty_house, [phrase(number) for number in range(4, TOKENS - 2, 10)]
    (house.folder / "penstock.toml").write_text(
        f'[content.names]\ndeny = {json.dumps(denied)}\naction = "redact"\non = ["output"]\ndefault = true\n'
        '[content.cards]\ndetect = ["card"]\ndefault = true\n'
    )
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    first = house.start("workers", "--id", "worker-1")
    house.start_api()
    house.wait_ready()
    body = {"model": "sim", "messages": [{"role": "user", "content": ASKED}], "max_tokens": TOKENS, "stream": True}
    reader = StreamReader(house.port, "/v1/chat/completions", body)
    eventually(lambda: len(reader.text()) > 400)
    house.start("workers", "--id", "worker-2")
    first.kill()
    reader.join(60)
    shown = said(ASKED, TOKENS)
    for each in denied:
        shown = shown.replace(each, marker("names"))
    assert reader.is_whole and not reader.error and reader.text() == shown and shown.count(marker("names")) > 30
    job = json.loads(house.get(f"/v1/jobs/{reader.job}")[1])
    assert job["attempts"] == 2 and job["usage"]["completion_tokens"] == TOKENS
    assert job["result"]["choices"][0]["message"]["content"] == shown
    again = [data.get("text", "") for _, _, data in house.events(reader.job)]
    assert "".join(again) == shown
    status, _, data = house.post(
        "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "4111111111111111"}]}
    )
    assert (status, json.loads(data)["error"]["code"]) == (400, "content_filter")
    metrics = house.get("/metrics")[1].decode()
    assert 'penstock_content_matches_total{action="block",rule="cards"} 1.0' in metrics
    assert "4111111111111111" not in house.log("api") + house.log("workers")
