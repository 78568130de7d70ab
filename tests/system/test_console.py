"""The console in a real browser: a chat that goes on whatever breaks, dead letters, batches, jobs, links and keys.

Needs Debian's chromium, so only `make test-browser` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import BrowserPage, browsing, missing
from house import House, eventually, unstarted

pytestmark = [
    pytest.mark.skipif("PENSTOCK_TEST_BROWSER" not in os.environ, reason="needs a browser: make test-browser"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]

LAST = ".turn.assistant:last-of-type"
TEXT = f"[...document.querySelector('{LAST} .text').childNodes].map((one) => one.data ?? '').join('')"
"""Of the last answer, without the marks in it."""
MARKS = f"[...document.querySelectorAll('{LAST} .joint')].map((one) => one.textContent).join()"


class Stage:
    """Processes whose workers the test starts and kills, and a page of the console that is logged in."""

    def __init__(self, house: House, page: BrowserPage) -> None:
        self.house, self.page = house, page
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def start_worker(self, name: str) -> None:
        self.workers[name] = self.house.start("workers", "--id", name)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.house.url}/console{path}")
        self.page.wait("document.querySelector('main h1') && !document.body.innerText.includes('Loading…')")

    def ask(self, text: str) -> None:
        """Send a message, and wait for the beginning of the answer."""
        before = int(self.page.run("document.querySelectorAll('.turn.assistant').length"))
        self.page.type("textarea", text)
        self.page.click(".ask .primary")
        self.page.wait(f"document.querySelectorAll('.turn.assistant').length === {before + 1} && {TEXT}.length > 30")

    def answer(self) -> str:
        """The whole answer as the page shows it, and that it equals what the API says, read anew."""
        self.page.wait(f"document.querySelector('{LAST} .badge.good')")
        shown = str(self.page.run(TEXT))
        path = str(self.page.run(f"document.querySelector('{LAST} .meta a').pathname"))
        result = json.loads(self.house.get(f"/v1/jobs/{path.rpartition('/')[2]}/result")[1])
        assert shown == result["choices"][0]["message"]["content"]
        return path


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with unstarted(tmp_path) as house, browsing(tmp_path) as browser:
        house.environ |= {"PENSTOCK_SIM_FAULTS": "true", "PENSTOCK_SIM_STEP_MS": "25"}
        house.environ["PENSTOCK_FILES_DIR"] = str(tmp_path / "files")
        house.start("scheduler")
        house.start_api()
        stage = Stage(house, browser.page())
        stage.start_worker("worker-1")
        house.wait_ready()
        link = json.loads(house.post("/admin/console/links", {})[2])["path"]
        stage.page.show(1280, 800)
        stage.page.goto(house.url + link)
        stage.page.wait("document.querySelector('.verdict')")
        assert "link" not in stage.page.run("location.href")
        yield stage


def test_a_chat_goes_on_through_a_cut_a_reload_and_the_death_of_its_worker(stage: Stage) -> None:
    stage.open("/chat")
    stage.page.wait("document.querySelector('select[name=model]').value === 'sim'")
    stage.ask("Name some rivers.")
    stage.page.click(".ask .actions button:first-child")  # cuts the connection
    stage.page.wait(f"document.querySelector('{LAST} .joint')?.textContent === 'reconnected'")
    stage.answer()

    stage.ask("And some lakes.")
    stage.open("/chat")  # a reload
    stage.page.wait(f"{TEXT}.length > 30")
    stage.answer()

    stage.start_worker("worker-2")
    eventually(lambda: b"worker-2" in stage.house.get("/admin/pools/sim")[1])
    stage.ask("And some seas.")
    meta = f"document.querySelector('{LAST} .meta').textContent"
    first = str(stage.page.wait(f"{meta}.match(/worker-./)?.[0]"))
    other = "worker-2" if first == "worker-1" else "worker-1"
    stage.workers[first].kill()
    stage.page.wait(f"/{first}.*{other}/.test({MARKS})")
    path = stage.answer()
    marks = stage.page.run(MARKS)

    stage.open("/chat")
    stage.page.wait(f"{MARKS} === {json.dumps(marks)}")
    stage.open(path.removeprefix("/console"))
    stage.page.wait(f"document.querySelector('.transcript .joint')?.textContent === {json.dumps(marks)}")
    stage.page.wait("document.querySelector('.timeline')")
    steps = str(stage.page.run("document.querySelector('.timeline').innerText"))
    story = ("Queued", f"Claimed by {first}", f"{first} was lost", f"Continued on {other}", "Completed")
    places = [steps.find(words) for words in story]
    assert -1 not in places and places == sorted(places), steps
    assert not stage.page.errors, stage.page.errors


def test_the_only_worker_that_dies_leaves_a_mark_at_once(stage: Stage) -> None:
    """Before anybody goes on; and its successor has the same name."""
    stage.open("/chat")
    stage.ask("Name some rivers.")
    stage.workers["worker-1"].kill()
    stage.page.wait(f"/worker-1/.test({MARKS})")
    stage.page.wait(f"document.querySelector('{LAST} .badge.wait')")
    stage.start_worker("worker-1")
    stage.page.wait(f"/worker-1 was lost here and started again; continued after/.test({MARKS})")
    stage.answer()


def test_a_dead_letter_is_replayed_and_another_dropped(stage: Stage) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "[[crash@4]]"}], "max_tokens": 9}
    jobs = []
    for number in range(2):
        jobs.append(json.loads(stage.house.post("/v1/jobs", body)[2])["id"])
        while json.loads(stage.house.get(f"/v1/jobs/{jobs[-1]}")[1])["status"] in ("queued", "in_progress"):
            name = f"worker-{len(stage.workers)}" if stage.workers else "worker-1"
            if all(worker.poll() is not None for worker in stage.workers.values()):
                stage.start_worker(f"{name}-{number}")
            stage.page.wait("new Promise((done) => setTimeout(() => done(true), 50))")
    stage.open("/dead-letters")
    stage.page.wait("document.querySelectorAll('tbody tr').length === 2")
    stage.page.click("button[aria-label^='Replay job_']")
    stage.page.wait("document.querySelectorAll('tbody tr').length === 1")
    stage.page.click("button[aria-label^='Drop job_']")
    stage.page.wait("document.querySelector('dialog[open]')?.innerText.includes('Drop 1')")
    stage.page.press("Escape")
    stage.page.wait("!document.querySelector('dialog')")
    assert stage.page.run("document.querySelectorAll('tbody tr').length") == 1, "Escape keeps it"
    stage.page.click("button[aria-label^='Drop job_']")
    stage.page.click("dialog .danger")
    stage.page.wait("document.body.innerText.includes('No dead letters.')")
    known = {job["id"] for job in json.loads(stage.house.get("/v1/jobs?limit=100")[1])["data"]}
    assert len(known) == 3, "the replay made one new job"


def test_a_batch_is_uploaded_and_its_output_is_what_the_api_gives(stage: Stage, tmp_path: Path) -> None:
    stage.house.start("offline")
    line = {"method": "POST", "url": "/v1/chat/completions"}
    bodies = [{"model": "sim", "max_tokens": 5, "messages": [{"role": "user", "content": f"n {n}"}]} for n in range(6)]
    file = tmp_path / "input.jsonl"
    file.write_text("".join(json.dumps(line | {"custom_id": str(n), "body": b}) + "\n" for n, b in enumerate(bodies)))
    stage.open("/batches")
    stage.page.click("button.primary")
    stage.page.wait("document.querySelector('#upload-error').textContent.includes('Choose a file')")
    stage.page.choose_file("input[type=file]", file)
    stage.page.click("button.primary")
    stage.page.wait("document.querySelector('tbody .badge.good') && document.body.innerText.includes('6 of 6')", 60)
    keep = "(blob) => { window.saved = blob.text(); return make(blob); }"
    stage.page.run(f"const make = URL.createObjectURL.bind(URL); URL.createObjectURL = {keep}")
    stage.page.click("button[aria-label^='Answers of']")
    stage.page.wait("window.saved !== undefined")
    saved = str(stage.page.run("window.saved"))
    batch = json.loads(stage.house.get("/v1/batches")[1])["data"][0]["id"]
    stage.page.click("tbody a.id")
    stage.page.wait(f"location.pathname === '/console/batches/{batch}' && document.body.innerText.includes('6 of 6')")
    stage.page.wait("document.querySelector('.facts').innerText.includes('/v1/chat/completions')")
    assert saved == stage.house.get(f"/v1/batches/{batch}/output")[1].decode()
    assert [json.loads(each)["custom_id"] for each in saved.splitlines()] == [str(n) for n in range(6)]


def test_the_jobs_of_a_filter_are_cancelled_together(stage: Stage) -> None:
    """After a question; those of another lane go on."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3000}
    for lane in ["batch"] * 5 + ["standard"]:
        assert stage.house.post("/v1/jobs", body | {"queue": {"priority": lane}})[0] == 202
    stage.open("/jobs?lane=batch&status=in_progress")
    stage.page.wait("document.querySelectorAll('[data-row]').length === 5")
    stage.page.click(".actions .danger")
    stage.page.wait("document.querySelector('dialog[open]')?.innerText.includes('Cancel 5 jobs?')")
    stage.page.press("Escape")
    stage.page.wait("!document.querySelector('dialog')")
    assert stage.page.run("document.querySelectorAll('[data-row]').length") == 5, "Escape keeps them"
    stage.page.click(".actions .danger")
    stage.page.click("dialog .danger")
    stage.page.wait("document.querySelector('#status').textContent.includes('5 jobs cancelled')")
    found = json.loads(stage.house.get("/v1/jobs?limit=100")[1])["data"]
    assert sorted((job["status"], job["priority"]) for job in found) == (
        [("cancelled", "batch")] * 5 + [("in_progress", "standard")]
    )
    assert not stage.page.errors, stage.page.errors


