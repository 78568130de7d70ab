"""`penstock plan`: tables, JSON and one line for bad input; what a Penstock recorded becomes step times and a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from served_texts import closed_loop, served_texts

from planner.facts.catalogue import device
from planner.fit import DecodeRegime, EngineFit, FittedTimes, ServedText
from planner.simulator.engine import EngineShape
from telemetry.records.schema import ENCODER, RequestRecord, SampleRecord

pytestmark = pytest.mark.slow

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "hidden_act": "silu",
    "max_position_embeddings": 1024, "intermediate_size": 256,
}  # fmt: skip


def asked(told: Any, line: str) -> dict[str, Any]:
    return json.loads(told(f"plan {line} --json").out)


def shown(told: Any, line: str) -> str:
    """What people see."""
    return str(told(f"plan {line}").out)


def test_memory(told: Any) -> None:
    found = asked(told, "memory --model opt-13b --gpu a100-80gb --in 512 --out 256")
    assert (found["max_batch"], found["max_batch_power_of_two"], found["max_batch_worst"]) == (88, 64, 73)
    assert found["gpu_source"] and found["model_source"] and found["advice"].endswith(".")
    page = shown(told, "memory --model opt-13b --gpu a100-40gb")
    assert "requests at once, in the mean" in page and "GB" in page and "runs 19 requests" in page
    assert "8 bits would hold 39" in page and "Weights take 71 %" in page


def test_roofline(told: Any) -> None:
    found = asked(told, "roofline --model mixtral-8x7b --gpu h200 --batch 16")
    assert found["ridge_flop_per_byte"] == pytest.approx(206.04, abs=0.01)
    assert found["batch"] == 16 and {part["bound"] for part in found["decode"]["parts"]} == {"memory"}
    assert found["moe"]["distinct_experts"] == pytest.approx(8 * (1 - 0.75**16))
    assert sum(part["seconds"] for part in found["decode"]["parts"]) == pytest.approx(found["decode"]["seconds"])
    assert asked(told, "roofline --model opt-13b --gpu h200")["moe"] is None
    page = shown(told, "roofline --model mixtral-8x7b --gpu h200 --in 4096 --chunk 512")
    assert "bound by" in page.lower() and "tokens/s over batch" in page and "all experts 8 times" in page


def test_cost(told: Any) -> None:
    line = "cost --model opt-1.3b --gpu l4 --gpu a100-80gb --price l4=0.8 --price a100-80gb=2.5"
    found = asked(told, line)
    each = found["gpus"][0]
    assert each["price_per_million_tokens"] == pytest.approx(1e6 * 0.8 / (3600 * each["tokens_s"]))
    kept = found["pareto"]
    assert kept and {point["gpu"] for point in kept} <= {"l4", "a100-80gb"}
    page = shown(told, line)
    assert "price/1M tokens" in page.lower().replace("price/1m", "price/1M") and "a: l4, b: a100-80gb" in page
    assert found["assumed_prices"] == {}
    assumed = asked(told, "cost --model opt-1.3b --gpu l4 --gpu a100-80gb --price l4=0.8")
    price = device("a100-80gb").price_per_hour
    assert assumed["assumed_prices"] == {"a100-80gb": price}
    assert [each["price_per_hour"] for each in assumed["gpus"]] == [0.8, price]
    assert (found["currency"], assumed["currency"]) == (None, "USD") and " USD for a million" in assumed["advice"]


def test_a_model_of_my_own(tmp_path: Path, told: Any) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = asked(told, f"memory --config {folder}/config.json --gpu l4")
    assert found["model"] == "mine" and found["kv_token_bytes"] == 2 * 2 * 4 * 16 * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory --model opt-13c --gpu l4", "nearest are opt-13b"),
        ("memory --model opt-13b --gpu h2000", "nearest are h200"),
        ("memory --model opt-13b --gpu l4", "fewer --w-bits"),
        ("grid --model llama-3.1-70b --gpu l4 --gpus 2", "more --gpus"),
        ("simulate --model llama-3.1-70b --gpu l4 --count 5", "more --tp or --pp"),
        ("memory --model opt-13b --gpu h200 --in -5", "whole numbers from 1"),
        ("memory --model opt-13b --gpu h200 --in 2000", "give less with --in or --out"),
        ("memory --model opt-13b --gpu h200 --tp 3", "it must divide the 40 heads"),
        ("memory --model opt-13b --gpu h200 --w-bits 40", "1 to 32 bits"),
        ("memory --model opt-13b --config x.json --gpu h200", "leave one out"),
        ("memory --config nowhere.json --gpu h200", "--config nowhere.json cannot be read"),
        ("memory --config nowhere.gguf --gpu h200", "nowhere.gguf"),
        ("roofline --model opt-13b --gpu h200 --batch 0", "--batch 0: it is a whole number from 1"),
        ("roofline --model opt-13b --gpu h200 --batch 99999999999999999", "--batch 1e+17: a plan counts with numbers"),
        ("memory --model opt-13b --gpu h200 --activation-gb 1e9", "more devices (--tp)"),
        ("cost --model opt-13b --gpu h200 --price h200=1e308", "--price h200=1e308"),
        ("cost --model opt-13b --gpu h200 --efficiency 1e-300", "--efficiency 1e-300: a plan counts with"),
        ("grid --model opt-13b --gpu h200 --gpus 0", "--gpus 0: 1 to 1,024 GPUs"),
        ("what-if --model opt-13b --gpu h200 --disk-gb-s 0", "--disk-gb-s 0: a bandwidth is above 0"),
        ("simulate --model opt-13b --gpu h200 --dp 9999", "takes 9,999 GPUs: at most 1,024"),
        ("cost --model opt-13b --gpu h200 --price h100=2", "--price h100=2: write NAME=PRICE"),
        ("search --model opt-13b --gpu h200 --rate 0", "above 0"),
        ("goodput --model opt-13b --gpu h200 --ttft-ms 1", "not even a lone request"),
        ("place --load opt-1.3b --gpu l4", "write MODEL=RATE"),
        ("place --load opt-1.3b=1:2 --gpu l4", "write MODEL=RATE"),
        ("place --load opt-1.3b=1 --load opt-1.3b=1 --gpu l4", "twice"),
        ("place --load opt-1.3c=1 --gpu l4", "nearest are opt-1.3b"),
        ("grid --model llama-3.1-70b --gpu l4", "does not fit"),
        ("what-if --model opt-13b --gpu h200 --rate 0", "--rate 4"),
        ("simulate --model opt-13b --gpu h200 --count 200001", "at most 200,000 requests are simulated"),
    ],
)
def test_bad_input_is_one_line_that_says_what_would_do(line: str, says: str, told: Any) -> None:
    said = told("plan", *line.split(), code=2)
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


@pytest.mark.parametrize(
    ("option", "name", "text", "says"),
    [
        ("config", "deep.json", "[" * 200_000, "is no config.json of a model"),
        ("config", "cut.gguf", "GGUF\x03", "it is damaged or not a GGUF file"),
        ("workload", "empty.csv", "", "or write the columns prompt,answer"),
        ("workload", "torn.jsonl", "{torn\n", "torn.jsonl, line 1: JSON is malformed"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_is_wrong_with_it(
    option: str, name: str, text: str, says: str, tmp_path: Path, told: Any
) -> None:
    path = tmp_path / name
    path.write_text(text)
    model = [] if option == "config" else ["--model", "opt-13b"]
    said = told("plan memory", *model, f"--{option}", f"{path}", "--gpu", "h200", code=2)
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
    assert said.err.count(name) == 1, "it is named once"


def test_a_plan_without_its_inputs_names_one(told: Any) -> None:
    assert "--gpu" in told("plan memory", code=2).err
    assert "--model NAME" in told("plan memory --gpu l4", code=2).err


@pytest.mark.parametrize("words", [["plan"], ["tune"]])
def test_a_group_alone_names_its_commands_and_a_mistyped_one_the_nearest(words: list[str], told: Any) -> None:
    assert "goodput" in told(*words, code=2).err
    assert "Did you mean 'goodput'?" in told(*words, "godput", code=2).err


def test_search(told: Any) -> None:
    """It says which plans are cheap and which are quick."""
    line = "search --model opt-13b --gpu a100-80gb --gpus 2"
    found = asked(told, f"{line} --rate 2 --price 2.5")
    plans = {each["plan"]: each for each in found["plans"]}
    assert set(found["pareto"]) <= set(plans) and found["latency_optimal"] == found["pareto"][0]
    assert found["throughput_optimal"] == found["pareto"][-1]
    assert all({"kept_both", "ttft_p95_s", "mfu", "mbu"} <= plan.keys() for plan in plans.values())
    each = plans[found["pareto"][0]]
    assert each["price_per_million_tokens"] == pytest.approx(2.5 * each["gpu_hours_per_million_tokens"])
    assert each["price_per_million_tokens"] == pytest.approx(1e6 * 2 * 2.5 / (3600 * each["tokens_s"]))
    assert asked(told, line)["price_per_hour"] == device("a100-80gb").price_per_hour
    page = shown(told, f"{line} --rate 2")
    assert "BACKLOG TOK/S" in page.upper() and "Simulated at 0.7 of the roofline" in page and "--price" in page


def test_grid(told: Any) -> None:
    line = "grid --model mixtral-8x7b --gpu h100 --gpus 8 --out 32"
    found = asked(told, line)
    assert found["best"]["1"] == "dp1 pp1 tp8" and len(found["layouts"]) == 5
    assert "yields most from 1 concurrent request on" in shown(told, line)


def test_goodput(told: Any) -> None:
    line = "goodput --model opt-13b --gpu a100-80gb --in 128 --out 8 --max-batch 16 --ttft-ms 500"
    found = asked(told, line)
    first = found["deployments"][0]
    assert first["requests_s"] > 0 and first["prefill"] is None and first["requests_s_if_judged_apart"] > 0
    assert "beside decode" in shown(told, line)


def test_place(told: Any) -> None:
    line = "place --load opt-1.3b=2:64:8 --load opt-125m=2:64:8 --gpu l4 --gpus 2"
    found = asked(told, line)
    assert sum(gpu["opt-125m"] for gpu in found["copies"]) >= 1 and found["kept"] > 0.9
    assert "ms to the first token and" in shown(told, line)


def test_what_if(told: Any) -> None:
    line = "what-if --model llama-3.1-8b --gpu l4 --rate 8 --other-gpu h200 --attention-gpu l4:4 --disk-gb-s 3"
    found = asked(told, line)
    assert [case["case"] for case in found["cases"]][:2] == ["as it is", "twice the load"]
    assert [each["case"].split()[0] for each in found["offloaded"]] == ["attention", "weights"]
    assert "twice the load" in shown(told, line)


def test_simulate_a_trace(tmp_path: Path, told: Any) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"StartTimeOffset": n * 500_000_000, "ContextTokens": 200, "GeneratedTokens": 20} for n in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"simulate --model opt-13b --gpu h200 --trace {trace} --scale 2"
    found = asked(told, line)
    assert found["requests"] == 40 and found["kept_both"] == 1.0
    assert 9.75 < found["seconds"] < 12 and sum(row["requests"] for row in found["timeline"]) == 40
    page = shown(told, line)
    assert "the plan serves this trace" in page and "J/token" in page


HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"", "no column 'Timestamp'"),
        ("t.csv", HEAD.encode(), "no request with an answer"),
        ("t.csv", (HEAD + "1,m,5\n").encode(), "line 2"),
        ("t.csv", (HEAD + "nan,m,5,5,10,API log\n").encode(), "line 2: a number is negative or not finite"),
        ("t.csv", b"\xff\xfe\x00\x01", "t.csv: it is UTF-16"),
        ("t.csv", HEAD.encode() + b"1,m,5,5,10,\xff\n", "t.csv"),
        ("t.jsonl", b"", "no request with an answer"),
        ("t.jsonl", b'{"StartTimeOffset": 1, "Conte', "line 1: Input data was truncated"),
        ("t.jsonl", b'{"kind": "request", "v": 1}\n', "has no record of a request"),
        ("", b"", "has no record of a request"),
    ],
)
def test_a_bad_trace_is_one_line(name: str, content: bytes, says: str, tmp_path: Path, told: Any) -> None:
    """CSV, JSON lines and records, each with what can be wrong in it; "": a folder without records. A file that is not
    there gets a next step."""
    line = "plan simulate --model opt-13b --gpu h200 --trace"
    missing = told(line, "nowhere.csv", code=2).err
    assert "error: --trace nowhere.csv: no such file" in missing and "next:  give a CSV" in missing
    if name:
        (tmp_path / name).write_bytes(content)
    said = told(line, f"{tmp_path / name}", code=2)
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


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


def test_the_records_are_fitted_and_half_predicts_the_rest(tmp_path: Path, told: Any) -> None:
    folder = recorded(tmp_path / "r", served_texts())
    found = json.loads(told("plan fit --records", f"{folder}", "--scale", "2", "--json").out)
    assert (found["requests"], found["texts"], found["workers"], found["slots"]) == (400, 400, 1, 16)
    assert max(found["median_errors"].values()) < 0.1
    assert found["decode"]["fixed_s"] == pytest.approx(0.012, rel=0.05)
    assert found["scaled"]["ttft_p90_s"] > max(load["predicted"]["ttft_p50_s"] for load in found["loads"])
    page = told("plan fit --records", f"{folder}", "--scale", "2").out
    assert "worst load" in page
    assert "held out" in page and "2 times as fast" in page and "may be planned with" in page
    assert "no counters of tenants" in page


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


def test_the_records_of_the_embedded_engine_tell_its_steps(tmp_path: Path, told: Any) -> None:
    """Which give one token alone in half of the time of two, and hold 128 tokens of prompts and answers together."""
    regime = DecodeRegime(0.036, 0.0, 0.0076)
    times = FittedTimes((0.0, 0.0055, 0.0), regime, regime, 0.018)
    known = EngineFit(times, EngineShape(100_000, 16, 128, by_slot=True), 0.0, 0.0, 0)
    folder = recorded(tmp_path / "r", closed_loops(known))
    found = json.loads(told("plan fit --records", f"{folder}", "--embedded", "--json").out)
    assert (found["slots"], found["step_tokens"]) == (16, 128)
    assert found["lone_s"] == pytest.approx(0.018, rel=0.02)
    assert found["decode"]["text_s"] == pytest.approx(0.0076, rel=0.1)
    assert found["median_errors"]["tokens_s"] < 0.05 and found["median_errors"]["ttft_p50_s"] < 0.1
    other = json.loads(told("plan fit --records", f"{folder}", "--json").out)
    assert other["step_tokens"] == 512 and other["median_errors"]["ttft_p50_s"] > found["median_errors"]["ttft_p50_s"]


def spoilt(folder: Path, *changes: dict[str, Any], torn: bytes = b"") -> None:
    """Adds a request for each of these changes, which no fit may use, and a torn line."""
    bad = [record_of(1000 + number, served_texts()[0], **each) for number, each in enumerate(changes)]
    lines = b"".join(ENCODER.encode(each) + b"\n" for each in bad)
    (folder / "20251124T000001.000-worker-2.jsonl").write_bytes(lines + torn)


def test_too_few_requests_say_why_the_others_do_not_count(tmp_path: Path, told: Any) -> None:
    folder = recorded(tmp_path / "r", served_texts()[:2])
    spoilt(folder, {"attempts": 2}, {"state": "cancelled"}, {"state": "failed"}, {"first_us": 0})
    said = told(f"plan fit --records {folder}", code=2).err
    assert "2 requests can be used, and a fit needs 40 that completed in their first attempt" in said


@pytest.mark.parametrize("name", ["kept.jsonl", ""])
def test_records_are_a_trace_of_a_plan(name: str, tmp_path: Path, told: Any) -> None:
    """A folder, or one file whatever its name."""
    folder = recorded(tmp_path / "r", served_texts()[:60])
    if name:
        (folder / "20251124T000000.000-worker-1.jsonl").rename(folder / name)
    line = ["plan", "simulate", "--model", "opt-13b", "--gpu", "h200", "--trace", f"{folder / name}", "--json"]
    found = json.loads(told(*line).out)
    assert found["requests"] == 60 and found["failed_in_trace"] == 0
    last_s = max(text.arrived_s for text in served_texts()[:60]) - served_texts()[0].arrived_s
    assert found["seconds"] == pytest.approx(last_s, abs=5)


@pytest.mark.parametrize(
    ("written", "options", "says"),
    [
        (None, "", "No such file"),
        ("no json\n", "", "1 lines are no records"),
        ("few", "", "3 requests can be used, and a fit needs 40"),
        ("all", "--model other", "no request of other; they are of m"),
        ("all", "--since yesterday", "'yesterday' is no time"),
        ("all", "--scale nan", "--scale nan: it is no number"),
        ("all", "--step-tokens 0", "a step computes at least 1"),
    ],
)
def test_bad_records_are_one_line(written: str | None, options: str, says: str, tmp_path: Path, told: Any) -> None:
    path, texts = tmp_path / "r", served_texts()
    if written in ("few", "all"):
        recorded(path, texts[:3] if written == "few" else texts)
    elif written is not None:
        path.mkdir()
        (path / "20251124T000000.000-worker-1.jsonl").write_text(written)
    said = told("plan fit --records", f"{path}", *options.split(), code=2)
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
