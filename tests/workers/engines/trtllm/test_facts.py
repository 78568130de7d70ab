"""What is read from a version's source, and what `doctor trtllm` checks with it, on packages made of verdicts."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
from trtllm_package import FACTS, VERSIONS, importable, signature, write

from workers.engines.trtllm import facts
from workers.engines.trtllm.checks import Line, check, installed
from workers.engines.trtllm.settings import TrtllmSettings

OLDEST, OLDER, NEWER = VERSIONS
SAMPLER, GUIDED = "_torch/pyexecutor/sampler", "_torch/pyexecutor/guided_decoder.py"
MODEL = TrtllmSettings(model="/checkpoint", max_seq_len=4096)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_reads_as_its_verdict(version: str, tmp_path: Path) -> None:
    """All names and behaviours, each public name from a public module."""
    found = facts.read(write(tmp_path, version))
    verdict = VERSIONS[version]
    assert (found.version, found.max_logprobs) == (version, verdict["max_logprobs"])
    source = facts.Source(tmp_path / "tensorrt_llm")
    does = {name: bool(value) for name, value in verdict["behaviours"].items()}
    assert {name: probe(source)[0] for name, (_, probe) in facts.BEHAVIOURS.items()} == does
    assert {name: getattr(found, name) for name in does} == does
    for symbol in FACTS["signatures"]:
        if symbol != "LLM.__init__":
            assert found.names[symbol] >= set(signature(version, symbol)), symbol
    assert found.modules["SamplingParams"] == found.modules["LLM"] == "tensorrt_llm.llmapi"
    assert found.modules["WaitingQueuePolicy"] == "tensorrt_llm.llmapi.llm_args"
    lacks = [f"{symbol}.{name}" for symbol, names in verdict["lacks"].items() for name in names]
    assert found.lacking([*lacks, "SamplingParams.end_id", "Unknown.name"]) == lacks


@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_has_the_names_of_its_version_alone(version: str, tmp_path: Path) -> None:
    """What tests of the adapter pass against fails where a version lacks a name."""
    with importable(write(tmp_path, version)) as root:
        found = facts.read(root)
        for symbol in ("SamplingParams", "GuidedDecodingParams", "KvCacheConfig", "SchedulerConfig", "LoRARequest"):
            kind = getattr(importlib.import_module(found.modules[symbol]), symbol)
            kind(**dict.fromkeys(signature(version, symbol)))
            with pytest.raises(TypeError, match="unknown_name"):
                kind(unknown_name=1)


def does(folder: Path, behaviour: str) -> bool:
    return facts.BEHAVIOURS[behaviour][1](facts.Source(folder / "tensorrt_llm"))[0]


@pytest.mark.parametrize(("fact", "file", "old", "new"), [
    ("penalties", f"{SAMPLER}/sampler.py", "from .penalties import PenaltyHandler", ""),
    ("prompt_ignore_length", f"{SAMPLER}/penalties.py", "config.prompt_ignore_length", "0"),
    ("top_k", f"{SAMPLER}/sampler_common.py", "top_k", "length"),
    ("min_p", f"{SAMPLER}/sampler_common.py", "min_p", "length"),
    ("embedding_bias", f"{SAMPLER}/ops/apply.py", "request.py_embedding_bias", "request"),
    ("alternatives", f"{SAMPLER}/ops/apply.py", "request.py_num_logprobs", "request"),
    ("grammar_errors", GUIDED, "return failed", "return"),
    ("tag_formats", "_torch/pyexecutor/grammar_matcher.py", "(guide)", '(guide["structures"], guide["triggers"])'),
])  # fmt: skip
def test_a_behaviour_is_gone_with_its_code(fact: str, file: str, old: str, new: str, tmp_path: Path) -> None:
    """A file that nothing imports, or a parameter that nothing reads, does nothing."""
    path = write(tmp_path, NEWER) / file
    assert does(tmp_path, fact)
    path.write_text(path.read_text().replace(old, new))
    assert not does(tmp_path, fact)


def test_parts_of_an_older_sampler_are_seen(tmp_path: Path) -> None:
    """It was one file, with another beside it."""
    root = write(tmp_path, OLDEST) / "_torch/pyexecutor"
    assert not does(tmp_path, "top_k") and not does(tmp_path, "embedding_bias")
    (root / "sampling_utils.py").write_text("class UtilsSamplingParams:\n    top_k: int\n")
    shutil.rmtree(root / "sampler")
    (root / "sampler.py").write_text("def bias(request):\n    return request._py_embedding_bias_1d\n")
    assert does(tmp_path, "top_k") and does(tmp_path, "embedding_bias") and not does(tmp_path, "min_p")


def test_a_behaviour_comes_with_its_code(tmp_path: Path) -> None:
    """A change upstream is seen without a change here."""
    path = write(tmp_path, NEWER) / SAMPLER / "seed_manager.py"
    assert not does(tmp_path, "seed")
    path.write_text(path.read_text().replace("seed_unsupported", "seed_taken"))
    assert does(tmp_path, "seed")


# --- the checks ------------------------------------------------------------------------------------------------------


def of(lines: list[Line], name: str) -> Line:
    return next(line for line in lines if line.name.partition(",")[0] == name)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_all_that_the_settings_need(version: str, tmp_path: Path) -> None:
    """No needed name fails, and each line that holds or fails says where."""
    lines = [*check(write(tmp_path, version), {"toy": MODEL})]
    assert [line for line in lines if line.state == "fails" and line.needed] == []
    assert of(lines, "LLM").where.startswith("llmapi/llm.py:")
    assert all(Path(tmp_path, "tensorrt_llm", line.where.partition(":")[0]).exists() for line in lines if line.where)
    salt = of(lines, "LLM.generate_async.cache_salt")
    assert (salt.state, bool(salt.reason)) == (("fails", True) if version == OLDEST else ("holds", False))


def test_a_setting_that_a_version_lacks_fails(tmp_path: Path) -> None:
    """With the name and the place of its class."""
    settings = TrtllmSettings(model="/m", max_seq_len=64, extra={"sampler_type": "auto"}, kv_cache={"dtype": "fp8"})
    older = of([*check(write(tmp_path / "a", OLDER), {"toy": settings})], "TorchLlmArgs")
    assert older.state == "holds"
    newer = [*check(write(tmp_path / "b", NEWER), {"toy": settings})]
    lacking = of(newer, "TorchLlmArgs.sampler_type")
    assert (lacking.state, lacking.needed, lacking.where.partition(":")[0]) == ("fails", True, "llmapi/llm_args.py")


def test_what_has_no_source_here_is_skipped(tmp_path: Path) -> None:
    """It may hold: the reason names the module. A folder with another content fails."""
    root = write(tmp_path, NEWER)
    (root / GUIDED).unlink()
    (root / "llmapi/llm_args.py").unlink()
    lines = [*check(root, {})]
    for name, module in (("grammar_errors", "guided_decoder"), ("SchedulerConfig", "llm_args")):
        assert of(lines, name).state == "skipped" and of(lines, name).reason.endswith(module)
    (line,) = check(tmp_path, {})
    assert (line.state, line.needed) == ("fails", True)


MODELS = """
from typing import Literal, Optional
from pydantic import BaseModel, ConfigDict, Field
from ..bindings.executor import SchedulerConfig as _SchedulerConfig
class KvCacheConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    free_gpu_memory_fraction: Optional[float] = Field(default=0.9, ge=0, le=1)
    enable_block_reuse: bool = True
