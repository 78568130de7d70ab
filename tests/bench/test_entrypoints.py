"""Cases of vLLM's entrypoints: each request of the table gets the answer that its row says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from house import House, serving

from bench.conformance.entrypoints import CHATS, GROUPS, MODEL, OTHERS, REAL, TEXTS, EntrypointCase, NoField, as_table

pytestmark = pytest.mark.slow

ALL = [*CHATS, *TEXTS, *OTHERS]


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


def found_at(document: Any, path: str) -> Any:
    """The value at a path; None if there is none."""
    for step in path.split("."):
        try:
            document = document[int(step)] if isinstance(document, list) else document[step]
        except (LookupError, TypeError, ValueError):
            return None
    return document


def fits(value: Any, wanted: Any) -> bool:
    if wanted is NoField:
        return value is None
    return isinstance(value, wanted) if isinstance(wanted, type) else bool(value == wanted)


def check(house: House, case: EntrypointCase) -> None:
    """Send the request, and hold its answer against the row."""
    status, headers, data = house.request("GET" if case.body is None else "POST", case.path, case.body)
    if headers["content-type"].startswith("text/event-stream"):
        lines = data.decode().split("\n")
        assert lines[-3] == "data: [DONE]"
        document: Any = {"chunks": [json.loads(line[6:]) for line in lines if line.startswith("data: {")]}
    else:
        document = json.loads(data)
    assert status == case.status, document
    wrong = {path: found_at(document, path) for path, wanted in case.has.items()
             if not fits(found_at(document, path), wanted)}  # fmt: skip
    assert not wrong, document
    assert headers.get("x-ignored-fields", "") == case.ignored


@pytest.mark.parametrize("case", [each for each in ALL if model_of(each) != REAL], ids=lambda case: case.what)
def test_a_request_has_the_answer_of_its_row(house: House, case: EntrypointCase) -> None:
    check(house, case)


@pytest.mark.parametrize("case", [each for each in ALL if model_of(each) == REAL], ids=lambda case: case.what)
def test_a_request_to_a_real_model_has_the_answer_of_its_row(real_house: House, case: EntrypointCase) -> None:
    check(real_house, case)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.what)
def test_every_row_says_something(case: EntrypointCase) -> None:
    """A row that asserts nothing of the answer could not fail."""
    assert case.has or case.status >= 400
    assert not case.ignored or f'"{case.ignored.split(".")[0]}"' in json.dumps(case.body)


def test_the_page_has_the_table_of_each_group() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    for group in GROUPS:
        assert f"<!-- entrypoints: {group} -->\n{as_table(group)}\n<!-- end -->" in page
