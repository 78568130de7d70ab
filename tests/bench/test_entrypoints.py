"""Cases of vLLM's entrypoints: each request of the table gets the answer that its row says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answer_checks import fits, found_at
from entrypoints import GROUPS, MODEL, REAL, EntrypointCase
from house import House, eventually, serving

pytestmark = pytest.mark.slow

ALL = [case for cases in GROUPS.values() for case in cases]


def model_of(case: EntrypointCase) -> str:
    return str(case.body.get("model")) if isinstance(case.body, dict) else MODEL


@pytest.fixture(scope="module")
def real_house(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[House]:
    """With llama.cpp in the worker."""
    pytest.importorskip("xllamacpp")
    folder = tmp_path_factory.mktemp("real")
    (folder / "penstock.toml").write_text(
        f'[models.{REAL}]\nengine = "llamacpp"\noptions.path = "{real_model}"\noptions.context = 1024\n'
    )
    with serving(folder, "workers") as house:
        yield house


def answer(house: House, path: str, body: Any) -> tuple[int, Any, str]:
    """Status, document and ignored fields; the chunks of a stream as `chunks`."""
    status, headers, data = house.request("GET" if body is None else "POST", path, body)
    ignored = headers.get("x-ignored-fields", "")
    if not headers["content-type"].startswith("text/event-stream"):
        return status, json.loads(data), ignored
    lines = data.decode().split("\n")
    assert lines[-3] == "data: [DONE]"
    return status, {"chunks": [json.loads(line[6:]) for line in lines if line.startswith("data: {")]}, ignored


def wrong_paths(case: EntrypointCase, document: Any) -> list[str]:
    return [path for path, wanted in case.has.items() if not fits(found_at(document, path), wanted)]


def check(house: House, case: EntrypointCase) -> None:
    """Send the request, and hold its answer against the row. Then leave out one field after the other that the row is
    about, until an answer does not fit the row."""
    status, document, ignored = answer(house, case.path, case.body)
    assert (status, wrong_paths(case, document), ignored) == (case.status, [], case.ignored), document
    others = (answer(house, case.path, body) for body in case.without)
    fitting = (status == case.status and not wrong_paths(case, document) for status, document, _ in others)
    assert not case.without or not all(fitting), "the row fits each request without one of its fields"


@pytest.mark.parametrize("case", [each for each in ALL if model_of(each) != REAL], ids=lambda case: case.what)
def test_a_request_has_the_answer_of_its_row(house: House, case: EntrypointCase) -> None:
    eventually(lambda: b"context_length" in house.get("/v1/models")[1])  # the API process has read the worker's card
    check(house, case)


@pytest.mark.parametrize("case", [each for each in ALL if model_of(each) == REAL], ids=lambda case: case.what)
def test_a_request_to_a_real_model_has_the_answer_of_its_row(real_house: House, case: EntrypointCase) -> None:
    check(real_house, case)


def test_every_row_says_something() -> None:
    """A row that asserts nothing of the answer could not fail: it does not fit an empty one. What it asserts of its
    fields, `check` shows."""
    for case in ALL:
        assert case.has and wrong_paths(case, {}), case.what
        assert not case.ignored or f'"{case.ignored.split(".")[0]}"' in json.dumps(case.body), case.what
