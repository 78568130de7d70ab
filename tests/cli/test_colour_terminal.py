"""Every command that prints, in a terminal of 80 columns with colour: styles reach it, data cannot style it, and lines
fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cli_commands import commands
from cli_instance import ROOT, Instance
from house import eventually
from recorded import BEGIN_S, request, sample
from rich.cells import cell_len
from terminals import OnTerminal

from cli.app import app
from telemetry.records.reader import create
from telemetry.records.schema import ENCODER

pytestmark = pytest.mark.slow

COLUMNS = 80
HOSTILE = "\x1b]0;title\x07\x1b[2J \x1b[8m\x9b31m \u202e水路閘門\u200b "
"""Sets the title, clears, hides what follows, reverses it; and characters of two columns."""
STYLE = re.compile(r"\x1b\[(?!2J|8m)[0-9;]*[mKHJABCD]|\x1b\[\?(?:25|1049)[hl]")
"""Styles, and what a live screen needs: cursor, erasing, the other screen; nothing that the data has."""
STYLE_AS_TEXT = re.compile(r"\\u001b\[(?!2J|8m)")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\u200b]")
SETTINGS = """
[models.sim]
engine = "sim"
min_workers = 2
max_workers = 2
[sim]
step_ms = 5
[webhooks.hook]
url = "http://127.0.0.1:1/"
secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
allow_http = true
networks = ["127.0.0.0/8"]
"""
HELP_PAGES = [[*path.split()[1:], "--help"] for path, _ in commands(app, "penstock")]
LOCAL = [
    "", "--help", "version", "help exit-codes", "help environment", "no-such-command", "jobs --flag", "jobs show",
    "plan memory --model qwen3-8b --gpu h200", "plan cost --model llama-3.3-70b --gpu h200 --gpu b200 --tp 2",
    "plan search --model gemma-3-27b --gpu h100 --gpus 4",
]  # fmt: skip
"""Commands that ask no server. "--help": of all commands. Files for programs, such as `store acl`, have lines as long
as they are."""
SERVED = [
    "ps", "jobs ls", "jobs show JOB", "jobs show JOB --input", "jobs timing JOB", "jobs events JOB", "jobs result JOB",
    "jobs watch JOB", "jobs cancel JOB", "jobs show no-such-job", "batch ls", "batch show BATCH", "batch errors BATCH",
    "batch cancel BATCH", "webhooks ls", "webhooks show MESSAGE", "tenants", "usage", "scale status", "scale log",
    "dlq ls", "dlq show none", "store show", "logs", "logs -v", "logs --job JOB", "report --since 1h",
    "report --compare 1h.. slow", "report --compare slow slow", "doctor -v", "top --once", "console --no-browser",
    "chat hello --max-tokens 40", "submit hello --max-tokens 40 --wait", "plan fit",
]  # fmt: skip
LIVE = {
    "top": "PROCESS",
    "logs -f": "leads now",
    "plan goodput --model llama-3.1-8b --gpu h200 --gpus 4": r" [1-9]\d?/",
}
"""Commands that end with Ctrl-C, and what they show before."""
MARK = "=" * 20
"""Between the names of commands and what they show."""
PLAIN = ["ps", "report --compare slow slow", "top --once", "no-such-command", "logs"]


def on_terminal(
    folder: Path, command: list[str], width: int = COLUMNS, interrupt_at: str = "", **environ: str
) -> tuple[int, str]:
    """The exit code of Python, and what it writes to a terminal."""
    given = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", "NO_COLOR": ""} | environ
    with OnTerminal(command, folder, columns=width, environ=given) as screen:
        if interrupt_at:
            screen.until(lambda seen: re.search(interrupt_at, seen))
            screen.interrupt()
        return screen.end(), screen.seen


class Place:
    """An instance whose jobs, batches, messages and logs hold hostile text, and a folder of records that do."""

    def __init__(self, folder: Path) -> None:
        (folder / "penstock.toml").write_text(SETTINGS)
        self.folder, self.instance = folder, Instance(folder, batches=True)
        self.names: dict[str, str] = {}

    def fill(self) -> None:
        folder = self.folder
        body = {"model": "sim", "messages": [{"role": "user", "content": HOSTILE * 4}], "max_tokens": 8}
        metadata = {"note": HOSTILE, "ticket": "水 " * 60}
        jobs = [self._submit(body | {"metadata": metadata}), self._submit(body | {"queue": {"deadline_ms": 1}})]
        lines = [{"prompt": HOSTILE, "custom_id": f"{number} {HOSTILE}"} for number in range(3)]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._run("batch", "run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", "4")
        eventually(lambda: all(self._state(job) not in ("queued", "in_progress") for job in jobs))
        self.names = {
            "JOB": jobs[0],
            "BATCH": json.loads(self._run("batch", "ls", "--json").split("\n")[0])["id"],
            "MESSAGE": json.loads(self._run("webhooks", "ls", "--json").split("\n")[0])["id"],
        }
        with (folder / "data" / "logs" / "worker-1.log").open("a") as log:
            record = {"time": "2026-01-01T00:00:00.000Z", "level": "error", "message": HOSTILE}
            log.write(json.dumps(record | {"exception": HOSTILE * 9}) + f"\n{HOSTILE * 9}\n")
        for model in ("m", HOSTILE):
            rows = [request(number, model=model, tenant=HOSTILE, by=HOSTILE) for number in range(20)]
            _, file = create(folder / "slow", BEGIN_S, "worker", 1)
            os.write(file, b"\n".join(map(ENCODER.encode, [*rows, sample("worker", HOSTILE, 0, 1)])) + b"\n")
            os.close(file)

    def _submit(self, body: object) -> str:
        status, job = self.instance.ask("/v1/jobs", body)
        assert status == 202, job
        return str(job["id"])

    def _state(self, job: str) -> str:
        return str(self.instance.ask(f"/v1/jobs/{job}")[1]["status"])

    def _run(self, *words: str) -> str:
        done = self.instance.run(*words, "--data-dir", "data")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def words(self, line: str) -> list[str]:
        words = [self.names.get(word, word) for word in line.split()]
        is_local = line in LOCAL or words[0] == "plan"
        return [*words, *([] if is_local else ["--data-dir", "data"])]

    def shown(self, lines: Sequence[str], width: int = COLUMNS, **environ: str) -> dict[str, str]:
        """What each of these commands shows, one after the other in one process."""
        program = "from cli.__main__ import main\n"
        for line in lines:
            pages = HELP_PAGES if line == "--help" else [self.words(line)]
            program += f"print({f'{MARK}{line}{MARK}'!r}, flush=True)\n" + "".join(
                f"main({each!r})\n" for each in pages
            )
        code, said = on_terminal(self.folder, ["-c", program], width, **environ)
        assert code == 0, said
        parts = said.split(MARK)[1:]
        return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("place"))
    try:
        place.fill()
        yield place
    finally:
        place.instance.close()


def check(shown: str, line: str, width: int = COLUMNS) -> None:
    """No style that is shown as text, nothing that data made the terminal do, no line that it would have to break. A
    single word, such as a path, stays whole, so that it can be copied."""
    said = STYLE.sub("", re.sub(r"\x1b\[[0-9;]*H", "\n", shown))
    assert said.strip() and "Traceback" not in said, line
    assert not STYLE_AS_TEXT.search(said) and not CONTROL.search(said), line
    lines = [each.rstrip() for each in re.split("[\r\n]+", said)]
    assert not [each for each in lines if cell_len(each) > width and len(each.split()) > 1], line


@pytest.mark.parametrize("lines", [LOCAL, SERVED], ids=["local", "served"])
def test_what_a_command_prints_is_styled_safe_and_fits(place: Place, lines: list[str]) -> None:
    found = place.shown(lines)
    for line, shown in found.items():
        check(shown, line)
    if lines is SERVED:
        assert STYLE.search(found["ps"]) and STYLE.search(found["report --compare slow slow"])


@pytest.mark.parametrize("line", LIVE)
def test_commands_that_go_on(place: Place, line: str) -> None:
    """Ctrl-C leaves what they have found."""
    code, shown = on_terminal(place.folder, ["-m", "cli", *place.words(line)], interrupt_at=LIVE[line])
    check(shown, line)
    assert code == 130 and ("plan" not in line or "requests/s" in shown)


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_plain_narrow_terminal_gets_no_escape_sequence(place: Place, environ: dict[str, str]) -> None:
    for line, shown in place.shown(PLAIN, 50, **environ).items():
        assert shown.strip() and "\x1b" not in shown, line
        if not line.startswith("report"):  # its tables of figures need more columns
            check(shown, line, 50)
