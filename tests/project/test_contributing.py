"""CONTRIBUTING.md: its example engine is small and answers; the files and targets that the page names are there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import Piece, Request, Sampling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"`workers/engines/echo/(\w+\.py)`[^\n]*(?:\n[^\n`]+)*\n\n```python\n(.*?)```", PAGE, re.DOTALL)
MAX_LINES = 80


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, out of a folder that is laid over `workers.engines`."""
    folder = tmp_path / "echo"
    folder.mkdir()
    for name, text in (*EXAMPLE, ("__init__.py", "")):
        (folder / name).write_text(text, encoding="utf-8")
    engines = sys.modules["workers.engines"]
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    from workers.engines.echo import engine, settings  # type: ignore[import-not-found]  # noqa: PLC0415

    yield engine.build("m", settings.SECTION(), tmp_path)
    for name in [name for name in sys.modules if name.startswith("workers.engines.echo")]:
        del sys.modules[name]


def test_the_example_is_one_small_folder() -> None:
    assert [name for name, _ in EXAMPLE] == ["settings.py", "engine.py"]
    assert sum(len(text.splitlines()) for _, text in EXAMPLE) <= MAX_LINES


async def test_the_example_answers_goes_on_and_cancels(echo: Any) -> None:
    """A new request, one that an earlier attempt began, one with a limit, and one that is cancelled."""
    pieces: list[Piece] = []
    ended: dict[str, asyncio.Event] = {name: asyncio.Event() for name in "abcd"}

    def on_step(step: list[Piece]) -> None:
        pieces.extend(step)
        for piece in step:
            if piece.last:
                ended[piece.id].set()

    card = await echo.start(on_step, lambda _: None)
    assert (card.name, card.engine) == ("m", "echo")
    limit = Sampling(max_tokens=2)
    for request in (
        Request("a", "one two three", Sampling()),
        Request("b", "one two three", Sampling(), past=(("one ", (), 1),)),
        Request("c", "one two three", limit),
        Request("d", "one two three", Sampling()),
    ):
        await echo.check(request)
        echo.submit(request)
    echo.cancel("d")
    async with asyncio.timeout(20):
        for event in ended.values():
            await event.wait()
    await echo.stop()
    said = {name: "".join(piece.text for piece in pieces if piece.id == name) for name in ended}
    assert said == {"a": "one two three ", "b": "two three ", "c": "one two ", "d": ""}
    assert {piece.id: piece.finish for piece in pieces if piece.last} == {
        **dict.fromkeys("abc", "stop"),
        "d": "cancelled",
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", *(f"docs/decisions/{n}" for n in sorted(
    path.name for path in (ROOT / "docs/decisions").glob("*.md")))])  # fmt: skip
def test_what_a_page_names_is_there(page: str) -> None:
    """Paths in backticks (`<name>` and `*` stand for any), linked files, and targets of make."""
    text = (ROOT / page).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert (ROOT / path).exists() or path.startswith("workers/engines/echo") or "penstock.toml" in path, path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text):
        assert re.search(rf"^{target}: .*## ", makefile, re.MULTILINE), target
