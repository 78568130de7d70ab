"""`penstock plan`: tables, JSON and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from planner.commands.answers import HEIGHT, plot, seconds, three
from planner.commands.inputs import measured_cpu
from planner.facts.catalogue import device

pytestmark = pytest.mark.slow

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "hidden_act": "silu",
    "max_position_embeddings": 1024, "intermediate_size": 256,
}  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert main(["plan", *line.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def shown(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What people see."""
    assert main(["plan", *line.split()]) == 0
    return capsys.readouterr().out


def test_memory_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "memory --model opt-13b --gpu a100-80gb --in 512 --out 256")
    assert (found["max_batch"], found["max_batch_power_of_two"], found["max_batch_worst"]) == (88, 64, 73)
    assert found["gpu_source"] and found["model_source"] and found["advice"].endswith(".")


def test_memory_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(capsys, "memory --model opt-13b --gpu a100-40gb")
    assert "requests at once, in the mean" in page and "GB" in page and "runs 19 requests" in page


def test_lengths_of_a_name_and_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A plan counts with their means, and a simulation with each."""
    named = asked(capsys, "memory --model opt-13b --gpu a100-80gb --workload outputs-128")
    assert (named["in"], named["out"]) == (512, 128)
    file = tmp_path / "mix.csv"
    file.write_text("prompt,answer\n100,10\n300,30\n")
    assert asked(capsys, f"memory --model opt-13b --gpu a100-80gb --workload {file}")["in"] == 200
    line = "simulate --model opt-1.3b --gpu h200 --count 20 --rate 100 --workload"
    assert asked(capsys, f"{line} {file}")["timeline"][0]["tokens"] > 0
    for words in ("--workload chat", f"--workload {file} --in 5", "--workload none.csv"):
        assert main(["plan", *f"memory --model opt-13b --gpu h200 {words}".split()]) == 2
    said = capsys.readouterr().err
    assert "known are outputs-128" in said and "leave one out" in said and "no such file" in said


def test_roofline_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "roofline --model mixtral-8x7b --gpu h200 --batch 16")
    assert found["ridge_flop_per_byte"] == pytest.approx(206.04, abs=0.01)
    assert found["batch"] == 16 and {part["bound"] for part in found["decode"]["parts"]} == {"memory"}
    assert found["moe"]["distinct_experts"] == pytest.approx(8 * (1 - 0.75**16))
    assert sum(part["seconds"] for part in found["decode"]["parts"]) == pytest.approx(found["decode"]["seconds"])
    assert asked(capsys, "roofline --model opt-13b --gpu h200")["moe"] is None


def test_roofline_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(capsys, "roofline --model mixtral-8x7b --gpu h200 --in 4096 --chunk 512")
    assert "bound by" in page.lower() and "tokens/s over batch" in page and "all experts 8 times" in page


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    line = "cost --model opt-1.3b --gpu l4 --gpu a100-80gb --price l4=0.8 --price a100-80gb=2.5"
    found = asked(capsys, line)
    each = found["gpus"][0]
    assert each["price_per_million_tokens"] == pytest.approx(1e6 * 0.8 / (3600 * each["tokens_s"]))
    kept = found["pareto"]
    assert kept and {point["gpu"] for point in kept} <= {"l4", "a100-80gb"}
    page = shown(capsys, line)
    assert "price/1M tokens" in page.lower().replace("price/1m", "price/1M") and "a: l4, b: a100-80gb" in page
    assert found["assumed_prices"] == {}
    assumed = asked(capsys, "cost --model opt-1.3b --gpu l4 --gpu a100-80gb --price l4=0.8")
    price = device("a100-80gb").price_per_hour
    assert assumed["assumed_prices"] == {"a100-80gb": price}
    assert [each["price_per_hour"] for each in assumed["gpus"]] == [0.8, price]
    assert (found["currency"], assumed["currency"]) == (None, "USD") and " USD for a million" in assumed["advice"]


def test_a_model_of_my_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = asked(capsys, f"memory --config {folder}/config.json --gpu l4")
    assert found["model"] == "mine" and found["kv_token_bytes"] == 2 * 2 * 4 * 16 * 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory --model opt-13c --gpu l4", "nearest are opt-13b"),
        ("memory --model opt-13b --gpu h2000", "nearest are h200"),
        ("memory --model opt-13b --gpu l4", "--tp 2 or --w-bits 8"),
        ("grid --model llama-3.1-70b --gpu l4 --gpus 2", "--gpus 8 would fit"),
        ("goodput --model llama-3.1-70b --gpu l4 --gpus 2", "--gpus 8 would fit"),
        ("simulate --model llama-3.1-70b --gpu l4 --count 5", "more --tp or --pp"),
        ("memory --model opt-13b --gpu h200 --activation-gb nan", "--activation-gb nan: it is no number"),
        ("cost --model opt-1.3b --gpu l4 --price l4=inf", "write NAME=PRICE"),
        ("search --model opt-1.3b --gpu h200 --rate inf", "--rate inf: it is no number"),
        ("what-if --model opt-13b --gpu h200 --attention-gpu l4:0", "NAME or NAME:COUNT"),
        ("place --load opt-1.3b=inf --gpu h200", "write MODEL=RATE"),
        ("memory --model opt-13b --gpu h200 --in -5", "whole numbers from 1"),
        ("memory --model opt-13b --gpu h200 --in 2000", "--out 48 would fit"),
        ("memory --model opt-13b --gpu h200 --tp 3", "it must divide the 40 heads"),
        ("memory --model opt-13b --gpu h200 --w-bits 40", "1 to 32 bits"),
        ("memory --model opt-13b --gpu h200 --kv-bits 0.5", "--kv-bits 0.5: 1 to 32 bits"),
        ("memory --model opt-13b --gpu h200 --activation-gb -1", "--activation-gb -1 --block 32: GB from 0"),
        ("memory --gpu h200", "give --model NAME"),
        ("memory --model opt-13b --config x.json --gpu h200", "leave one out"),
        ("memory --config nowhere.json --gpu h200", "--config nowhere.json cannot be read"),
        ("memory --config nowhere.gguf --gpu h200", "nowhere.gguf"),
        ("roofline --model opt-13b --gpu h200 --batch 0", "--batch 0: it is a whole number from 1"),
        ("roofline --model opt-13b --gpu h200 --batch 99999999999999999", "--batch 1e+17: a plan counts with numbers"),
        ("memory --model opt-13b --gpu h200 --activation-gb 1e300", "--activation-gb 1e+300: a plan counts with"),
        ("memory --model opt-13b --gpu h200 --activation-gb 1e9", "fewer --activation-gb or a smaller --block would"),
        ("cost --model opt-13b --gpu h200 --price h200=1e308", "--price h200=1e308"),
        ("cost --model opt-13b --gpu h200 --efficiency 1e-300", "--efficiency 1e-300: a plan counts with"),
        ("search --model opt-13b --gpu h200 --gpus 100000", "--gpus 100000: 1 to 1,024 GPUs"),
        ("grid --model opt-13b --gpu h200 --gpus 0", "--gpus 0: 1 to 1,024 GPUs"),
        ("goodput --model opt-13b --gpu h200 --gpus 0", "--gpus 0: 1 to 1,024 GPUs"),
        ("place --load opt-13b=1e300 --gpu h200", "write MODEL=RATE"),
        ("what-if --model opt-13b --gpu h200 --disk-gb-s 0", "--disk-gb-s 0: a bandwidth is above 0"),
        ("what-if --model opt-13b --gpu h200 --attention-gpu l4:9999", "NAME:COUNT, 1 to 1,024"),
        ("simulate --model opt-13b --gpu h200 --dp 9999", "takes 9,999 GPUs: at most 1,024"),
        ("simulate --model opt-13b --gpu h200 --count 0", "--count 0: the first two are above 0"),
        ("cost --model opt-13b --gpu h200 --price h100=2", "--price h100=2: write NAME=PRICE"),
        ("cost --model opt-13b --gpu h200 --price h200", "--price h200: write NAME=PRICE"),
        ("cost --model opt-13b --gpu h200 --price h200=-1", "write NAME=PRICE"),
        ("goodput --model opt-13b --gpu h200 --tpot-ms 0", "--ttft-ms and --tpot-ms are above"),
        ("cost --model opt-13b --gpu h200 --efficiency 2", "--efficiency 2"),
        ("search --model llama-3.1-70b --gpu l4", "--gpus 8 would fit"),
        ("search --model opt-13b --gpu h200 --rate 0", "above 0"),
        ("search --model opt-13b --gpu h200 --price 0", "above 0"),
        ("search --model opt-13b --gpu h200 --max-batch 0", "at least 1 request"),
        ("goodput --model opt-13b --gpu h200 --ttft-ms 1", "not even a lone request"),
        ("goodput --model opt-13b --gpu h200 --share 2", "--share is at most 1"),
        ("place --load opt-1.3b --gpu l4", "write MODEL=RATE"),
        ("place --load opt-1.3b=1:2 --gpu l4", "write MODEL=RATE"),
        ("place --load opt-1.3b=1 --load opt-1.3b=1 --gpu l4", "twice"),
        ("place --load opt-1.3c=1 --gpu l4", "nearest are opt-1.3b"),
        ("grid --model llama-3.1-70b --gpu l4", "no layout of llama-3.1-70b fits"),
        ("what-if --model opt-13b --gpu h200 --disk-gb-s 0", "a bandwidth is above 0"),
        ("what-if --model opt-13b --gpu h200 --rate 0", "--rate 4"),
        ("what-if --model opt-13b --gpu h200 --attention-gpu l4:x", "as l4:4"),
        ("simulate --model opt-13b --gpu h200 --tp 3", "penstock plan search"),
        ("simulate --model opt-13b --gpu h200 --rate 0", "above 0"),
        ("simulate --model opt-13b --gpu h200 --count 200001", "at most 200,000 requests are simulated"),
        ("simulate --model opt-13b --gpu h200 --scale -1", "above 0"),
        ("simulate --model llama-3.1-70b --gpu l4", "does not fit"),
    ],
)
def test_bad_input_is_one_line_that_says_what_would_do(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


@pytest.mark.parametrize(
    ("option", "name", "text", "says"),
    [
        ("config", "deep.json", "[" * 200_000, "it nests too deep"),
        ("config", "cut.gguf", "GGUF\x03", "it is damaged or not a GGUF file"),
        ("workload", "empty.csv", "", "or write the columns prompt,answer"),
        ("workload", "nul.csv", "prompt,answer\n5\x00,3\n", "line 2: '5\\x00,3' are no two whole numbers"),
        ("workload", "short.csv", "prompt,answer\n5\n", "line 2: '5,None' are no two whole numbers"),
        ("workload", "torn.jsonl", "{torn\n", "torn.jsonl, line 1: JSON is malformed"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_is_wrong_with_it(
    option: str, name: str, text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    model = [] if option == "config" else ["--model", "opt-13b"]
    assert main(["plan", "memory", *model, f"--{option}", f"{path}", "--gpu", "h200"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
    assert said.err.count(name) == 1, "it is named once"


def test_this_machines_cpu() -> None:
    """Within what any machine can have."""
    pytest.importorskip("numpy")
    cpu = measured_cpu()
    assert (
        1e8 < cpu.bytes_s < 1e13 and 1e8 < cpu.peak[16] < 1e15 and cpu.memory_bytes > 1e8 and "measured" in cpu.source
    )


def test_figures_have_three_digits_and_a_unit() -> None:
    assert [seconds(value) for value in (12.34, 0.01234, 1.2e-5, 1e-9)] == ["12.3 s", "12.3 ms", "12.0 us", "0.001 us"]
    assert [three(value) for value in (1234567, 12.345, 0.5, 0, 0.001234)] == [
        "1,234,567",
        "12.3",
        "0.500",
        "0",
        "0.0012",
    ]


def test_flat_values_are_plotted_from_zero_and_large_ones_without_exponent() -> None:
    """A wobble of 3 % is none of a curve's shape."""
    flat = plot([(1, 100.0), (2, 103.0), (4, 101.0)], "x", "y").splitlines()
    assert "x logarithmic" in flat[0] and flat[12].startswith("  0 |") and all("*" not in line for line in flat[3:13])
    assert "10,470" in plot([(1, 10.0), (2, 10470.0)], "x", "y")


