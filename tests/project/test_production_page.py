"""docs/production.md: a backup and a restore as typed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import MODEL, ROOT, commands

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
