"""docs/api.md: its examples work as typed; endpoints, fields, headers, errors and events are those of the source."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, commands, curl, served_by
from house import House

from api.openai.fields import QueueOptions
from api.openai.generation import CHAT_ONLY, COMPLETION_ONLY, CONSTRAINTS, UNSUPPORTED
from api.openai.responses.request import UNSUPPORTED as OF_RESPONSES
from api.openapi import document
from api.routes import ROUTES
from streaming.jobs.job import JobState

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SOURCES = [path for name in ("api", "workers", "streaming", "offline") for path in (ROOT / name).rglob("*.py")]
CELLS = re.compile(r"`([a-z_.]+)`")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with served_by(tmp_path_factory.mktemp("api"), "workers") as house:
        yield house


def rows(title: str) -> list[list[str]]:
    """The table below a heading, or behind a line that begins with these words."""
    lines = PAGE.partition(f"\n{title}")[2].partition("\n|")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]]


def made_errors(path: Path) -> Iterator[tuple[int, str]]:
    """Status and code of every error that a file makes with fixed ones."""
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") not in ("ApiError", "Failure"):
            continue
        given = {word.arg: word.value for word in call.keywords}
        first, last = (0, 1) if getattr(call.func, "id", "") == "ApiError" else (2, 0)
        parts = given.get("status", call.args[first : first + 1]), given.get("code", call.args[last : last + 1])
        status, code = (part[0] if isinstance(part, list) else part for part in parts)
        if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
            yield int(str(status.value)), str(code.value)


@pytest.mark.slow
def test_the_examples_work_as_typed(served: House) -> None:
    """One job from its acceptance to the resumption of its events."""
    job_id = event_id = ""
    answers = []
    for line in commands(ROOT / "docs" / "api.md"):
        status, body = curl(served, line.replace("JOB_ID", job_id).replace("EVENT_ID", event_id))
        assert status < 300, (line, body)
        answers.append(body)
        job_id = job_id or json.loads(body)["id"]
        event_id = event_id or "".join(re.findall(r"^id: (.+)$", body, re.MULTILINE)[2:3])
    accepted, ended, result, events, rest = answers
    assert json.loads(accepted)["status"] == "queued" and json.loads(ended)["status"] == "completed"
    assert json.loads(ended)["result"] == json.loads(result)
    assert rest and events.partition(f"id: {event_id}\n")[2].partition("\n\n")[2] == rest


def test_every_endpoint_has_its_row() -> None:
    """`…/errors` in a cell is beside the path before it."""
    shown = set()
    for methods, paths, _ in rows("## Endpoints"):
        last = ""
        for path in re.findall(r"`([^`]+)`", paths):
            last = path.replace("…", last.rpartition("/")[0])
            shown |= {(method, last) for method in methods.split(", ")}
    assert shown == {(each.method, re.sub(r"{\w+}", "{id}", each.described_path)) for each in ROUTES if each.summary}


def test_every_field_and_header_has_its_row() -> None:
    """Those of `queue` and of a job; the refused ones; the headers of requests and of answers."""

    def named(title: str, cell: int = 0) -> set[str]:
        return {name for row in rows(title) for name in re.findall(r"`([A-Za-z_-]+)`", row[cell])}

    known = document("")["components"]
    assert named("### queue") == set(QueueOptions.model_fields)
    assert named("### The job object") - {"job"} == set(known["schemas"]["Job"]["properties"])
    refused = {*UNSUPPORTED, *CHAT_ONLY, *COMPLETION_ONLY, *CONSTRAINTS, *OF_RESPONSES}
    assert named("### Refused fields") == refused | {"return_token_strs"}
    assert named("### You receive") == {*known["headers"], "X-Served-By"}
    sent = {each["name"] for each in known["parameters"].values() if each["in"] == "header"}
    assert named("### You send") == sent | {"x-request-id", "traceparent"}


def test_every_error_has_its_row() -> None:
    shown = {
        (int(status), code)
        for title in ("### Refused requests", "### Accepted work that has no result")
        for status, codes, *_ in rows(title)
        for code in CELLS.findall(codes)
    }
    made = {error for path in SOURCES for error in made_errors(path)}
    assert len(made) > 50 and shown == made


def test_every_event_has_its_row() -> None:
    shown = {name for names, *_ in rows("### The events of a job") for name in CELLS.findall(names)}
    text = "".join((ROOT / path).read_text(encoding="utf-8") for path in ("api/events.py", "api/openai/job_events.py"))
    named = set(re.findall(r'JobEvent\("([a-z.]+)"', text)) | set(re.findall(r'event="([a-z]+)"', text))
    assert shown == named | {state.value for state in JobState if state.final}
