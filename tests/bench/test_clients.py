"""Clients of others: what a case's answer must be, and what is told of a client that is not there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.clients import cases
from bench.clients.__main__ import main
from bench.clients.cases import CaseOutcome, fault_of, run_case
from bench.clients.catalogue import CASES, CLIENTS, MODEL, SIM, ClientProgram
from bench.clients.loads import LOADS, OUTPUT_TOKENS, REQUESTS
from bench.clients.loads import fault_of as load_fault_of
from bench.clients.node import NodeEnvironment
from bench.clients.tokenizer import byte_characters
from bench.environments import PINS, Environment
from bench.penstock import Penstock
from bench.report import load

ROOT = Path(__file__).parents[2]
WHOLE = ["a0", " b1", " c2", " d3", " e4"]


@pytest.mark.parametrize(
    ("case", "found", "fault"),
    [
        ("plain", "a0 b1 c2", ""),
        ("plain", "a0 c2", "'c2' where token 1 belongs"),
        ("plain", "", "nothing came"),
        ("plain", None, "nothing came"),
        ("streamed", WHOLE, ""),
        ("streamed", ["a0 b1 c2 d3 e4"], "in 1 pieces"),
        ("resumed", [*WHOLE, " e4"], "'e4' where token 5 belongs"),
        ("structured", {"name": "Rhine", "long": True}, ""),
        ("structured", {"name": "Rhine"}, "is no river"),
        ("structured", [], "is no river"),
        ("tools", "It rains.", ""),
        ("tools", [{"name": "Rhine", "long": True}], ""),
        ("tools", [], "nothing came"),
    ],
)
def test_an_answer_is_judged_by_its_case(case: str, found: object, fault: str) -> None:
    said = fault_of(SIM, case, f"begun\n{json.dumps(found)}\n")
    assert fault in said and bool(said) == bool(fault)


def test_what_is_no_json_is_a_fault() -> None:
    assert "no JSON" in fault_of(SIM, "plain", "Traceback") and "no JSON" in fault_of(SIM, "plain", "")


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ([OUTPUT_TOKENS] * REQUESTS, ""),
        ([OUTPUT_TOKENS] * (REQUESTS - 1), "19 of 20 answers"),
        ([OUTPUT_TOKENS] * (REQUESTS - 1) + [7], "such as 7"),
    ],
)
def test_a_load_has_every_answer_with_the_tokens_asked_for(counts: list[int], fault: str) -> None:
    said = load_fault_of(counts)
    assert fault in said and bool(said) == bool(fault)


def program(folder: Path, text: str, **fields: dict[tuple[str, str], str]) -> ClientProgram:
    """A client whose program is this text."""
    path = folder / "program.py"
    path.write_text(text)
    return ClientProgram(
        name="mine", title="Mine", environment=Environment(name="m", packages=("m==1",)), program=str(path), **fields
    )


def outcome(folder: Path, client: ClientProgram, case: str = "plain", engine: str = SIM) -> CaseOutcome:
    """What becomes of a case; no server is asked."""
    return run_case(client, Path(sys.executable), Penstock(folder, engine=engine), case, folder / "log")


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    found = outcome(tmp_path, program(tmp_path, "raise SystemExit('no such field')"))
    assert (found.wrong, found.cell) == ("plain: no such field", "**failed**")
    assert outcome(tmp_path, program(tmp_path, "print('\"a0 b1\"')")).cell == "yes"


def test_a_refusal_must_say_what_the_engine_lacks(tmp_path: Path) -> None:
    refused = {(SIM, "plain"): "no tools"}
    client = program(tmp_path, "raise SystemExit('400: it knows no tools')", refused=refused)
    assert outcome(tmp_path, client).cell == "refused"
    assert outcome(tmp_path, client, engine=MODEL).cell == "**failed**", "of this engine no refusal is expected"
    other = program(tmp_path, "raise SystemExit('500')", refused=refused)
    answered = program(tmp_path, "print('\"a0\"')", refused=refused)
    assert outcome(tmp_path, other).wrong and outcome(tmp_path, answered).wrong


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "RUN_TIMEOUT_S", 0.5)
    text = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    monkeypatch.chdir(tmp_path)
    assert "no end after" in outcome(tmp_path, program(tmp_path, text)).wrong
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_a_client_that_is_not_there_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_BENCH_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("bench.clients.__main__.ENGINES", (SIM,))
    assert main(["--clients", "openai,aiperf", "--out", str(tmp_path)]) == 0
    found = load(tmp_path / "clients.json")
    assert not found.rows
    assert found.notes == tuple(
        f"{each} was left out: not installed (--install)." for each in ("openai (Python)", "AIPerf")
    )
    assert main(["--clients", "nobody", "--out", str(tmp_path)]) == 2


def test_an_environment_counts_only_with_its_pins(tmp_path: Path) -> None:
    environ = {"PENSTOCK_BENCH_CACHE": str(tmp_path)}
    for made in (Environment(name="a", packages=("x==1",)), NodeEnvironment("b", ("x@1",))):
        assert made.made(environ) is None
        folder = tmp_path / made.name
        folder.mkdir()
        (folder / PINS).write_text("other")
        assert made.made(environ) is None
        (folder / PINS).write_text(made.pins)
        assert made.made(environ) is not None


def test_every_client_has_its_program_its_pins_and_its_line_on_the_page() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    for client in CLIENTS:
        assert client.path.is_file() and f"../examples/clients/{client.program})" in page
        text = client.path.read_text(encoding="utf-8")
        assert all(f"def {case}(" in text or f"async {case}()" in text for case in client.cases)
        assert set(client.cases) <= set(CASES)
    for each in (*CLIENTS, *LOADS):
        pins = each.environment.packages
        assert all("==" in pin or "@" in pin[1:] for pin in pins)


def test_the_tokenizer_has_one_character_for_each_byte() -> None:
    assert len(set(byte_characters())) == 256 and byte_characters()[ord("A")] == "A"
