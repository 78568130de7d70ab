"""The Stream-Url of streamed answers: where it stands, who may read it, and that a replay costs nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from house import House

from api.durable import offset_of
from api.openai import cursor

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 4}),
        ("/v1/responses", {"model": "sim", "input": "x", "max_output_tokens": 4}),
    ],
)
def test_a_streamed_answer_says_where_it_can_be_resumed(house: House, path: str, body: dict[str, Any]) -> None:
    status, headers, _ = house.post(path, body | {"stream": True})
    job_id = headers["x-job-id"]
    assert (status, headers["stream-url"]) == (200, f"/v1/jobs/{job_id}/stream")
    messages = json.loads(house.get(headers["stream-url"])[1])
    assert (len(messages), messages[-1]["event"]) == (5, "completed")
    assert "stream-url" not in house.post(path, body)[1]
    again = [f"/v1/jobs/{job_id}/events"]
    if path == "/v1/responses":
        again.append(f"/v1/responses/resp_{job_id}?stream=true")
    for replay in again:
        assert house.request("GET", replay)[1]["stream-url"] == headers["stream-url"]


def test_calls_of_tools_are_the_same_after_every_offset(house: House) -> None:
    """What a part of a call says depends on those before it, which a resumed reader does not get again."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    called = CHAT | {"tools": [tool], "tool_choice": "required", "max_tokens": 99, "stream": True}
    headers = house.post("/v1/chat/completions", called)[1]
    whole = json.loads(house.get(headers["stream-url"])[1])
    events = house.get(f"/v1/jobs/{headers['x-job-id']}/events")[1].decode()
    shown = {id_: json.loads(data) for id_, data in re.findall(r"^id: (.+)\ndata: (.+)$", events, re.MULTILINE)}
    assert sum("tool_calls" in each["data"] for each in whole) > 1
    for place, each in enumerate(whole, 1):
        assert shown[each["id"]] == each["data"]
        rest = house.get(f"{headers['stream-url']}?offset={offset_of(cursor.read(each['id']))}")[1]
        assert json.loads(rest) == whole[place:]


def test_reading_a_stream_again_counts_no_tokens(house: House) -> None:
    """Neither as an answer's nor as a tenant's."""
    url = house.post("/v1/chat/completions", CHAT | {"stream": True})[1]["stream-url"]
    usage = "/admin/tenants"

    def metered() -> list[str]:
        lines = house.get("/metrics")[1].decode().splitlines()
        return [line for line in lines if re.match(r"\w*(token|stream_resumes)\w*[{ ]", line)]

    before, used = metered(), house.get(usage)[1]
    assert any("token" in line for line in before) and json.loads(used)["data"][0]["jobs"]
    for query in ("", "?offset=-1&live=long-poll", "?offset=-1&live=sse"):
        assert house.get(url + query)[0] == 200
    assert (metered(), house.get(usage)[1]) == (before, used)
