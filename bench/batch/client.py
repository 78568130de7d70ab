"""A client of files and batches, as plain as can be, and the judge of what they give."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

FINAL = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Talks to one API process. A server that is away for a moment is asked again."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=60.0, trust_env=False)

    def begin(self, path: Path, window: str = "24h") -> str:
        """Upload a file and make a batch of it; its id."""
        with path.open("rb") as file:
            uploaded = self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", file)})
        body = {
            "input_file_id": uploaded.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": window,
        }
        return str(self._http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def show(self, batch_id: str) -> dict[str, Any]:
        """The batch."""
        while True:
            try:
                return dict(self._http.get(f"/v1/batches/{batch_id}").raise_for_status().json())
            except httpx2.HTTPError:
                time.sleep(0.2)

    def cancel(self, batch_id: str) -> None:
        self._http.post(f"/v1/batches/{batch_id}/cancel").raise_for_status()

    def ended(self, batch_id: str, seconds: float) -> dict[str, Any]:
        """The batch as it ended. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while (batch := self.show(batch_id))["status"] not in FINAL:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the batch has not ended in {seconds:g} s: {batch['request_counts']}")
            time.sleep(0.2)
        return batch

    def lines(self, file_id: str | None) -> Iterator[dict[str, Any]]:
        """An output or error file, line by line; nothing if there is none."""
        if file_id is None:
            return
        with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
            rest = b""
            for chunk in answer.raise_for_status().iter_bytes():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from map(json.loads, filter(None, whole))

    def size(self, file_id: str) -> int:
        """Bytes of a file."""
        return int(self._http.get(f"/v1/files/{file_id}").raise_for_status().json()["bytes"])

    def is_ready(self) -> bool:
        """Whether requests would be served now."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx2.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()


class InputLine(msgspec.Struct, frozen=True):
    """One line of input."""

    number: int
    text: str
    tokens: int
    model: str

    @property
    def name(self) -> str:
        return f"line-{self.number}"

    def request(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.text}]
        body = {"model": self.model, "messages": messages, "max_tokens": self.tokens, **more}
        return {"custom_id": self.name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    def answer(self) -> str:
        """What the simulated engine says: each token names its place, so a lost or doubled one shows."""
        prompt = prompt_text((ChatTurn("user", self.text),))
        return "".join(token_text(prompt, index) for index in range(self.tokens))


def write(path: Path, lines: Sequence[InputLine], **more: Any) -> Path:
    """The input file of these lines."""
    with path.open("wb") as file:
        for line in lines:
            file.write(json.dumps(line.request(**more)).encode() + b"\n")
    return path


class BatchVerdict(msgspec.Struct, frozen=True):
    """What a batch gave, held against what was asked."""

    answered: int
    failed: int
    lost: int
    """Lines in neither file."""
    doubled: int
    """Lines that are there more than once."""
    wrong: int
    """Answers that are not exactly the line's."""
    disordered: int
    """Neighbours in the wrong order, or under a wrong number."""


def judge(
    lines: Sequence[InputLine], outputs: Iterator[dict[str, Any]], failures: Iterator[dict[str, Any]]
) -> BatchVerdict:
    """Hold both files against the input."""
    by_name = {line.name: line for line in lines}
    seen: Counter[str] = Counter()
    wrong = disordered = answered = last = 0
    for output in outputs:
        line = by_name.get(output["custom_id"])
        seen[output["custom_id"]] += 1
        answered += 1
        said = output["response"]["body"]["choices"][0]["message"]["content"]
        wrong += line is None or said != line.answer()
        disordered += line is None or output["line"] != line.number or line.number <= last
        last = output["line"]
    failed = 0
    for failure in failures:
        seen[failure["custom_id"]] += 1
        failed += 1
    lost = sum(name not in seen for name in by_name)
    doubled = sum(count - 1 for count in seen.values())
    return BatchVerdict(answered, failed, lost, doubled, wrong, disordered)
