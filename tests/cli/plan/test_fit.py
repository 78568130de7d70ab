"""`penstock plan fit` and traces from records: what a Penstock recorded becomes step times, and the trace of a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from served_texts import closed_loop, served_texts

from cli.__main__ import main
from planner.fit import DecodeRegime, EngineFit, FittedTimes, ServedText
from planner.simulator.engine import EngineShape
from telemetry.records.schema import ENCODER, RequestRecord, SampleRecord

pytestmark = pytest.mark.slow

BEGAN_US = 1_764_000_000_000_000


def record_of(number: int, text: ServedText, **more: Any) -> RequestRecord:
    def stamp(at_s: float) -> int:
        return BEGAN_US + round(1e6 * at_s)

    given: dict[str, Any] = {
        "id": f"j{number}", "state": "completed", "model": "m", "lane": "interactive", "by": text.worker,
        "ended_us": stamp(text.last_s), "received_us": stamp(text.arrived_s), "accepted_us": stamp(text.arrived_s),
        "started_us": stamp(text.begun_s), "released_us": stamp(text.begun_s), "first_us": stamp(text.first_s),
        "last_us": stamp(text.last_s), "prompt_tokens": text.prompt, "completion_tokens": text.answer, "attempts": 1,
    }  # fmt: skip
    return RequestRecord(**given | more)


def recorded(folder: Path, texts: Sequence[ServedText], **more: Any) -> Path:
    """A folder of records with the sample of their worker."""
    folder.mkdir(exist_ok=True)
    sample = SampleRecord(
        at_us=BEGAN_US, role="worker", process="w", pid=1, model="m", cpu_s=0.0, slots=16, kv_tokens=100_000
    )
    lines = [ENCODER.encode(each) for each in [sample, *(record_of(n, t, **more) for n, t in enumerate(texts))]]
    (folder / "20251124T000000.000-worker-1.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def test_the_records_are_fitted_and_half_predicts_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "r", served_texts())
    assert main(["plan", "fit", "--records", f"{folder}", "--scale", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["texts"], found["workers"], found["slots"]) == (400, 400, 1, 16)
    assert max(found["median_errors"].values()) < 0.1
    assert found["constant_errors"]["ttft_p90_s"] > found["worst_errors"]["ttft_p90_s"] > 0
    assert found["decode"]["fixed_s"] == pytest.approx(0.012, rel=0.05)
    assert found["scaled"]["ttft_p90_s"] > max(load["predicted"]["ttft_p50_s"] for load in found["loads"])
    assert main(["plan", "fit", "--records", f"{folder}", "--scale", "2"]) == 0
    page = capsys.readouterr().out
    assert "always the fitted median" in page and "worst load" in page
    assert "held out" in page and "2 times as fast" in page and "may be planned with" in page


def closed_loops(known: EngineFit) -> list[ServedText]:
    """Of 1 to 16 clients, one after the other, of prompts that take half of a step or all of it."""
    found, at_s, random = list[ServedText](), 0.0, Random(5)
    for clients in (1, 2, 3, 4, 6, 8, 12, 16):
        lengths = [(random.randint(32, 96), random.randint(8, 40)) for _ in range(max(24, 3 * clients))]
        for text in closed_loop(known, clients, lengths):
            begun_s, first_s, last_s = (at_s + (each or 0.0) for each in (text.arrived_s, text.first_s, text.ended_s))
            found.append(ServedText("w", begun_s, begun_s, first_s, last_s, first_s, text.prompt, text.output))
        at_s = max(each.last_s for each in found) + 5.0
    return found


def test_the_records_of_the_embedded_engine_tell_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which give one token alone in half of the time of two, and hold 128 tokens of prompts and answers together."""
    regime = DecodeRegime(0.036, 0.0, 0.0076)
    times = FittedTimes((0.0, 0.0055, 0.0), regime, regime, 0.018)
    known = EngineFit(times, EngineShape(100_000, 16, 128, by_slot=True), 0.0, 0.0, 0)
    folder = recorded(tmp_path / "r", closed_loops(known))
    assert main(["plan", "fit", "--records", f"{folder}", "--embedded", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["slots"], found["step_tokens"]) == (16, 128)
    assert found["lone_s"] == pytest.approx(0.018, rel=0.02)
    assert found["decode"]["text_s"] == pytest.approx(0.0076, rel=0.1)
    assert found["median_errors"]["tokens_s"] < 0.05 and found["median_errors"]["ttft_p50_s"] < 0.1
    assert main(["plan", "fit", "--records", f"{folder}", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["step_tokens"] == 512 and other["median_errors"]["ttft_p50_s"] > found["median_errors"]["ttft_p50_s"]


def test_what_did_not_end_in_its_first_attempt_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path / "r", served_texts())
    bad = [
        record_of(1000, served_texts()[0], attempts=2),
        record_of(1001, served_texts()[0], state="cancelled"),
        record_of(1002, served_texts()[0], first_us=0),
    ]
    path = folder / "20251124T000001.000-worker-2.jsonl"
    path.write_bytes(b"".join(ENCODER.encode(each) + b"\n" for each in bad) + b'{"kind": "request", "ha')
    assert main(["plan", "fit", "--records", f"{folder}"]) == 0
    assert "400 of 403 requests are used" in capsys.readouterr().out


def test_too_few_requests_say_why_the_others_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "r", served_texts()[:2])
    changes: list[dict[str, Any]] = [{"attempts": 2}, {"state": "cancelled"}, {"state": "failed"}, {"first_us": 0}]
    bad = [record_of(9 + number, served_texts()[0], **each) for number, each in enumerate(changes)]
    (folder / "20251124T000001.000-worker-2.jsonl").write_bytes(b"".join(ENCODER.encode(each) + b"\n" for each in bad))
    assert main(["plan", "fit", "--records", f"{folder}"]) == 2
    said = capsys.readouterr().err
    assert "2 requests can be used, and a fit needs 40; of the others, 2 did not complete" in said
    assert "1 took more than one attempt" in said and "1 lack a time" in said


def test_a_request_of_several_choices_is_several_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "r", served_texts(), choices=2)
    assert main(["plan", "fit", "--records", f"{folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 800


def test_records_are_the_lengths_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The means of what was asked, and the longest must fit."""
    texts = served_texts()[:60]
    folder = recorded(tmp_path / "r", texts)
    assert (
        main(["plan", "memory", "--model", "llama-3.1-8b", "--gpu", "h200", "--workload", f"{folder}", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["in"] == round(sum(text.prompt for text in texts) / 60)
    assert found["out"] == round(sum(text.answer for text in texts) / 60)
    (tmp_path / "empty").mkdir()
    line = ["plan", "memory", "--model", "opt-13b", "--gpu", "h200", "--workload", f"{tmp_path / 'empty'}"]
    assert main(line) == 2 and "has no record of a request" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kept.jsonl", ""])
def test_records_are_a_trace_of_a_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder, or one file whatever its name."""
    folder = recorded(tmp_path / "r", served_texts()[:60])
    if name:
        (folder / "20251124T000000.000-worker-1.jsonl").rename(folder / name)
    line = ["plan", "simulate", "--model", "opt-13b", "--gpu", "h200", "--trace", f"{folder / name}", "--json"]
    assert main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 60 and found["failed_in_trace"] == 0
    last_s = max(text.arrived_s for text in served_texts()[:60]) - served_texts()[0].arrived_s
    assert found["seconds"] == pytest.approx(last_s, abs=5)


@pytest.mark.parametrize(
    ("written", "options", "says"),
    [
        (None, "", "No such file"),
        ("", "", "has no record of a request"),
        ("no json\n", "", "1 lines are no records"),
        ("few", "", "3 requests can be used, and a fit needs 40"),
        ("all", "--model other", "no request of other; they are of m"),
        ("two", "", "the records are of a, b: name one with --model"),
        ("all", "--since yesterday", "'yesterday' is no time"),
        ("all", "--since 1h", "has no record of a request since 1h"),
        ("all", "--scale 0", "--scale 0: above 0"),
        ("all", "--scale nan", "--scale nan: it is no number"),
        ("all", "--step-tokens 0", "a step computes at least 1"),
    ],
)
def test_bad_records_are_one_line(
    written: str | None, options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, texts = tmp_path / "r", served_texts()
    if written == "two":
        recorded(path, texts[:50], model="a")
        lines = b"".join(ENCODER.encode(record_of(n, text, model="b")) + b"\n" for n, text in enumerate(texts))
        (path / "20251124T000001.000-worker-2.jsonl").write_bytes(lines)
    elif written in ("few", "all"):
        recorded(path, texts[:3] if written == "few" else texts)
    elif written is not None:
        path.mkdir()
        (path / "20251124T000000.000-worker-1.jsonl").write_text(written)
    assert main(["plan", "fit", "--records", f"{path}", *options.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
