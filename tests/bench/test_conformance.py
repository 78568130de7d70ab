"""Conformance suites of others: what the adapter makes of Penstock's streams, and how verdicts are read and counted.

The suites are not part of this tree: the cases here are our own, by the shapes that their protocols document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from bench.conformance.__main__ import failures_of, main, notes_of, row_of
from bench.conformance.adapter import serving_streams
from bench.conformance.stream_writer import LEASE_MS, MODEL
from bench.conformance.suites import (
    DURABLE,
    DURABLE_PACKAGE,
    EXPECTED,
    FAILED,
    OPEN_RESPONSES_PROGRAM,
    PASSED,
    RESPONSES,
    SKIPPED,
    CaseVerdict,
    SuiteMissing,
    all_but_expected,
    reason_of,
    run_durable,
    run_open_responses,
    suite_of,
)
from bench.penstock import Penstock

TEXT, JSON = "text/plain", "application/json"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """The adapter before a real API process."""
    folder = tmp_path_factory.mktemp("conformance")
    lines, settings = f'[models.{MODEL}]\nengine = "sim"\n', {"redis.lease_ms": LEASE_MS}
    with (
        Penstock(folder, workers=0, settings=settings, config=lines, tree=Path(__file__).parents[2]) as penstock,
        serving_streams(penstock.redis_url, penstock.url) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def begun(door: httpx2.Client, path: str, body: str = "", kind: str = TEXT) -> httpx2.Response:
    answer = door.put(path, content=body, headers={"Content-Type": kind})
    assert answer.status_code == 201, answer.text
    return answer


def more(door: httpx2.Client, path: str, body: str, kind: str = TEXT, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return door.post(path, content=body, headers={"Content-Type": kind} | named)


@pytest.mark.slow
def test_what_is_appended_is_read_from_each_offset(door: httpx2.Client) -> None:
    begun(door, "/text", "a")
    offsets = [more(door, "/text", text).headers["stream-next-offset"] for text in "bcd"]
    assert offsets == sorted(set(offsets))
    whole = door.get("/text")
    assert (whole.text, whole.headers["content-type"].partition(";")[0]) == ("abcd", TEXT)
    assert whole.headers["stream-up-to-date"] == "true" and "stream-closed" not in whole.headers
    assert [door.get("/text", params={"offset": each}).text for each in offsets] == ["cd", "d", ""]
    again = door.get("/text", headers={"If-None-Match": whole.headers["etag"]})
    assert again.status_code == 304
    assert door.get("/text", params={"offset": "x"}).status_code == 400
    assert door.get("/other").status_code == 404


@pytest.mark.slow
def test_json_keeps_its_messages(door: httpx2.Client) -> None:
    begun(door, "/json", '[{"a": 1}, "two"]', JSON)
    more(door, "/json", "[[3], null]", JSON)
    assert door.get("/json").json() == [{"a": 1}, "two", [3], None]
    assert more(door, "/json", "{", JSON).status_code == 400 and more(door, "/json", "[]", JSON).status_code == 400
    assert more(door, "/json", "x").status_code == 409


@pytest.mark.slow
def test_a_closed_stream_ends_live_reads(door: httpx2.Client) -> None:
    begun(door, "/closed", "a")
    assert more(door, "/closed", "b", Stream_Closed="true").status_code == 204
    tail = door.get("/closed").headers
    assert tail["stream-closed"] == "true"
    polled = door.get("/closed", params={"offset": tail["stream-next-offset"], "live": "long-poll"})
    assert (polled.status_code, polled.headers["stream-closed"]) == (204, "true")
    lines = door.get("/closed", params={"offset": "-1", "live": "sse"}).text.split("\n")
    assert lines[:2] == ["event: data", "data:ab"]
    control = json.loads(next(line for line in lines if line.startswith("data:{")).removeprefix("data:"))
    assert control["streamClosed"] is True and "streamCursor" not in control
    assert more(door, "/closed", "c").status_code == 409


@pytest.mark.slow
def test_a_long_poll_gets_what_is_appended_meanwhile(door: httpx2.Client) -> None:
    begun(door, "/live", "a")
    at = door.head("/live").headers["stream-next-offset"]
    with door.stream("GET", "/live", params={"offset": at, "live": "sse"}) as reader:
        lines = reader.iter_lines()
        assert next(lines) == "event: control"
        more(door, "/live", "b")
        assert "data:b" in (next(lines) for _ in range(10))
    got = door.get("/live", params={"offset": at, "live": "long-poll"})
    assert (got.status_code, got.text) == (200, "b") and int(got.headers["stream-cursor"]) > 0


# --- suites ----------------------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_folder_without_a_suite_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SuiteMissing, match="holds none of"):
        suite_of(tmp_path)
    assert main(["--suite", str(tmp_path)]) == 1


def test_the_report_of_vitest_is_read(tmp_path: Path) -> None:
    """Cases that are left out without a reason are not counted."""
    program(tmp_path / DURABLE_PACKAGE / "dist" / "index.js", "")
    case = {"ancestorTitles": ["", "Caching"], "fullName": "Caching a", "failureMessages": []}
    results = [
        case | {"status": "passed"},
        case | {"status": "failed", "fullName": "Caching b", "failureMessages": ["wrong\n at x"]},
        case | {"status": "skipped"},
        case | {"status": "skipped", "fullName": "Fork - Reading a"},
    ]
    report = json.dumps({"testResults": [{"assertionResults": results}]})
    program(
        tmp_path / "node_modules" / ".bin" / "vitest",
        "#!/bin/sh\nfor word; do case $word in --outputFile=*) out=${word#*=};; esac; done\n"
        f"cat > $out <<'END'\n{report}\nEND\necho $CONFORMANCE_TEST_URL > url\nexit 1\n",
    )
    room = tmp_path / "room"
    room.mkdir()
    assert suite_of(tmp_path) == DURABLE
    assert run_durable(tmp_path, "http://x", room) == [
        CaseVerdict(DURABLE, "Caching a", PASSED),
        CaseVerdict(DURABLE, "Caching b", FAILED, "wrong"),
        CaseVerdict(DURABLE, "Fork - Reading a", SKIPPED),
    ]
    assert (room / "url").read_text() == "http://x\n" and "runConformanceTests" in (room / "suite.test.mjs").read_text()


def test_the_results_of_open_responses_are_read(tmp_path: Path) -> None:
    program(tmp_path / OPEN_RESPONSES_PROGRAM, "")
    results = [
        {"id": "basic-response", "name": "Basic", "status": "passed"},
        {"id": "image-input", "name": "Image", "status": "failed", "errors": ["400"]},
    ]
    program(
        tmp_path / "node_modules" / ".bin" / "bun",
        f'#!/bin/sh\ntest "$3" = http://x/v1 || exit 1\ncat <<END\n{json.dumps({"results": results})}\nEND\nexit 1\n',
    )
    assert suite_of(tmp_path) == RESPONSES
    found = run_open_responses(tmp_path, "http://x", "bench", tmp_path)
    assert [(each.case, each.status, each.message) for each in found] == [
        ("basic-response", PASSED, ""),
        ("image-input", FAILED, "400"),
    ]
    assert "images" in found[1].reason


def test_a_suite_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    program(tmp_path / "node_modules" / ".bin" / "vitest", "#!/bin/sh\nexit 1\n")
    program(tmp_path / "node_modules" / ".bin" / "bun", "#!/bin/sh\necho nothing\n")
    with pytest.raises(SuiteMissing, match="no report"):
        run_durable(tmp_path, "http://x", tmp_path)
    with pytest.raises(SuiteMissing, match="no results"):
        run_open_responses(tmp_path, "http://x", "m", tmp_path)


def test_verdicts_are_counted() -> None:
    """A case that is not passed counts as failed unless there is a reason for it."""
    verdicts = [
        CaseVerdict(DURABLE, "Reads one", PASSED),
        CaseVerdict(DURABLE, "Reads two", FAILED, "wrong"),
        CaseVerdict(DURABLE, "Fork - Reading one", FAILED),
        CaseVerdict(DURABLE, "Fork - Reading two", PASSED),
    ]
    row = row_of("1.0", verdicts)
    assert [row[key] for key in ("suite", "cases", "passed", "excepted", "failed")] == [DURABLE, 4, 2, 1, 1]
    notes, failures = notes_of(verdicts), failures_of(verdicts)
    assert failures == [f"{DURABLE}: Reads two: failed: wrong"] and "forks" in notes[0] and len(notes) == 1


def test_each_exception_has_a_reason_and_excuses_not_everything() -> None:
    assert all(each.reason for each in EXPECTED)
    assert [each.pattern for each in EXPECTED if re.search(each.pattern, "") or re.search(each.pattern, "a case")] == []
    assert not reason_of(DURABLE, "Read Operations should read empty stream") and not reason_of(RESPONSES, "basic")
    others = re.compile(all_but_expected(DURABLE))
    for case in (
        "Fork - Reading a",
        "Read a Producer",
        "TTL Expiry b",
        "HEAD shows an expired one",
        "Read Operations c",
    ):
        assert bool(others.search(case)) == (not reason_of(DURABLE, case)), case
