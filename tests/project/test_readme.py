"""What the README and the docs tell people to type is typed here, against a house with a simulated engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Context, Group
from commands import ROOT, blocks, commands, curl, penstock, served_by
from house import House

from api.settings import ApiSettings, KeySettings, OidcSettings
from cli.app import app
from cli.instance import UpSettings
from offline.settings import OfflineSettings
from penstock.config import build, load
from scheduler.settings import SchedulerSettings
from streaming.batches.file_store import BatchSettings, FilesSettings
from streaming.events import EventSettings, WebhookSettings
from streaming.fleet.settings import ModelSettings
from streaming.redis.settings import RedisSettings
from telemetry.settings import TelemetrySettings
from workers.engines.registry import sections
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

ENGINES = sections()
KINDS = {
    "webhooks": WebhookSettings, "events": EventSettings,
    "files": FilesSettings, "batch": BatchSettings, "offline": OfflineSettings,
    "up": UpSettings, "api": ApiSettings, "redis": RedisSettings, "worker": WorkerSettings, "models": ModelSettings,
    "scheduler": SchedulerSettings, "telemetry": TelemetrySettings, "keys": KeySettings,
    "oidc": OidcSettings, **ENGINES,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The README's model name, with a simulated engine behind it."""
    with served_by(tmp_path_factory.mktemp("readme"), "scheduler", "workers", "offline") as house:
        yield house


def test_the_readmes_curl_lines_work(served: House) -> None:
    """A streamed chat that ends as streams end, and an accepted job."""
    lines = [line for line in commands(ROOT / "README.md") if line.startswith("curl")]
    answers = [curl(served, line) for line in lines]
    assert [status for status, _ in answers] == [200, 202]
    assert answers[0][1].endswith("data: [DONE]\n\n") and json.loads(answers[1][1])["object"] == "job"


def test_the_readmes_penstock_lines_work(served: House) -> None:
    """Every command but those that need a machine of their own, or a terminal, ends well and says something."""
    lines = [line for line in commands(ROOT / "README.md") if re.match(r"(\.venv/bin/)?penstock ", line)]
    known = {"submit", "chat", "console", "jobs", "batch", "scale", "doctor", "report", "top"}
    assert {line.split()[1] for line in lines} == known
    for line in commands(ROOT / "README.md"):
        if line.startswith("printf"):  # files that the commands read
            subprocess.run(["sh", "-c", line], cwd=served.folder, check=True)
    for line in lines:
        if line.split()[1] not in ("doctor", "top"):
            penstock(served, line)


def test_the_readmes_program_works(served: House) -> None:
    """As it stands there, but for the address."""
    (program,) = blocks(ROOT / "README.md", "python")
    program = program.replace("http://127.0.0.1:8000", served.url)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 4


def test_the_examples_of_the_api_work_as_typed(served: House) -> None:
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


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/operations.md",
        "docs/models.md",
        "docs/events.md",
        "docs/upstream.md",
    ],
)
def test_the_pages_settings_are_settings(page: str, tmp_path: Path) -> None:
    """Every TOML block of the pages is accepted as it stands (an elided hash aside)."""
    assert blocks(ROOT / page, "toml")
    for block in blocks(ROOT / page, "toml"):
        path = tmp_path / "penstock.toml"
        path.write_text(re.sub(r'"…[^"]*"', f'"{"0" * 64}"', block), encoding="utf-8")
        config = load(KINDS, path=path, environ={})
        for model in config.table("models", ModelSettings).values():
            build(ENGINES[model.engine], model.options, model.engine)
        assert tomllib.loads(path.read_text(encoding="utf-8"))


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link of the README and the docs is a file here, and what follows a # is one of its headings."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    link = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
    links = [(page, *found) for page in pages for found in link.findall(page.read_text(encoding="utf-8"))]
    missing = [
        (page, path, heading)
        for page, path, heading in links
        if not (target := (page.parent / path if path else page)).exists()
        or (heading and heading not in anchors(target))
    ]
    assert len(links) > 100 and missing == []


def test_every_command_that_a_page_names_exists() -> None:
    """`penstock jobs show` and the like: the command, and the one below it."""
    named = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        named |= set(re.findall(r"(?:`|\$ |/)penstock ([a-z][a-z-]*)(?: ([a-z][a-z0-9-]*))?", text))
    assert len(named) > 20
    context = Context(app)
    for name, below in named:
        command = app.get_command(context, name)
        assert command is not None, name
        if isinstance(command, Group) and below:
            assert command.get_command(context, below) is not None, (name, below)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
