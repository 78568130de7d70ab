"""A real browser on a hostile page, beside a server without keys: nothing is read, nothing is put.

Needs Debian's chromium, so only `make test-browser` runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NAME, Page, Rebound, browsing
from chromium import missing
from house import House, eventually, free_port
from http_serving import serving_http

WANTED = "PENSTOCK_TEST_BROWSER"

pytestmark = [
    pytest.mark.skipif(WANTED not in os.environ, reason="needs a browser: make test-browser"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]

SECRET = "a prompt of the owner of this machine"
CHAT = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": SECRET}]}
SCRIPT = (Path(__file__).parent / "hostile.js").read_text(encoding="utf-8")
MIN_TRIES = 60
"""A page that does less has not done its work."""


@pytest.fixture
def page() -> Iterator[Page]:
    with serving_http(Page(SCRIPT)) as page:
        yield page


class Owner:
    """The person at this machine: one job has ended, another waits, and nobody else should know or change that."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.done = self._job()
        eventually(lambda: self._show(self.done)["status"] == "completed")
        self.waiting = self._job(model="asleep")
        self.before = self.sees()

    def _job(self, **more: Any) -> str:
        return str(json.loads(self.house.post("/v1/jobs", CHAT | more)[2])["id"])

    def _show(self, job: str) -> dict[str, Any]:
        return dict(json.loads(self.house.get(f"/v1/jobs/{job}")[1]))

    def sees(self) -> dict[str, Any]:
        """Jobs with their states, files, and overrides of pools."""
        jobs, files, pools = (json.loads(self.house.get(path)[1])["data"] for path in
                              ("/v1/jobs?limit=100", "/v1/files", "/admin/pools"))  # fmt: skip
        return {
            "jobs": [(job["id"], job["status"]) for job in jobs],
            "files": [file["id"] for file in files],
            "overrides": [pool["override"] for pool in pools],
        }


@pytest.fixture
def serve(empty_house: House, tmp_path: Path) -> Any:
    """Starts the server under attack, with these variables."""

    def start(**environ: str) -> Owner:
        (tmp_path / "penstock.toml").write_text(
            "[models.sim]\nengine = 'sim'\n[models.asleep]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 1\n"
        )
        empty_house.environ["PENSTOCK_FILES_DIR"] = str(tmp_path / "files")
        empty_house.start("workers", "--model", "sim")
        empty_house.start_api(**environ)
        empty_house.wait_ready()
        return Owner(empty_house)

    return start


def prepare(page: Page, owner: Owner, *bases: str, leave: str = "") -> None:
    report = f"http://{NAME}:{page.port}/report"
    page.config = {"job": owner.done, "waiting": owner.waiting, "bases": bases, "report": report, "leave": leave}


def read(report: dict[str, Any]) -> dict[str, str]:
    """What was read, by the try."""
    return {name: came["read"] for name, came in report.items() if came.get("read")}


@pytest.mark.parametrize("host", [NAME, "127.0.0.1"])
def test_a_page_of_another_origin_reads_and_writes_nothing(serve: Any, page: Page, tmp_path: Path, host: str) -> None:
    """A page of another site, and one of another port of this machine, by every name the server has."""
    owner = serve()
    port = owner.house.port
    prepare(
        page, owner, f"http://127.0.0.1:{port}", f"http://localhost:{port}", leave=f"http://127.0.0.1:{port}/v1/jobs"
    )
    with browsing(tmp_path, f"http://{host}:{page.port}/"):
        report = page.report()
        eventually(lambda: b'endpoint="/v1/jobs"' in owner.house.get("/metrics")[1])
    assert len(report) > MIN_TRIES
    assert owner.sees() == owner.before
    assert read(report) == {}
    assert not [name for name, came in report.items() if name.split(" ")[1] in ("script", "img") and came.get("loaded")]


def test_a_name_that_came_to_mean_this_machine_reads_and_writes_nothing(serve: Any, page: Page, tmp_path: Path) -> None:
    """DNS rebinding: to the browser the page is of the server's origin. It reads every answer: each is the refusal."""
    owner = serve()
    rebound = Rebound(page.port, owner.house.port)
    port = free_port()  # the name's port: the browser believes that page and server share it
    base = f"http://{NAME}:{port}"
    prepare(page, owner, base)
    try:
        with browsing(tmp_path, f"{base}/", f"MAP {NAME}:{port} 127.0.0.1:{rebound.port}"):
            report = page.report()
    finally:
        rebound.close()
    assert len(report) > MIN_TRIES / 2
    fetched = [came for name, came in report.items() if name.split(" ")[1] in ("fetch", "post", "put", "delete")]
    assert fetched and {came.get("status") for came in fetched} == {421}
    for name, text in read(report).items():
        assert json.loads(text)["error"]["code"] == "misdirected_request", (name, text)
    assert owner.sees() == owner.before


def test_a_page_that_is_let_in_reads_and_writes(serve: Any, page: Page, tmp_path: Path) -> None:
    """The control: by the same tries a listed origin reads jobs, models and events, and puts; nothing of /admin."""
    owner = serve(PENSTOCK_API_CORS_ORIGINS=f"http://{NAME}:{page.port}")
    base = f"http://127.0.0.1:{owner.house.port}"
    prepare(page, owner, base)
    with browsing(tmp_path, f"http://{NAME}:{page.port}/"):
        report = page.report()
    texts = {name.removeprefix(f"{base} "): text for name, text in read(report).items()}
    assert owner.done in texts["fetch cors /v1/jobs"] and "sim" in texts["fetch cors /v1/models"]
    assert '"worker"' in texts["events"] and '"finish_reasons"' in texts["events"]
    assert "choices" in texts["post json/v1/chat/completions"] and '"job_' in texts["post json/v1/jobs"]
    assert not [name for name in texts if "/admin" in name or "/metrics" in name or name in ("put", "delete")]
    after = owner.sees()
    assert set(owner.before["jobs"]) < {
        (job, "queued" if job == owner.waiting else state) for job, state in after["jobs"]
    }
    assert after["overrides"] == owner.before["overrides"]