def test_it_says_when_the_server_is_gone_and_when_it_is_back(stage: Stage) -> None:
    stage.open("")
    api = stage.house._processes[1]
    api.kill()
    api.wait()
    stage.page.wait("document.querySelector('.verdict').innerText.includes('Unknown')")
    assert not stage.page.run("document.querySelector('.problems')"), "advice of old data"
    stage.page.wait("document.querySelector('.fresh.stale')?.innerText.includes('Data of')")
    stage.house.start_api()
    stage.page.wait("document.querySelector('.verdict').innerText.includes('Flowing')")


def test_a_link_that_is_pasted_into_an_open_page_logs_in(stage: Stage) -> None:
    """For the browser, only what is behind the # has changed, so it does not load the page anew by itself."""
    stage.page.run("localStorage.clear()")
    stage.page.goto(f"{stage.house.url}/console")
    stage.page.wait("document.querySelector('input[name=key]')")
    link = json.loads(stage.house.post("/admin/console/links", {})[2])["path"]
    stage.page.run(f"location.hash = {json.dumps(link.partition('#')[2])}; true")
    stage.page.wait("document.querySelector('.verdict')")


def test_a_key_is_created_rotated_and_revoked(stage: Stage) -> None:
    """It is shown once, works until it is replaced, and a question stands before each change. By keyboard: the field
    has the focus, Enter sends, and Escape does not close what is shown only once."""
    page, house = stage.page, stage.house

    def answers(key: str) -> int:
        return house.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0]

    def shown() -> str:
        """The secret, once; then it is nowhere in the page."""
        page.wait("document.querySelector('dialog[open] input[readonly]')")
        key = str(page.run("document.querySelector('dialog input[readonly]').value"))
        page.press("Escape")
        assert page.run("document.querySelector('dialog[open] input[readonly]') !== null"), "Escape loses the key"
        page.click("dialog button:not(.primary)")
        page.wait("!document.querySelector('dialog')")
        assert key not in str(page.run("document.documentElement.outerHTML + JSON.stringify(localStorage)"))
        return key

    stage.open("/keys")
    page.wait("document.body.innerText.includes('There are no keys.')")
    page.run("document.querySelector('section button.primary').focus()")
    page.press("Enter")
    page.wait("document.querySelector('dialog[open]')?.innerText.includes('It is the first one')")
    page.press("Enter")
    page.wait("document.querySelector('#key-error').textContent === 'Enter a tenant.'")
    page.command("Input.insertText", text="team a")
    page.press("Enter")
    page.wait("document.querySelector('#key-error').textContent.includes('tenant')")
    page.run("document.querySelector('dialog input[name=tenant]').value = ''")
    page.type("dialog input[name=tenant]", "team-a")
    page.type("dialog input[name=label]", "nightly <b>runs</b>")
    page.type("dialog input[name=endpoints]", "models, jobs")
    page.type("dialog input[name=limited]", "requests_per_minute=many")
    page.press("Enter")
    page.wait("document.querySelector('#key-error').textContent.includes('limits')")
    page.run("document.querySelector('dialog input[name=limited]').value = ''")
    page.type("dialog input[name=limited]", "queued=5, cost_per_day=0.5")
    page.press("Enter")
    first = shown()
    assert answers(first) == 200 and answers("sk-none") == 401
    page.wait("document.querySelector('tbody tr')?.innerText.includes('nightly <b>runs</b>')")
    page.wait("document.querySelector('tbody tr').innerText.includes('models, jobs')")
    page.wait("/queued: 5\\s+cost per day: 0.5/.test(document.querySelector('tbody tr').innerText)")
    page.click("button[aria-label^='Rotate nightly']")
    page.click("dialog .danger")
    second = shown()
    assert (answers(first), answers(second)) == (401, 200)
    page.click("button[aria-label^='Revoke nightly']")
    page.wait("document.querySelector('dialog[open]')?.innerText.includes('For good')")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert answers(second) == 200, "Escape keeps it"
    page.click("button[aria-label^='Revoke nightly']")
    page.click("dialog .danger")
    page.wait("document.querySelector('#status').textContent.includes('is revoked')")
    assert answers(second) == 401
    page.wait("document.querySelector('details summary')?.textContent === '1 revoked or expired key'")
    page.wait("document.body.innerText.includes('No key is valid.')")
    assert not [each for each in page.errors if "400 (Bad Request)" not in each], page.errors


