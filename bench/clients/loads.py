"""Load generators of others, run against a running Penstock: what they asked for, and how many tokens came back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients.tokenizer import write_tokenizer
from bench.environments import Environment
from bench.penstock import MODEL, Penstock, own_environ

RUN_TIMEOUT_S = 300.0
REQUESTS, STREAMS, INPUT_TOKENS, OUTPUT_TOKENS = 20, 4, 50, 40


class ClientLoadFailed(RuntimeError):
    """A load generator ended with an error, or left no results; the message has its last words."""


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """One load generator. `command` returns its words; `counts` reads the tokens of each answer from its results."""

    name: str
    title: str
    environment: Environment
    command: Callable[[str, Path, Path], list[str]]
    """Of the server's address, the folder of the tokenizer, and the folder of the results."""
    counts: Callable[[Path], list[int]]


def run_load(load: LoadGenerator, python: Path, penstock: Penstock, folder: Path) -> list[int]:
    """Run it; returns the number of tokens of each answer, as it counted them. Raises LoadFailed."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    words = load.command(penstock.url, tokenizer, folder)
    log = folder / "said.log"
    environ = {**own_environ(), "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": ""}
    with log.open("wb") as said:
        try:
            done = subprocess.run(
                [str(python.parent / words[0]), *words[1:]],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=folder, env=environ,
                timeout=RUN_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise ClientLoadFailed(f"no end after {RUN_TIMEOUT_S:.0f} s") from late
    if done.returncode:
        raise ClientLoadFailed(f"it ended with {done.returncode}: {log.read_text(errors='replace').strip()[-300:]}")
    try:
        return load.counts(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClientLoadFailed(f"its results cannot be read: {error!r}") from error


def fault_of(counts: Sequence[int]) -> str:
    """What is wrong with the answers of a load; "" if each has as many tokens as were asked for."""
    if len(counts) != REQUESTS:
        return f"{len(counts)} of {REQUESTS} answers"
    wrong = [count for count in counts if count != OUTPUT_TOKENS]
    return f"{len(wrong)} answers have other than {OUTPUT_TOKENS} tokens, such as {wrong[0]}" if wrong else ""


def _aiperf(url: str, tokenizer: Path, folder: Path) -> list[str]:
    sizes = {"isl": INPUT_TOKENS, "osl": OUTPUT_TOKENS, "isl-stddev": 0, "osl-stddev": 0}
    extra = ("ignore_eos:true", f"min_tokens:{OUTPUT_TOKENS}")
    return [
        *("aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(tokenizer), "--use-server-token-count"),
        *("--request-count", str(REQUESTS), "--concurrency", str(STREAMS)),
        *(word for name, value in sizes.items() for word in (f"--{name}", str(value))),
        *(word for field in extra for word in ("--extra-inputs", field)),
        *("--ui", "none", "--output-artifact-dir", str(folder / "results")),
    ]


def _aiperf_counts(folder: Path) -> list[int]:
    lines = (folder / "results" / "profile_export.jsonl").read_text().splitlines()
    return [int(json.loads(line)["metrics"]["output_sequence_length"]["value"]) for line in lines]


def _guidellm(url: str, tokenizer: Path, folder: Path) -> list[str]:
    return [
        *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={folder / 'results.json'}", "--disable-console-interactive"),
    ]


def _guidellm_counts(folder: Path) -> list[int]:
    (benchmark,) = json.loads((folder / "results.json").read_bytes())["benchmarks"]
    return [int(each["output_metrics"]["text_tokens"]) for each in benchmark["requests"]["successful"]]


LOADS = (
    LoadGenerator(
        "aiperf", "AIPerf", Environment(name="client-aiperf", packages=("aiperf==0.13.0",)), _aiperf, _aiperf_counts
    ),
    LoadGenerator(
        "guidellm",
        "GuideLLM",
        Environment(name="client-guidellm", packages=("guidellm==0.8.1",)),
        _guidellm,
        _guidellm_counts,
    ),
)