class SchedulerConfig(BaseModel):
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT"] = "GUARANTEED_NO_EVICT"
class TorchLlmArgs(BaseModel):
    native: object = _SchedulerConfig.of(1, *_SchedulerConfig.__members__)
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    max_seq_len: Optional[int] = None
"""


def test_settings_go_through_the_packages_own_classes(tmp_path: Path) -> None:
    """Without its native code, and one by one: a value that a class refuses is named with its reason."""
    root = write(tmp_path, NEWER)
    (root / "llmapi/llm_args.py").write_text(MODELS)
    bad = TrtllmSettings(model="/m", max_seq_len=64, kv_cache={"free_gpu_memory_fraction": 3.0, "typo": 1})
    lines = [line for line in check(root, {"good": MODEL, "bad": bad}) if line.level == "settings"]
    assert of(lines, "good: kv_cache_config").state == of(lines, "good: max_seq_len").state == "holds"
    refused = of(lines, "bad: kv_cache_config")
    assert (refused.state, refused.needed) == ("fails", True)
    assert "free_gpu_memory_fraction" in refused.reason and "typo" in refused.reason
    assert of(lines, "SamplingParams of a request").state == "holds"


def test_settings_are_those_that_a_start_would_use(tmp_path: Path) -> None:
    """With TensorRT-LLM's own settings file below them, and without those that the adapter refuses."""
    root, file = write(tmp_path, NEWER), tmp_path / "extra.yaml"
    file.write_text("kv_cache_config: {pages: 3}\n")
    settings = {
        "joined": TrtllmSettings(model="/m", config=file),
        "none": TrtllmSettings(model="/m", config=tmp_path / "none.yaml"),
        "refused": TrtllmSettings(model="/m", speculative={"decoding_type": "Medusa"}),
    }
    lines = [*check(root, settings)]
    assert of(lines, "KvCacheConfig.pages").state == "fails"
    assert "none.yaml" in of(lines, "none").reason and "Medusa" in of(lines, "refused").reason


