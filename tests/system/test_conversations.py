"""Conversations through the death of workers, API processes and the store: each turn is added once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, free_port, restartable
from openai import APIError, BadRequestError, OpenAI
from redis import Redis

pytestmark = pytest.mark.slow

TOKENS = 100


def client_of(house: House, port: int | None = None) -> OpenAI:
    url = f"http://127.0.0.1:{port or house.port}/v1"
    return house.closes(OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60))


def texts(client: OpenAI, conversation: str) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(conversation, order="asc")]  # type: ignore


def turn(client: OpenAI, conversation: str, text: str, **fields: Any) -> Any:
    asked: Any = {"model": "sim", "max_output_tokens": TOKENS} | fields
    return client.responses.create(input=text, conversation=conversation, **asked)


def test_a_turn_is_added_once_through_the_death_of_its_worker_and_its_api_process(empty_house: House) -> None:
    """Many readers come back at once when it has ended, at two other processes."""
    house, doomed_port, other = empty_house, free_port(), free_port()
    house.environ["PENSTOCK_SIM_STEP_MS"] = "40"  # the worker is to die before the answer ends, on a slow machine too
    worker = house.start("workers", "--id", "worker-1")
    house.start_api()
    house.start_api(other)
    doomed_api = house.start_api(doomed_port)
    house.wait_ready()
    client, doomed = client_of(house), client_of(house, doomed_port)
    made = client.conversations.create(items=[{"role": "user", "content": "zero"}])
    stream = turn(doomed, made.id, "one", background=True, stream=True)
    response = next(event.response.id for event in stream)
    eventually(lambda: client.responses.retrieve(response).status == "in_progress")
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(doomed_api.pid, signal.SIGKILL)
    with pytest.raises(BadRequestError, match="has not ended"):
        turn(client, made.id, "too soon")
    house.start("workers", "--id", "worker-2")
    eventually(lambda: client.responses.retrieve(response).status == "incomplete", seconds=60)
    found: list[list[str]] = []
    readers = [
        threading.Thread(target=lambda port=port: found.append(texts(client_of(house, port), made.id)))
        for port in (house.port, other) * 5
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    answer = client.responses.retrieve(response).output_text
    assert found == [["zero", "one", answer]] * 10
    second = turn(client, made.id, "two")
    assert texts(client_of(house, other), made.id) == ["zero", "one", answer, "two", second.output_text]


def test_a_conversation_outlives_a_restart_of_the_store(tmp_path: Path) -> None:
    """In the middle of a turn, whose end nobody has read by then."""
    with restartable(tmp_path) as (house, restart):
        house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
        house.start_all("workers")
        client = client_of(house)
        made = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "zero"}])
        response = turn(client, made.id, "one", background=True)
        eventually(lambda: client.responses.retrieve(response.id).status == "in_progress")
        restart()
        eventually(lambda: client.responses.retrieve(response.id).status == "incomplete", APIError, seconds=60)
        answer = client.responses.retrieve(response.id).output_text
        assert texts(client, made.id) == ["zero", "one", answer]
        assert client.conversations.retrieve(made.id).metadata == {"a": "b"}


def test_a_full_store_refuses_a_new_conversation_and_loses_no_turn(empty_house: House) -> None:
    """The turn that ran when the store became full is added once there is room."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
    house.start_all("workers")
    client = client_of(house)
    made = client.conversations.create()
    response = turn(client, made.id, "one", background=True)
    with Redis.from_url(house.redis_url) as store:
        store.config_set("maxmemory", int(store.info("memory")["used_memory"]))
        eventually(lambda: client.responses.retrieve(response.id).status == "incomplete", seconds=60)
        eventually(lambda: house.post("/v1/conversations", {})[0] == 503)
        store.config_set("maxmemory", 0)
    answer = client.responses.retrieve(response.id).output_text
    eventually(lambda: texts(client, made.id) == ["one", answer], Exception)
