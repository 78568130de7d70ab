"""docs/client.md: its tables have every argument, method, error and field of penstock.client, and its code runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import client
from penstock.client import (
    ApiRefusal,
    AsyncPenstockClient,
    EventsUnreadable,
    JobFailed,
    NoAnswer,
    Pause,
    PenstockClient,
    PenstockError,
    StreamEvent,
    StreamReset,
    WaitTimeout,
)

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text(encoding="utf-8")
CANNED = (
    NoAnswer("http://h", "cut"),
    ApiRefusal(400, "code", "message"),
    JobFailed({"status": "failed"}),
    StreamReset("job_1", StreamEvent("stream.reset", "2:0:-", {})),
    EventsUnreadable("code", "message"),
    WaitTimeout("job_1", 1.0, None),
)


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without their code marks."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_the_page_has_every_argument_and_its_default() -> None:
    found = {cells[0].strip("`"): cells[1] for cells in rows("The client")}
    parameters = list(inspect.signature(client._Client.__init__).parameters.values())[1:]
    assert list(found) == [each.name for each in parameters]
    for each in parameters:
        if isinstance(each.default, float):
            assert found[each.name] == f"`{each.default}`"
    assert all(f"`{name}`" in PAGE for name in Pause._fields)
    assert tuple(re.findall(r"`([^`]+)`", found["urls"])) == (client.URL, client.DEFAULT_URL)


@pytest.mark.parametrize("kind", [PenstockClient, AsyncPenstockClient])
def test_the_page_has_every_method_with_its_signature(kind: type) -> None:
    methods = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}
    found = dict(re.findall(r"^\| `(\w+)(\(.*?\))` \|", PAGE, re.MULTILINE))
    assert set(found) == set(methods)
    for name, method in methods.items():
        parameters = list(inspect.signature(method).parameters.values())[1:]
        plain = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
        shown = str(plain).replace("'", '"').replace("inf)", "math.inf)").replace("mappingproxy({})", "EMPTY")
        assert found[name] == shown, name


def test_the_page_has_every_error_with_its_fields() -> None:
    found = {cells[0].strip("`"): set(re.findall(r"`(\w+)`", cells[-1])) for cells in rows("The errors")}
    values = {name: getattr(client, name) for name in client.__all__}
    kinds = {name for name, value in values.items() if isinstance(value, type) and issubclass(value, PenstockError)}
    assert set(found) == kinds - {"PenstockError"}
    for error in CANNED:
        assert found[type(error).__name__] == set(vars(error)), type(error).__name__


def test_its_code_begins_again_where_the_store_lost_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discards what came before, and goes on from the new beginning."""
    asked: list[str] = []

    def stream(_self: PenstockClient, job_id: str, after: str = "") -> Iterator[StreamEvent]:
        asked.append(after)
        if not after:
            yield StreamEvent("delta", "1:3:w-1", {"text": "old"})
            raise StreamReset(job_id, StreamEvent("stream.reset", "2:0:-", {}))
        yield StreamEvent("delta", "2:3:w-2", {"text": "new"})

    monkeypatch.setattr(PenstockClient, "stream", stream)
    monkeypatch.setattr(PenstockClient, "submit", lambda _self, _body: {"id": "job_1"})
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102 - the page's own program
    assert (scope["text"], asked) == ("new", ["", "2:0:-"])