@pytest.mark.parametrize(("file", "gone", "line"), [
    ("executor/utils.py", "class RequestError(RuntimeError): ...", "RequestError"),
    ("executor/request.py", "lora_int_id", "LoRARequest.lora_int_id"),
    ("executor/params/sampling.py", "class SamplingParams(Strict):", "SamplingParams of a request"),
])  # fmt: skip
def test_what_a_start_or_a_request_lacks_fails(file: str, gone: str, line: str, tmp_path: Path) -> None:
    root, settings = write(tmp_path, NEWER), TrtllmSettings(model="/m", adapters={"a": "/a"})
    text = (root / file).read_text()
    assert gone in text
    refusing = (
        gone + "\n    def __init__(self, *, other): ...\n" if gone.startswith("class SamplingParams") else "other"
    )
    (root / file).write_text(text.replace(gone, refusing))
    failed = of([*check(root, {"m": settings})], line)
    assert (failed.state, failed.needed) == ("fails", True)


def test_reuse_of_prompts_is_tried_as_a_start_would_ask_for_it(tmp_path: Path) -> None:
    """The oldest version cannot keep cached prompts of tenants apart, so reuse is switched off there."""
    root = write(tmp_path, OLDEST)
    path = root / "llmapi/llm_args.py"
    path.write_text(path.read_text().replace("enable_block_reuse", "other"))
    assert of([*check(root, {"m": MODEL})], "KvCacheConfig.enable_block_reuse").state == "fails"


def test_classes_that_cannot_be_imported_here_are_skipped(tmp_path: Path) -> None:
    """The reason names the package that is missing."""
    root = write(tmp_path, NEWER)
    (root / "llmapi/llm_args.py").write_text("import no_such_package\n" + MODELS)
    lines = [line for line in check(root, {"good": MODEL}) if line.level == "settings"]
    assert of(lines, "TorchLlmArgs").state == "skipped" and "no_such_package" in of(lines, "TorchLlmArgs").reason
    assert of(lines, "SamplingParams of a request").state == "holds"


CHAIN = {f"llmapi/d{number}.py": f"from .d{number + 1} import LLM\n" for number in range(1500)}
CIRCLE = {f"llmapi/c{number}.py": "".join(f"from .c{other} import *\n" for other in range(9)) for number in range(9)}


@pytest.mark.parametrize("files", [
    {"llmapi/llm.py": "class B(LLM): ...\nclass LLM(B): ...\n"},
    {"llmapi/llm.py": "".join(f"class C{n}(C{n + 1}): ...\n" for n in range(1500)) + "class LLM(C0): ...\n"},
    {"llmapi/llm.py": "from .c0 import *\n", **CIRCLE},
    {"llmapi/llm.py": "x = " + "(" * 5000 + ")" * 5000},
    {"llmapi/llm.py": "x = 1" + " + 1" * 100_000},
    {"llmapi/llm.py": "if 1: ...\n" + "elif 1: ...\n" * 1500},
    {"llmapi/llm.py": "from .d0 import LLM\n", **CHAIN},
])  # fmt: skip
def test_a_tree_of_any_shape_is_read_to_its_end(files: dict[str, str], tmp_path: Path) -> None:
    """Circles of classes and of imports, and what Python itself cannot parse, lack names and nothing else."""
    root = write(tmp_path, NEWER)
    for name, content in files.items():
        (root / name).write_text(content)
    assert of([*check(root, {})], "TorchLlmArgs").state == "holds"
    assert facts.read(root).version == NEWER


