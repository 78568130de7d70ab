"""Checks whether a TensorRT-LLM has what the adapter needs, without a GPU: for `penstock doctor trtllm`.

Three levels: the source is read (`facts`), the settings go through the package's own classes (`trial`, in a child
process, with stubs for its native code), and an installed package is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from penstock.engine import EngineDead, Sampling
from penstock.text import counted
from workers.engines.trtllm import args, library, text
from workers.engines.trtllm.facts import BEHAVIOURS, CALL, SYMBOLS, Definition, Source, definitions, read
from workers.engines.trtllm.settings import TrtllmSettings

State: TypeAlias = Literal["holds", "fails", "skipped"]
PACKAGE, HEALTH = "tensorrt_llm", "_check_health"
TRIAL_TIMEOUT_S = 300.0
OF_TRIAL = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that a trial gets. All others may be secrets, and it runs the package's code, which may be any checkout."""
CONTEXT, MAX_GPUS = 4096, 2**20
"""The machine that serves may be another one: its checkpoint is not read, and its GPUs are not counted."""
RESULTS = (
    *("RequestOutput.outputs", "RequestOutput.error", "RequestOutput.abort", "CompletionOutput.token_ids"),
    *("CompletionOutput.finish_reason", "CompletionOutput.logprobs"),
)
"""What the adapter reads of an answer."""
OPTIONAL = {
    "WaitingQueuePolicy.PRIORITY": "the engine does not order what waits in it",
    f"{CALL}.priority": "the engine does not order what waits in it",
    f"{CALL}.cache_salt": "no cached prompt is used again",
    "SamplingParams.embedding_bias": "requests with logit_bias are refused",
    "GuidedDecodingParams.structural_tag": "calls that the model chooses follow no grammar",
    "ThinkingBudgetLogitsProcessor.__call__": "a budget of reasoning is ignored",
    "LLM.get_kv_cache_capacity": "the size of the KV cache stays unknown",
    "LLM.get_stats": "no statistics per iteration",
    f"LLM.{HEALTH}": "health is judged by progress alone",
    "RequestOutput.cached_tokens": "cached tokens are not counted",
    "CompletionOutput.request_perf_metrics": "the timing does not separate prefill from waiting",
}
"""Names that the adapter can do without, and what is then different."""
WITHOUT = {
    "penalties": "requests with penalties are refused",
    "prompt_ignore_length": "requests with presence or frequency penalties are refused",
    "seed": "requests with a seed are refused",
    "top_k": "requests with top_k are refused",
    "min_p": "requests with min_p are refused",
    "embedding_bias": "requests with logit_bias are refused",
    "alternatives": "log-probabilities are those of the tokens themselves alone",
    "grammar_errors": "JSON schemas and forced calls are refused: one bad schema would end the engine",
    "tag_formats": "calls that the model chooses follow no grammar",
}
"""What is different without a behaviour."""


NO_START = "an engine with these settings does not start"


class Line(NamedTuple):
    """The result of one check."""

    level: Literal["source", "settings", "installed"]
    state: State
    name: str
    where: str = ""
    reason: str = ""
    needed: bool = False
    """Whether an engine cannot start, or serve these settings, if this fails."""


Models: TypeAlias = Mapping[str, TrtllmSettings]


def check(root: Path, models: Models) -> Iterator[Line]:
    """Check the package in the folder `root`, by its source and with the settings of `models`, by name."""
    source = Source(root)
    found = {symbol: each for symbol, (_, each) in definitions(source).items()}
    if not found:
        yield Line("source", "fails", PACKAGE, str(root), "no Python source of this package is here", needed=True)
        return
    facts, plains = read(root), {}
    if "RequestError" not in found:
        yield Line("source", "fails", "RequestError", "", NO_START, needed=True)
    for name, settings in models.items():
        try:
            config = library.read_config(settings.config)
            merged = args.with_config(settings, config)
        except EngineDead as error:
            yield Line("settings", "fails", name, "", str(error), needed=True)
            continue
        for reason in args.refusals(merged, MAX_GPUS, lambda path: True, config):
            yield Line("settings", "fails", name, "", reason, needed=True)
        plains[name] = args.fields(merged, merged.max_seq_len or CONTEXT, facts)
    own = [*plains.values()] or [args.fields(TrtllmSettings(), CONTEXT, facts)]
    yield from _needs(source, found, dict.fromkeys([*(name for plain in own for name in args.needs(plain)), *RESULTS]))
    yield from (_member(source, found, name, reason) for name, reason in OPTIONAL.items())
    yield from _behaviours(source)
    yield from _trial(source, found, plains)


