"""A guess at another tenant's prompt, asked over HTTP: the answer does not say whether it was right."""

from __future__ import annotations

import json
from pathlib import Path

from house import House, key_rows, unstarted

SECRET = "The launch code of the river gate is four two seven one, and nobody but the keeper may know it. " * 2


def test_a_right_guess_is_not_told(tmp_path: Path) -> None:
    """`cached_tokens` counts one's own prompts only: the first answer to a guess is the first answer to the prompt's
    owner, whole and streamed, for chats, texts and lists of prompts, which share what they have in common."""
    (tmp_path / "penstock.toml").write_text("[sim]\ncache_prompts = 64\n" + key_rows(ann="", bob=""))
    with unstarted(tmp_path) as house:
        house.start_all("workers")
        for number, (path, prompt) in enumerate(shapes()):
            text = f"{number} {SECRET}"
            body = {"model": "sim", "max_tokens": 2, **json.loads(json.dumps(prompt).replace("SECRET", text))}
            first, again = (cached(house, "ann", path, body) for _ in range(2))
            guess, own = (cached(house, "bob", path, body) for _ in range(2))
            assert again == own > first == guess, path


def shapes() -> list[tuple[str, dict[str, object]]]:
    turns = [{"role": "user", "content": "SECRET"}]
    return [
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/chat/completions", {"messages": turns, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "SECRET"}),
        ("/v1/completions", {"prompt": ["SECRET", "SECRET other"]}),
    ]


def cached(house: House, name: str, path: str, body: dict[str, object]) -> int:
    """What the answer says of the cache."""
    status, _, data = house.post(path, body, {"Authorization": f"Bearer {name}"})
    assert status == 200, data
    if not body.get("stream"):
        return int(json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"])
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: {")]
    return int(json.loads(events[-1])["usage"]["prompt_tokens_details"]["cached_tokens"])