def test_a_plan_without_its_inputs_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for words, missing in (([], ("--model", "--gpu")), (["--gpu", "l4"], ("--model",))):
        assert main(["plan", "memory", *words]) == 2
        said = capsys.readouterr().err
        assert [each for each in ("--model", "--gpu") if f"{each} NAME" in said] == list(missing)


@pytest.mark.parametrize("words", [["plan"], ["tune"]])
def test_a_group_alone_names_its_commands_and_a_mistyped_one_the_nearest(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "goodput" in capsys.readouterr().err
    assert main([*words, "godput"]) == 2
    assert "Did you mean 'goodput'?" in capsys.readouterr().err


def test_a_plot_has_every_point_and_the_mark() -> None:
    drawn = plot([(1, 10), (2, 20), (4, 30)], "x", "y", (2, 20), "the knee")
    assert drawn.count("*") == 2 and drawn.splitlines()[0].endswith("O: the knee")
    assert sum("O" in line for line in drawn.splitlines()[1:]) == 1 and len(drawn.splitlines()) == HEIGHT + 3


def test_search_says_which_plans_are_cheap_and_quick(capsys: pytest.CaptureFixture[str]) -> None:
    line = "search --model opt-13b --gpu a100-80gb --gpus 2"
    found = asked(capsys, f"{line} --price 2.5")
    plans = {each["plan"]: each for each in found["plans"]}
    assert set(found["pareto"]) <= set(plans) and found["latency_optimal"] == found["pareto"][0]
    assert found["throughput_optimal"] == found["pareto"][-1]
    each = plans[found["pareto"][0]]
    assert each["price_per_million_tokens"] == pytest.approx(2.5 * each["gpu_hours_per_million_tokens"])
    assert each["price_per_million_tokens"] == pytest.approx(1e6 * 2 * 2.5 / (3600 * each["tokens_s"]))
    assumed = asked(capsys, line)
    assert assumed["price_per_hour"] == device("a100-80gb").price_per_hour
    assert "--price" in shown(capsys, line)


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    line = "search --model opt-13b --gpu a100-80gb --gpus 2 --rate 2"
    found = asked(capsys, line)
    assert {plan["plan"] for plan in found["plans"]} >= {found["latency_optimal"], found["throughput_optimal"]}
    assert all({"kept_both", "ttft_p95_s", "mfu", "mbu"} <= plan.keys() for plan in found["plans"])
    page = shown(capsys, line)
    assert "BACKLOG TOK/S" in page.upper() and "Simulated at 0.7 of the roofline" in page


def test_grid(capsys: pytest.CaptureFixture[str]) -> None:
    line = "grid --model mixtral-8x7b --gpu h100 --gpus 8 --out 32"
    found = asked(capsys, line)
    assert found["best"]["1"] == "dp1 pp1 tp8" and len(found["layouts"]) == 5
    assert "yields most from 1 concurrent request on" in shown(capsys, line)


def test_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    line = "goodput --model opt-13b --gpu a100-80gb --in 128 --out 8 --max-batch 16 --ttft-ms 500"
    found = asked(capsys, line)
    first = found["deployments"][0]
    assert first["requests_s"] > 0 and first["prefill"] is None and first["requests_s_if_judged_apart"] > 0
    assert "beside decode" in shown(capsys, line)


def test_place(capsys: pytest.CaptureFixture[str]) -> None:
    line = "place --load opt-1.3b=2:64:8 --load opt-125m=2:64:8 --gpu l4 --gpus 2"
    found = asked(capsys, line)
    assert sum(gpu["opt-125m"] for gpu in found["copies"]) >= 1 and found["kept"] > 0.9
    assert "ms to the first token and" in shown(capsys, line)


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    line = "what-if --model llama-3.1-8b --gpu l4 --rate 8 --other-gpu h200 --attention-gpu l4:4 --disk-gb-s 3"
    found = asked(capsys, line)
    assert [case["case"] for case in found["cases"]][:2] == ["as it is", "twice the load"]
    assert [each["case"].split()[0] for each in found["offloaded"]] == ["attention", "weights"]
    assert "twice the load" in shown(capsys, line)


def test_simulate_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"StartTimeOffset": n * 500_000_000, "ContextTokens": 200, "GeneratedTokens": 20} for n in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"simulate --model opt-13b --gpu h200 --trace {trace} --scale 2"
    found = asked(capsys, line)
    assert found["requests"] == 40 and found["kept_both"] == 1.0
    assert 9.75 < found["seconds"] < 12 and sum(row["requests"] for row in found["timeline"]) == 40
    page = shown(capsys, line)
    assert "the plan serves this trace" in page and "J/token" in page