@pytest.mark.parametrize(("code", "state"), [
    ("import atexit; print('a'); atexit.register(print, '[0]')", "holds"),
    ("import os; os._exit(0)", ""),
    ("raise SystemExit", ""),
    ("import os; os.write(2, b'\\xff'); os._exit(3)", ""),
])  # fmt: skip
def test_code_of_the_package_may_print_and_end(code: str, state: str, tmp_path: Path) -> None:
    """What a trial said before its end counts if it is whole."""
    root = write(tmp_path, NEWER)
    with (root / "strict.py").open("a") as file:
        file.write(code + "\n")
    lines = [line for line in check(root, {"toy": MODEL}) if line.level == "settings"]
    request = [line for line in lines if line.name == "SamplingParams of a request"]
    assert [line.state for line in request] == ([state] if state else [])
    assert state or of(lines, "trial").state == "skipped"


def test_a_trial_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs code of any checkout."""
    monkeypatch.setenv("HUB_TOKEN", "secret")
    root = write(tmp_path, NEWER)
    with (root / "strict.py").open("a") as file:
        file.write(f"import os; open({str(tmp_path / 'seen')!r}, 'w').write('\\n'.join(os.environ))\n")
    assert of([*check(root, {"toy": MODEL})], "SamplingParams of a request").state == "holds"
    seen = (tmp_path / "seen").read_text().split()
    assert "PATH" in seen and "HUB_TOKEN" not in seen


@pytest.mark.parametrize("content", [
    "extra_field: {when: 2026-01-01}",
    "extra_field: {2026-01-01: 1}",
    "extra_field: &a {b: *a}",
    "1: 2",
    "context_parallel_size: two",
    "context_parallel_size: -1",
])  # fmt: skip
def test_a_settings_file_may_hold_anything(content: str, tmp_path: Path) -> None:
    """What is wrong in it fails with its reason."""
    (tmp_path / "extra.yaml").write_text(content)
    settings = TrtllmSettings(model="/m", max_seq_len=64, config=tmp_path / "extra.yaml")
    lines = [*check(write(tmp_path, NEWER), {"toy": settings})]
    assert any(line.state == "fails" and line.needed for line in lines)


def test_an_installed_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child process; what its import raises is the reason. Without one, that is said."""
    (missing,) = installed({})
    assert (missing.state, missing.needed) == ("fails", True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with importable(write(tmp_path, NEWER)) as root:
        assert next(installed({})).state == "holds"
        (root / "version.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
        first = next(installed({}))
    assert first.state == "fails" and "libcuda.so.1" in first.reason


LLM, ARGS, PARAMS = "llmapi/llm.py", "llmapi/llm_args.py", "executor/params/sampling.py"


@pytest.mark.parametrize(("file", "old", "new", "fact", "value"), [
    (PARAMS, "MAX_TOP_LOGPROBS", "OTHER", "max_logprobs", 20),
    (ARGS, "PRIORITY = ", "OTHER = ", "priority", False),
    (LLM, "generate_async(self, ", "generate_async(self, *, ", "priority", True),
    (LLM, "class LLM(_TorchLLM)", "if no_gpu: ...\nelse:\n    class LLM(_TorchLLM)", "priority", True),
    (f"{SAMPLER}/penalties.py", None, None, "penalties", False),
])  # fmt: skip
def test_a_fact_follows_from_all_that_it_needs(
    file: str, old: str | None, new: str | None, fact: str, value: object, tmp_path: Path
) -> None:
    """Wherever a version writes it, and nothing is claimed where a part of it is missing."""
    root = write(tmp_path, NEWER)
    assert getattr(facts.read(root), fact) == (100 if fact == "max_logprobs" else True)
    if old is None or new is None:
        (root / file).unlink()
    else:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))
    assert getattr(facts.read(root), fact) == value
