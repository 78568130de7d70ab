"""Short ids: a beginning stands for the one id that begins so, of all that the server lists."""

from __future__ import annotations

import http.server
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from http_serving import QuietHandler, serving_http

from cli.client import LISTINGS

pytestmark = pytest.mark.slow

JOBS = [f"job_00{number:030x}" for number in range(0xABC000, 0xABC000 + 250)] + [f"job_00{'f' * 30}"]
BATCHES = [f"batch_00{'1' * 30}", f"batch_00{'2' * 30}"]
MESSAGES = [f"msg_00{'3' * 30}", f"msg_00{'4' * 30}"]
LETTERS = ["0-1795486176000-0", "0-1795486176000-1", "0-1795486200000-0"]
LETTER_JOBS = [JOBS[0], JOBS[-1], None]
"""One letter is of no job."""
KINDS = {"/v1/jobs": JOBS, "/v1/batches": BATCHES, "/admin/dlq": LETTERS, "/admin/webhooks": MESSAGES}


class Lists(QuietHandler):
    """A server that lists ids in pages and answers everything else with 404, which names the path."""

    def do_GET(self) -> None:  # noqa: N802
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        if parts.path not in KINDS:
            self.send(404, {"error": {"message": f"asked for {self.path}", "code": "none"}})
            return
        ids, limit = KINDS[parts.path], int(query["limit"][0])
        begin = int(query.get("cursor", query.get("after", ["0"]))[0])
        page: list[dict[str, Any]] = [{"id": each} for each in ids[begin : begin + limit]]
        if ids is LETTERS:
            page = [each | {"job_id": job_id} for each, job_id in zip(page, LETTER_JOBS, strict=True)]
        place = str(begin + limit) if begin + limit < len(ids) else None
        self.send(200, {"data": page, "has_more": place is not None, "next_cursor": place, "last_id": place})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lists)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def said(url: str, told: Any) -> Callable[[str], str]:
    """What a command complains of, for all of them fail."""
    return lambda words: str(told(f"{words} --url {url}", code=None).err)


@pytest.mark.parametrize(("command", "given", "path"), [
    ("jobs show", "job_00ffff", f"/v1/jobs/{JOBS[-1]}?include=input"),  # on the third page
    ("jobs events", "job_00ffff", f"/v1/jobs/{JOBS[-1]}/events"),
    ("batch show", "batch_001111", f"/v1/batches/{BATCHES[0]}"),
    ("webhooks show", "msg_0044", f"/admin/webhooks/{MESSAGES[1]}"),
    ("dlq show", "0-17954862", "/admin/dlq/0-1795486200000-0"),
    ("dlq show", "job_00ffff", f"/admin/dlq/{JOBS[-1]}"),  # a letter by its job
    ("jobs show", f"job_00{'e' * 30}", f"/v1/jobs/job_00{'e' * 30}?include=input"),  # whole: not looked up
    ("jobs show", "job_00eeee", "/v1/jobs/job_00eeee?include=input"),  # nothing begins so: the server says it
    ("jobs show", "00ffff", f"/v1/jobs/{JOBS[-1]}?include=input"),  # without the word at its front
    ("batch show", "002222", f"/v1/batches/{BATCHES[1]}"),
])  # fmt: skip
def test_a_beginning_stands_for_the_one_id(command: str, given: str, path: str, said: Callable[[str], str]) -> None:
    """Of jobs, batches, messages and dead letters alike, whatever page they are on."""
    assert f"asked for {path}\n" in said(f"{command} {given}")


@pytest.mark.parametrize(
    ("command", "given"),
    [("jobs show", "job_00f"), ("jobs events", "job_"), ("batch output", "batch_001"), ("webhooks show", "msg_0"),
     ("dlq drop", "0-179"), ("dlq show", "job_00f"), ("jobs cancel", "00f")],
)  # fmt: skip
def test_a_beginning_that_is_too_short_is_said_to_be(command: str, given: str, said: Callable[[str], str]) -> None:
    """It is not asked for, even if it is the only one: one digit more or less must not cancel another job."""
    error = said(f"{command} {given}")
    assert f"{given} is too short" in error and "next:  give more digits" in error


@pytest.mark.parametrize("command", ["show", "cancel"])
def test_two_ids_that_begin_alike_are_an_error(command: str, said: Callable[[str], str]) -> None:
    """Nothing is guessed; the error names the candidates."""
    common = JOBS[0][:-2]
    error = said(f"jobs {command} {common}")
    assert f"{common} is the beginning of several job ids" in error and f"{JOBS[0]}, {JOBS[1]}," in error
    assert "asked for" not in error


def test_a_list_that_is_cut_off_completes_nothing(said: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lists the newest hundred messages: an older one may begin alike."""
    monkeypatch.setitem(KINDS, "/admin/webhooks", MESSAGES + [f"msg_{number:032x}" for number in range(120)])
    error = said("webhooks replay msg_003333")
    assert "only the newest 100" in error and "whole id" in error
    assert f"asked for /admin/webhooks/{MESSAGES[0]}\n" in said(f"webhooks show {MESSAGES[0]}")


def test_every_argument_that_is_an_id_has_a_list() -> None:
    """An argument of another name would not be completed."""
    from cli import admin, batch, jobs  # noqa: PLC0415

    groups = (jobs.jobs, batch.batch, admin.dlq, admin.webhooks)
    arguments = {param.name for group in groups for each in group.commands.values() for param in each.params}
    assert {name for name in arguments if name and name.endswith("_id") and name != "as_json"} == set(LISTINGS)
