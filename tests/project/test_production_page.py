"""docs/production.md: a backup and a restore as typed there, and the program that erases what people wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import MODEL, ROOT, commands
from house import House, eventually, serving
from redis import Redis

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "production.md"
STEPS_S = 120


def section(title: str, folder: Path) -> list[str]:
    """The commands of one section."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n{title}\n")[2]
    page = folder / "section.md"
    page.write_text(re.split(r"^##+ ", text, flags=re.MULTILINE)[0], encoding="utf-8")
    return commands(page)


def test_a_backup_is_restored_as_the_page_says(tmp_path: Path) -> None:
    """With an instance of its own: what was accepted before the copy is there again, what came later is not."""
    folder, tools = tmp_path / "here", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    (tools / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m cli "$@"\n')
    (tools / "penstock").chmod(0o755)
    (folder / "penstock.toml").write_text(f'[up]\nworkers = 0\n[api]\nport = 0\n[models."{MODEL}"]\nengine = "sim"\n')
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environ |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, timeout=STEPS_S, check=False
        )
        assert done.returncode == 0 or "doctor" in line, (line, done.stdout, done.stderr)
        return done.stdout

    def known() -> set[str]:
        return {json.loads(line)["id"] for line in run("penstock jobs ls --json").splitlines()}

    steps = section("### One machine (penstock up)", tmp_path)
    copy = next(number for number, line in enumerate(steps) if line.startswith("mkdir -p backup"))
    restore = next(number for number, line in enumerate(steps) if "penstock down" in line and number > copy)
    try:
        run("penstock up --detach")
        kept = run('penstock submit "before the copy"').strip()
        (folder / ".penstock" / "files").mkdir(mode=0o700, exist_ok=True)
        owner = run("penstock store show --json")
        for line in steps[:restore]:
            run(line)
        lost = run('penstock submit "after the copy"').strip()
        assert known() == {kept, lost}
        for line in steps[restore:]:
            run(line)
        assert known() == {kept}
        assert run("penstock store show --json") == owner
    finally:
        subprocess.run(["sh", "-c", "penstock down --now"], cwd=folder, env=environ, capture_output=True, check=False)


@pytest.fixture
def house(tmp_path: Path) -> Any:
    settings = (
        f'[models."{MODEL}"]\nengine = "sim"\n[webhooks.away]\nurl = "http://127.0.0.1:1/"\nallow_http = true\n'
        f'networks = ["127.0.0.0/8"]\nsecret = "whsec_{"a" * 32}"\n'
    )
    (tmp_path / "penstock.toml").write_text(settings, encoding="utf-8")
    with serving(tmp_path, "workers", "offline") as house:
        yield house


def test_the_program_erases_one_job_and_all_of_a_tenant(house: House) -> None:
    """A job that has not ended is left alone. Webhook messages about the others, which nobody takes, go with them."""

    def submit(**fields: Any) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **fields}
        return str(json.loads(house.post("/v1/jobs", body)[2])["id"])

    def erase(*ids: str) -> str:
        words = [sys.executable, ROOT / "examples" / "erase.py", house.redis_url, "local", *ids]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def conversation() -> str:
        item = {"role": "user", "content": "hello"}
        return str(json.loads(house.post("/v1/conversations", {"items": [item]})[2])["id"])

    ended, begun = [submit(), submit()], conversation()
    running = submit(max_tokens=7000)
    assert all(b'"completed"' in house.get(f"/v1/jobs/{job}?wait=30")[1] for job in ended)
    answered = json.loads(house.post("/v1/responses", {"model": MODEL, "input": "hello", "background": True})[2])["id"]
    store = Redis.from_url(house.redis_url)
    eventually(lambda: len(list(store.scan_iter("*:hook:*"))) == 3)
    assert erase(ended[0]) == erase(answered.removeprefix("resp_")) == "2 erased\n"
    assert [house.get(f"/v1/jobs/{job}")[0] for job in ended] == [410, 200]
    assert house.get(f"/v1/conversations/{begun}")[0] == 200
    assert erase() == "3 erased\n"
    assert not list(store.scan_iter("*:hook:*"))
    assert house.get(f"/v1/conversations/{begun}")[0] == 404
    assert [house.get(f"/v1/jobs/{job}")[0] for job in (*ended, running)] == [410, 410, 200]
    listed = json.loads(house.get("/v1/jobs")[1])["data"]
    assert [job["id"] for job in listed] == [running]
