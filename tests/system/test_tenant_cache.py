"""A guess at another tenant's prompt, asked over HTTP: the answer does not say whether it was right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from house import House, redis_process

SECRET = "The launch code of the river gate is four two seven one, and nobody but the keeper may know it. " * 2


def test_a_right_guess_is_not_told(tmp_path: Path) -> None:
    """`cached_tokens` counts one's own prompts only: the first answer to a guess is the first answer to the prompt's
    owner, whole and streamed, for chats, texts and lists of prompts, which share what they have in common."""
    rows = [
        f'[keys.{name}]\ntenant = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name in ("ann", "bob")
    ]
    (tmp_path / "penstock.toml").write_text("[sim]\ncache_prompts = 64\n" + "".join(rows))
    with redis_process(tmp_path, None, "--appendonly", "yes") as url:
        house = House(url, tmp_path)
        try:
            house.start("workers")
            house.start_api()
            house.wait_ready()
            for number, (path, prompt) in enumerate(shapes()):
                text = f"{number} {SECRET}"
                body = {"model": "sim", "max_tokens": 2, **json.loads(json.dumps(prompt).replace("SECRET", text))}
                first, again = (cached(house, "ann", path, body) for _ in range(2))
                guess, own = (cached(house, "bob", path, body) for _ in range(2))
                assert again == own > first == guess, path
        finally:
            house.close()


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
