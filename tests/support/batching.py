"""What tests of batches share: lines, the official client, a judge that knows all answers of the simulated engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from house import House, eventually
from openai import OpenAI
from openai.types import Batch

from offline.tools import OfflineTools
from penstock.engine import ChatTurn
from streaming.batches.file_store import BatchSettings, FileStore
from streaming.batches.store import Batch as BatchRecord
from streaming.fleet.settings import ModelSettings
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.store.monitor import Headroom, StoreMonitor
from telemetry.metrics import Metrics
from workers.engines.sim.answers import prompt_text, token_text

TOKENS = 6
FINAL = ("completed", "failed", "expired", "cancelled")


def line(number: int, text: str = "", **body: Any) -> dict[str, Any]:
    """A request that asks for a few tokens."""
    messages = [{"role": "user", "content": text or f"line {number}"}]
    asked = {"model": "sim", "messages": messages, "max_tokens": TOKENS, **body}
    return {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked}


MODELS = {name: ModelSettings(engine="sim") for name in ("sim", "other")}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def batch_record(**more: Any) -> BatchRecord:
    """A batch as the store has it."""
    fields: dict[str, Any] = {"id": "batch_00" + 30 * "a", "tenant": "t", "ceiling": Priority.BATCH, "window": "none"}
    fields |= {"endpoint": "/v1/chat/completions", "input_file": "file", "output_keep_ms": 3_600_000}
    return BatchRecord(**fields | more)


def tools_of(wire: RedisClient, folder: Path = Path("unused"), **more: Any) -> OfflineTools:
    """What an offline process has on this store, for the model `sim`."""
    fields = {"store_client": wire, "headroom": Headroom(wire), "store": StoreMonitor(wire), "models": MODELS}
    fields |= {"file_store": FileStore(folder), "metrics": Metrics.start("", "offline"), "batch": BatchSettings()}
    return OfflineTools(**fields | {"max_choices": 64, "keep_s": 3600} | more)


def said(text: str, tokens: int = TOKENS) -> str:
    """What the simulated engine answers."""
    prompt = prompt_text((ChatTurn("user", text),))
    return "".join(token_text(prompt, index) for index in range(tokens))


def client(house: House, key: str = "none") -> OpenAI:
    """The official client of this house, which closes it."""
    return house.closes(OpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0))


def begin(openai: OpenAI, lines: Sequence[Any], window: Any = "24h", **more: Any) -> Batch:
    """Upload these lines and make a batch of them."""
    file = openai.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    more = {"endpoint": "/v1/chat/completions"} | more
    return openai.batches.create(input_file_id=file.id, completion_window=window, **more)


def ended(openai: OpenAI, batch: Batch, seconds: float = 120) -> Batch:
    """The batch once it has ended."""
    seen: list[Batch] = []

    def final() -> bool:
        seen[:] = [openai.batches.retrieve(batch.id)]
        return seen[0].status in FINAL

    try:
        eventually(final, seconds=seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen}") from None
    return seen[0]


def reaches(openai: OpenAI, batch: Batch, completed: int) -> Batch:
    """The batch once so many lines have ended, or all of it."""

    def there() -> Batch | None:
        now = openai.batches.retrieve(batch.id)
        counts = now.request_counts
        return now if now.status in FINAL or (counts and counts.completed >= completed) else None

    found = eventually(there)
    assert isinstance(found, Batch)
    return found


def content(openai: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(each) for each in openai.files.content(file_id).content.split(b"\n")[:-1]]


def answers_are_right(outputs: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]) -> None:
    """Every line once, in order, under its name and number, with exactly its answer."""
    assert [each["custom_id"] for each in outputs] == [each["custom_id"] for each in lines]
    assert len({each["id"] for each in outputs}) == len(outputs)
    for output, asked in zip(outputs, lines, strict=True):
        assert output["error"] is None and output["response"]["status_code"] == 200
        answer = output["response"]["body"]["choices"][0]["message"]["content"]
        assert answer == said(asked["body"]["messages"][0]["content"], asked["body"]["max_tokens"])


def nothing_left_over(folder: Path) -> None:
    """Of batches that have ended there is nothing but files."""
    eventually(lambda: list((folder / ".penstock" / "files" / "batches").iterdir()) == [])
