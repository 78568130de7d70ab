"""The request of a job as it is shown: posted again it asks for the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from api.openai.json_body import weighed
from api.openai.results import input_object
from api.openai.schemas import parse, to_job
from streaming.jobs.job import Job
from streaming.order import Priority


def job_of(body: dict[str, Any]) -> Job:
    request = parse("job", asyncio.run(weighed(json.dumps(body).encode())))
    return to_job(request, job_id="j", tenant="t", ceiling=Priority.INTERACTIVE, reply_to="", trace={})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = {"model": "m", "endpoint": "/v1/completions"}
CHAT = {"model": "m", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hä\n?"}]}


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        TEXT | {"prompt": "one"},
        TEXT | {"prompt": ["one", "two"], "n": 2, "stop": ["x", "y"], "logprobs": 3},
        TEXT | {"prompt": [[1, 2], [3]], "max_tokens": 4, "seed": 7, "user": "u"},
        CHAT | {"temperature": 0.5, "top_p": 0.9, "logprobs": True, "top_logprobs": 2, "stop": "."},
        CHAT | {"presence_penalty": 1.0, "frequency_penalty": -1.0, "response_format": {"type": "json_object"}},
        CHAT | {"queue": {"priority": "batch", "deadline_ms": 5000, "max_queue_ms": 100}},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ],
)
def test_it_asks_for_the_same_when_it_is_posted_again(body: dict[str, Any]) -> None:
    job = job_of(body)
    again = job_of(input_object(job))
    assert again == job