def test_the_keyboard_is_enough(stage: Stage) -> None:
    for _ in range(3):
        stage.house.post("/v1/jobs", {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    stage.open("/jobs")
    stage.page.wait("document.querySelectorAll('[data-row]').length === 3")
    stage.page.press("j")
    stage.page.press("j")
    assert stage.page.run("[...document.querySelectorAll('[data-row]')].indexOf(document.activeElement)") == 1
    stage.page.press("k")
    stage.page.press("Enter")
    stage.page.wait("document.querySelector('.timeline')")
    stage.page.run("history.back()")
    stage.page.wait("document.querySelector('input[type=search]')")
    stage.page.press("/")
    assert stage.page.run("document.activeElement.type") == "search"
    stage.page.press("j")
    assert stage.page.run("document.activeElement.value") == "j", "a field takes every key"
    stage.page.press("Escape")
    stage.page.press("?")
    stage.page.wait("document.querySelector('dialog[open]')")
    stage.page.press("Escape")
    stage.page.press("g")
    stage.page.press("c")
    stage.page.wait("location.pathname === '/console/chat'")


def test_usage_is_shown_and_none_as_well(stage: Stage) -> None:
    """By model, then by tenant; no tenant's name is in an address."""
    stage.open("/usage")
    stage.page.wait("document.querySelector('.empty .strong')?.textContent.startsWith('Nothing was used')")
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 7}
    assert stage.house.post("/v1/chat/completions", body)[0] == 200
    stage.open("/usage")
    stage.page.wait("document.querySelectorAll('.stack rect').length === 1")
    row = "document.querySelector('tbody tr').innerText"
    assert str(stage.page.run(row)).split()[:2] == ["sim", "1"]
    stage.page.run(
        "const by = document.querySelector('select[name=by]'); by.value = 'tenant'; by.onchange({ target: by }); 1"
    )
    stage.page.wait(f"{row}.startsWith('local')")
    assert "local" not in str(stage.page.run("location.search + location.pathname"))
    assert not stage.page.errors, stage.page.errors