Definitions: TypeAlias = Mapping[str, Definition]


def _needs(source: Source, found: Definitions, names: Iterable[str]) -> Iterator[Line]:
    """One line for all names of a symbol that exist, and one for each that does not."""
    by_symbol: dict[str, list[str]] = {}
    for name in names:
        by_symbol.setdefault(name.rpartition(".")[0], []).append(name)
    for symbol, wanted in by_symbol.items():
        lines = [_member(source, found, name, NO_START, needed=True) for name in wanted]
        if symbol not in found:
            yield lines[0]._replace(name=symbol)
            continue
        if holding := [line for line in lines if line.state == "holds"]:
            yield holding[0]._replace(name=f"{symbol}, {counted(len(holding), 'name')}", where=found[symbol].place)
        yield from (line for line in lines if line.state == "fails")


def _member(source: Source, found: Definitions, name: str, reason: str, *, needed: bool = False) -> Line:
    """Whether a name exists. Nothing can be said where the source of its symbol is not there."""
    symbol, _, last = name.rpartition(".")
    module = SYMBOLS[symbol.partition(".")[0]]
    if symbol not in found and not source.place(module):
        return Line("source", "skipped", name, "", f"there is no source of {module}", needed)
    member = source.member(found[symbol], last) if symbol in found else None
    if member is not None:
        return Line("source", "holds", name, member.place, "", needed)
    return Line("source", "fails", name, found[symbol].place if symbol in found else "", reason, needed)


def _behaviours(source: Source) -> Iterator[Line]:
    for name, (module, probe) in BEHAVIOURS.items():
        holds, place = probe(source)
        if not (home := source.place(module)):
            yield Line("source", "skipped", name, "", f"there is no source of {module}")
        else:
            yield Line("source", "holds" if holds else "fails", name, place or home, "" if holds else WITHOUT[name])


def _trial(source: Source, found: Definitions, plains: Mapping[str, dict[str, Any]]) -> Iterator[Line]:
    """Put the settings and one request into the package's own classes."""
    sampling = text.keywords(Sampling(temperature=0.5, top_p=0.9, seed=1, logprobs=1), 1, [0, 1])
    known = source.names(found["SamplingParams"]) if "SamplingParams" in found else frozenset()
    asked = {
        "root": str(source.root.absolute()),
        "modules": {symbol: each.module for symbol, each in found.items()},
        "settings": plains,
        "sampling": {name: value for name, value in sampling.items() if name in known},
    }
    environ = {name: value for name, value in os.environ.items() if name in OF_TRIAL}
    told, problem = child("-m", "workers.engines.trtllm.trial", environ=environ, given=json.dumps(asked, default=str))
    if problem or not told:  # code of the package can end its process as it likes
        yield Line("settings", "skipped", "trial", "", f"it ended early: {problem or 'without a result'}")
        return
    for symbol, state, name, reason in json.loads(told):
        yield Line("settings", state, name, found[symbol].place, reason, needed=True)


def installed(models: Models) -> Iterator[Line]:
    """Check the installed package, which a child process also imports as a worker would."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        yield Line("installed", "fails", PACKAGE, "", "it is not installed in this environment", needed=True)
        return
    root = Path(spec.submodule_search_locations[0])
    try:
        name = f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        name = PACKAGE
    _, problem = child("-c", f"import {PACKAGE}")
    yield Line("installed", "fails" if problem else "holds", name, str(root), problem, needed=True)
    yield from check(root, models)


def child(*arguments: str, environ: Mapping[str, str] = os.environ, given: str = "") -> tuple[str, str]:
    """What a Python process prints, and why it failed, or ""."""
    command = [sys.executable, "-P", *arguments]
    try:
        child = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=TRIAL_TIMEOUT_S,
            check=False, env={"TRTLLM_NO_USAGE_STATS": "1"} | dict(environ),
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError) as error:
        return "", str(error)
    problem = (child.stderr.strip() or f"exit {child.returncode}").splitlines()[-1] if child.returncode else ""
    return child.stdout, problem
