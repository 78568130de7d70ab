"""Lines of a batch for /v1/responses, with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from batching import begin, client, content, ended
from house import House, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with serving(tmp_path_factory.mktemp("lines"), "workers", "offline") as house:
        yield house


def line(number: int, **body: Any) -> dict[str, Any]:
    fields = {"model": "sim", "input": f"line {number}", "max_output_tokens": 5} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/responses", "body": fields}


def test_each_line_has_its_response(house: House) -> None:
    """As the endpoint gives it: equal lines share an answer, unless they show something else."""
    openai = client(house)
    lines = [
        *(line(number) for number in range(3)),
        line(3, input="equal", temperature=0),
        line(4, input="equal", temperature=0),
        line(5, input="equal", temperature=0, metadata={"of": "five"}),
        line(6, max_output_tokens=1_000_000),
        line(7, previous_response_id="resp_1"),
        line(8, background=True),
        line(9, tools=[{"type": "web_search"}], tool_choice="required"),
        line(10, tools=[{"type": "function", "name": "f", "parameters": {}}]),
        line(11, conversation={"id": openai.conversations.create().id}),
    ]
    done = ended(openai, begin(openai, lines, endpoint="/v1/responses"))
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (7, 5)
    found = {row["custom_id"]: row["response"]["body"] for row in content(openai, done.output_file_id)}
    for row in lines[:6]:
        body = found[row["custom_id"]]
        assert (body["object"], body["status"], body["metadata"]) == (
            "response", "incomplete", row["body"].get("metadata", {})
        )  # fmt: skip
        same = openai.responses.create(**row["body"])
        assert body["output"][0]["content"] == same.to_dict()["output"][0]["content"]  # type: ignore[index]
        assert body["usage"] == same.to_dict()["usage"]
    assert found["c3"] == found["c4"] != found["c5"]
    errors = {row["custom_id"]: row["response"] for row in content(openai, done.error_file_id)}
    assert {name: row["status_code"] for name, row in errors.items()} == dict.fromkeys(
        ["c6", "c7", "c8", "c9", "c11"], 400
    )
    params = {name: row["body"]["error"]["param"] for name, row in errors.items()}
    assert [params[name] for name in ("c7", "c8", "c9")] == ["previous_response_id", "background", "tool_choice"]
    assert params["c11"] == "conversation" and "same time" in errors["c11"]["body"]["error"]["message"]
    assert found["c10"]["output"][0]["type"] == "function_call"


def test_a_line_of_another_endpoint_is_refused(house: House) -> None:
    openai = client(house)
    done = ended(openai, begin(openai, [line(0) | {"url": "/v1/completions"}], endpoint="/v1/responses"))
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert done.errors.data[0].code == "mismatched_endpoint"


def test_lines_that_were_not_run_are_told_apart(house: House) -> None:
    """Of a batch that is cancelled: finished lines are kept, the others are in the error file."""
    openai = client(house)
    batch = begin(openai, [line(number, max_output_tokens=8000) for number in range(300)], endpoint="/v1/responses")
    openai.batches.cancel(batch.id)
    done = ended(openai, batch)
    codes = {row["error"]["code"] for row in content(openai, done.error_file_id) if row["error"]}
    assert done.status == "cancelled" and codes <= {"batch_cancelled"}
