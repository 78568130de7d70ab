"""How many choices one request may ask for: the same for chats, completions, jobs, lines of batches and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from batching import begin, client, content, ended
from brokering import intake_of
from house import House, serving

from api.openai.errors import ApiError
from api.openai.schemas import CompletionRequest, Kind, check_choices, parse
from offline.broker import Rejected
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"model": "sim", "prompt": ["a"] * 128, "n": 8, "max_tokens": 4}
"""600 bytes that ask for 1,024 choices."""
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One with the offline work, and as it is without any setting."""
    with serving(tmp_path_factory.mktemp("house"), "workers", "offline") as house:
        yield house


def refusal(answer: tuple[int, dict[str, str], bytes]) -> dict[str, Any]:
    status, _, body = answer
    assert status == 400, body
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_a_small_body_cannot_ask_for_a_thousand_texts(house: House) -> None:
    """It is refused before anything is queued, with the field, the numbers and the way out; 64 are taken."""
    assert len(json.dumps(SMALL)) < 700
    jobs = {"endpoint": "/v1/completions", **SMALL}
    for path, body in (("/v1/completions", SMALL), ("/v1/completions", SMALL | {"stream": True}), ("/v1/jobs", jobs)):
        error = refusal(house.post(path, body))
        assert error["param"] == "prompt" and error["code"] == "invalid_request_error"
        assert all(word in error["message"] for word in ("1,024", "64", "api.max_choices_per_request", "lower n"))
    for prompt, n in ((["a"] * 65, 1), (["a"] * 9, 8), ([[1]] * 33, 2)):
        refusal(house.post("/v1/completions", SMALL | {"prompt": prompt, "n": n}))
    for prompt, n in ((["a"] * 64, 1), (["a"] * 8, 8), ([[1]] * 32, 2)):
        status, _, data = house.post("/v1/completions", SMALL | {"prompt": prompt, "n": n})
        assert status == 200 and len(json.loads(data)["choices"]) == 64


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": MESSAGES, "n": 5}, "n"), ("completion", {"prompt": [1, 2, 3, 4, 5, 6], "n": 5}, "n"),
        ("completion", {"prompt": ["a"] * 5}, "prompt"), ("completion", {"prompt": [[1]] * 3, "n": 2}, "prompt"),
        ("job", {"endpoint": "/v1/completions", "prompt": ["a"] * 5}, "prompt"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named(kind: Kind, fields: dict[str, Any], param: str) -> None:
    """n where there is one prompt; a list of token ids is one prompt."""
    request = parse(kind, json.dumps({"model": "m", **fields}).encode())
    with pytest.raises(ApiError) as caught:
        check_choices(request, 4)
    assert (caught.value.status, caught.value.param) == (400, param)
    check_choices(request, (request.prompts if isinstance(request, CompletionRequest) else 1) * (request.n or 1))


def test_a_line_of_a_batch_is_held_to_it(house: House) -> None:
    """The line is answered with the error, the others are computed."""
    openai = client(house)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": SMALL | more}
        for name, more in (("large", {}), ("fine", {"prompt": ["a", "b"], "n": 2}))
    ]
    done = ended(openai, begin(openai, lines, endpoint="/v1/completions"))
    assert done.request_counts and (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    (good,), (bad,) = content(openai, done.output_file_id), content(openai, done.error_file_id)
    assert good["custom_id"] == "fine" and len(good["response"]["body"]["choices"]) == 4
    assert all(choice["text"] for choice in good["response"]["body"]["choices"])
    assert bad["custom_id"] == "large" and bad["response"]["status_code"] == 400
    assert "api.max_choices_per_request" in bad["response"]["body"]["error"]["message"]


async def test_a_message_of_a_broker_is_held_to_it(wire: RedisClient) -> None:
    """It is rejected, and says why."""
    intake = await intake_of(wire)
    with pytest.raises(Rejected, match="1,024 choices"):
        await intake.accept(json.dumps({"endpoint": "/v1/completions", **SMALL}).encode(), "large")
    assert await intake.accept(
        json.dumps({"endpoint": "/v1/completions", **SMALL, "n": 1, "prompt": "a"}).encode(), "b"
    )
