"""Log-probabilities of prompts (`echo` with `logprobs`) from the door to the engine and back, whatever dies between."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx2
import pytest
from batching import client, jsonl
from house import House, eventually, module_house, unstarted

from workers.engines.sim.answers import prompt_rows

house = module_house("workers", "offline")
pytestmark = pytest.mark.slow
TEXT = "A penstock carries water to the mill."
ASKED: dict[str, Any] = {"model": "sim", "prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 3}


def completed(house: House, **more: Any) -> Any:
    status, _, body = house.post("/v1/completions", ASKED | more)
    assert status == 200, body
    return json.loads(body)


def columns(choice: Any) -> tuple[Any, ...]:
    rows = choice["logprobs"]
    return rows["tokens"], rows["token_logprobs"], rows["top_logprobs"], rows["text_offset"]


def well_formed(choice: Any, generated: int) -> None:
    """One row for each token, the first of which follows nothing; offsets into the text."""
    tokens, values, tops, offsets = columns(choice)
    assert len(tokens) == len(values) == len(tops) == len(offsets)
    assert choice["text"] == "".join(tokens)
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert values[0] is None and tops[0] is None
    assert all(value <= 0 for value in values[1:]) and all(len(top) == 2 for top in tops[1:])
    assert len(tokens) == len(TEXT) // 4 + generated


@pytest.mark.parametrize("generated", [0, 3])
def test_a_prompt_has_rows_as_its_answer_has(house: House, generated: int) -> None:
    found = completed(house, max_tokens=generated)
    (choice,) = found["choices"]
    well_formed(choice, generated)
    assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == generated
    assert found["usage"]["prompt_tokens"] == len(TEXT) // 4
    plain = completed(house, max_tokens=3, echo=False)["choices"][0]["text"]
    assert choice["text"] == TEXT + (plain if generated else "")


def test_each_prompt_and_each_choice_has_its_own(house: House) -> None:
    found = completed(house, prompt=[TEXT, "Another prompt of several tokens."], n=2)["choices"]
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert columns(found[0]) == columns(found[1]) and columns(found[2]) == columns(found[3])
    well_formed(found[0], 3)
    assert found[2]["text"].startswith("Another prompt") and found[2]["logprobs"]["token_logprobs"][0] is None


def test_token_ids_have_a_row_each(house: House) -> None:
    """Their text is known by the rows alone."""
    ids = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for asked, wanted in ((ids, ids), (ids[0], ids[:1])):
        found = completed(house, prompt=asked)["choices"]
        for choice, each in zip(found, wanted, strict=True):
            tokens, values, *_ = columns(choice)
            assert len(tokens) == len(each) + 3 and choice["text"] == "".join(tokens) and values[0] is None
    alone = completed(house, prompt=ids, max_tokens=0)["choices"][1]["logprobs"]["tokens"]
    assert alone == [row.token for row in prompt_rows(ids[1], 0)]


def test_a_stream_begins_with_all_rows_of_the_prompt(house: House) -> None:
    """And its chunks together are the whole answer."""
    whole = completed(house)["choices"][0]
    with client(house) as openai:
        chunks = [chunk.choices[0] for chunk in openai.completions.create(**ASKED, stream=True)]
    assert chunks[0].text == TEXT and len(chunks[0].logprobs.tokens) == len(TEXT) // 4
    assert "".join(chunk.text for chunk in chunks) == whole["text"]
    for name, column in whole["logprobs"].items():
        assert [each for chunk in chunks if chunk.logprobs for each in getattr(chunk.logprobs, name)] == column


@pytest.mark.parametrize("prompt", [TEXT, [3, 1, 4, 1, 5, 9, 2, 6, 5]], ids=["text", "ids"])
def test_a_prompt_is_told_once_when_its_worker_dies(prompt: Any, tmp_path: Path) -> None:
    """Its rows are in the log: the next worker continues behind them. A reader that comes back gets the rest alone."""
    with unstarted(tmp_path) as house:
        house.environ |= {"PENSTOCK_SIM_STEP_MS": "10"}
        first = house.start("workers")
        house.start_all()
        house.wait_ready()
        asked = ASKED | {"max_tokens": 200, "endpoint": "/v1/completions", "prompt": prompt}
        job = json.loads(house.post("/v1/jobs", asked)[2])["id"]
        with httpx2.stream("GET", f"{house.url}/v1/jobs/{job}/events", timeout=30) as events:
            next(line for line in events.iter_lines() if '"tokens":1' in line)
            first.kill()
        house.start("workers")
        ended = json.loads(house.get(f"/v1/jobs/{job}?wait=60")[1])
        assert (ended["status"], ended["attempts"]) == ("completed", 2)
        (choice,) = ended["result"]["choices"]
        tokens, values, *_ = columns(choice)
        assert len(tokens) == len(values) == 9 + 200 and values.count(None) == 1
        assert choice["text"] == "".join(tokens)
        events = house.events(job)
        deltas = [(place, data) for place, name, data in events if name == "delta"]
        assert "".join(data["text"] for _, data in deltas) == choice["text"]
        assert [len(data["logprobs"]) for _, data in deltas] == [9] + 200 * [1] and deltas[0][1]["tokens"] == 0
        rest = [data["text"] for _, name, data in house.events(job, deltas[0][0]) if name == "delta"]
        assert "".join(rest) == "".join(tokens[9:])


def test_a_replay_writes_one_prompt_at_a_time(house: House) -> None:
    """The rows of many prompts together would keep all other readers waiting."""
    asked = ASKED | {"prompt": [TEXT] * 8, "max_tokens": 0, "endpoint": "/v1/completions"}
    job = json.loads(house.post("/v1/jobs", asked)[2])["id"]
    eventually(lambda: json.loads(house.get(f"/v1/jobs/{job}")[1])["status"] == "completed")
    with socket.create_connection(("127.0.0.1", house.port), timeout=30) as line:
        line.sendall(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        with line.makefile("rb") as said:
            while said.readline().strip():
                pass
            writes = list[bytes]()
            while size := int(said.readline(), 16):
                writes.append(said.read(size + 2))
    counts = [write.count(b"event: delta\n") for write in writes]
    assert sum(counts) == 8 and max(counts) == 1


def test_lines_of_a_batch_have_rows(house: House) -> None:
    with client(house) as openai:
        lines = [line_of(number, max_tokens=number) for number in range(2)]
        file = openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: openai.batches.retrieve(batch.id).status == "completed")
        found = openai.batches.retrieve(batch.id)
        answers = [json.loads(each) for each in openai.files.content(found.output_file_id or "").text.splitlines()]
    for number, answer in enumerate(answers):
        well_formed(answer["response"]["body"]["choices"][0], number)


def line_of(number: int, **more: Any) -> dict[str, Any]:
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": ASKED | more}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"prompt": [1, 2], "logprobs": None}, "echo"),
        ({"response_format": {"type": "json_object"}}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(house: House, more: dict[str, Any], param: str) -> None:
    status, _, body = house.post("/v1/completions", ASKED | more)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


def test_a_prompt_alone_may_be_echoed(house: House) -> None:
    found = completed(house, max_tokens=0, logprobs=None)
    assert (found["choices"][0]["text"], found["choices"][0]["logprobs"]) == (TEXT, None)
    assert found["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9, "prompt_tokens_details": None,
    }  # fmt: skip