def test_simulate_generated_requests(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "simulate --model opt-13b --gpu h200 --rate 4 --count 50 --out 32 --dp 2")
    assert found["requests"] == 50 and found["gpus"] == 2 and found["evictions"] == 0


def test_a_trace_that_is_not_there_gets_a_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "simulate", "--model", "opt-13b", "--gpu", "h200", "--trace", "nowhere.csv"]) == 2
    said = capsys.readouterr().err
    assert "error: --trace nowhere.csv: no such file" in said and "next:  give a CSV" in said


APEX = ("StartTimeOffset", "ContextTokens", "GeneratedTokens")
HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", b"", "no column 'Timestamp'"),
        ("t.csv", b"a,b\n1,2\n", "no column 'Timestamp'"),
        ("t.csv", HEAD.encode(), "no request with an answer"),
        ("t.csv", (HEAD + "1,m,5,0,5,API log\n").encode(), "no request with an answer"),
        ("t.csv", (HEAD + "1,m,5\n").encode(), "line 2"),
        ("t.csv", (HEAD + "x,m,5,5,10,API log\n").encode(), "line 2: could not convert"),
        ("t.csv", (HEAD + "-1,m,5,5,10,API log\n").encode(), "line 2: a number is negative"),
        ("t.csv", (HEAD + "nan,m,5,5,10,API log\n").encode(), "line 2: a number is negative or not finite"),
        ("t.csv", (HEAD + "1,m,1e999,5,10,API log\n").encode(), "line 2: cannot convert float infinity"),
        ("t.csv", b"\xff\xfe\x00\x01", "t.csv: it is UTF-16"),
        ("t.csv", HEAD.encode() + b"1,m,5,5,10,\xff\n", "t.csv"),
        ("t.jsonl", b"", "no request with an answer"),
        ("t.jsonl", b"{}\n", "line 1: Object missing required field"),
        (
            "t.jsonl",
            b'{"StartTimeOffset": -1, "ContextTokens": 1, "GeneratedTokens": 1}\n',
            "line 1: Expected `int` >= 0",
        ),
        ("t.jsonl", b'{"StartTimeOffset": 1, "Conte', "line 1: Input data was truncated"),
        ("t.jsonl", b'{"kind": "request", "v": 1}\n', "has no record of a request"),
        ("", b"", "has no record of a request"),
    ],
)
def test_a_bad_trace_is_one_line(
    name: str, content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CSV, JSON lines and records, each with what can be wrong in it; "": a folder without records."""
    if name:
        (tmp_path / name).write_bytes(content)
    assert main(["plan", "simulate", "--model", "opt-13b", "--gpu", "h200", "--trace", f"{tmp_path / name}"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_hours_of_a_trace_are_simulated(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three hours of BurstGPT's columns, which follow any order of lines, and of APEX's lines."""
    at = range(0, 10_800, 10)
    if name == "t.csv":
        lines = [HEAD.strip(), *(f"{second},ChatGPT,200,40,240,Conversation log" for second in reversed(at))]
    else:
        rows = [(second * 10**9, 200, 40) for second in at]
        lines = [json.dumps(dict(zip(APEX, row, strict=True))) for row in rows]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = asked(capsys, f"simulate --model opt-13b --gpu h200 --trace {tmp_path / name}")
    assert found["requests"] == 1080 and 10_790 < found["seconds"] < 10_800
    assert found["timeline"][0]["begin_s"] == 0 and sum(row["requests"] for row in found["timeline"]) == 1080
