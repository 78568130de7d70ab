"""A package `tensorrt_llm` with exactly the names of one version, written from the stored verdicts (trtllm_facts.json).

It has the shape of the real one: public names lead through re-exports to classes with bases in other files, and what a
version does or does not do stands in its sampler and executor. It can be read as source, and be imported.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent

FACTS = json.loads((Path(__file__).parents[1] / "workers/engines/trtllm/trtllm_facts.json").read_text())
VERSIONS = FACTS["versions"]
STRICT = '''
class Strict:
    """Takes the names of its class and nothing else, and keeps what it was given."""

    def __init_subclass__(cls):
        cls.made, cls.model_fields = [], dict.fromkeys(cls.__annotations__)

    def __init__(self, **given):
        if unknown := set(given) - set(self.model_fields):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        self.given = given
        self.made.append(self)
'''
CONFIGS = ("DecodingBaseConfig", "KvCacheConfig", "SchedulerConfig", "TorchLlmArgs")
READ = {"embedding_bias": "py_embedding_bias", "alternatives": "py_num_logprobs"}


def signature(version: str, symbol: str) -> dict[str, str]:
    """The parameters or fields of a symbol in a version, with their defaults as text."""
    lacks, adds = VERSIONS[version]["lacks"], VERSIONS[version]["adds"]
    names = FACTS["signatures"][symbol] | dict.fromkeys(adds.get(symbol, ()), "None")
    return {name: default for name, default in names.items() if name not in lacks.get(symbol, ())}


def literal(default: str) -> str:
    """A default that needs no import."""
    try:
        return repr(ast.literal_eval(default))
    except (ValueError, SyntaxError):
        return "None"


def strict(version: str, symbol: str) -> str:
    fields = (
        f"{name}: object" + ("" if default == "<required>" else f" = {literal(default)}")
        for name, default in signature(version, symbol).items()
    )
    return f"class {symbol}(Strict):\n" + indent("\n".join(fields) or "...", "    ") + "\n"


def plain(name: str, fields: list[str]) -> str:
    return f"class {name}:\n" + indent("\n".join(f"{each}: object = None" for each in fields), "    ") + "\n"


def enumeration(name: str) -> str:
    members = "\n".join(f"{each} = {each!r}" for each in FACTS["enums"][name])
    return f"class {name}(StrEnum):\n" + indent(members, "    ") + "\n"


def parameters(names: Mapping[str, str]) -> str:
    return ", ".join(
        name if default == "<required>" else f"{name}={literal(default)}" for name, default in names.items()
    )


def sources(version: str) -> dict[str, str]:
    """The text of each file."""
    verdict = VERSIONS[version]
    does, sampling = verdict["behaviours"], verdict["sampling_module"]
    methods = "".join(
        f"    def {name}(self, {parameters(names)}): ...\n" for name, names in FACTS["methods"]["LLM"].items()
    )
    params = f"from tensorrt_llm.strict import Strict\n\nMAX_TOP_LOGPROBS = {verdict['max_logprobs']}\n\n"
    params += strict(version, "GuidedDecodingParams") + "\n" + strict(version, "SamplingParams")
    files = {
        "__init__.py": "from .llmapi import LLM\nfrom .version import __version__\n",
        "version.py": f"__version__ = {version!r}\n",
        "strict.py": STRICT,
        "llmapi/__init__.py": "\n".join((
            "from ..executor import (CompletionOutput, LoRARequest,", "                        RequestError)",
            f"from ..{sampling} import GuidedDecodingParams, SamplingParams", "from .llm import LLM, RequestOutput",
            "from .llm_args import (CapacitySchedulerPolicy, KvCacheConfig,",
            "                       SchedulerConfig, TorchLlmArgs)", "",
        )),
        "llmapi/llm.py": "\n".join((
            "from ..executor import GenerationResult", "", "class RequestOutput(GenerationResult): ...", "",
            "class BaseLLM:", "    @property", "    def tokenizer(self): ...", "",
            f"    def generate_async(self, {parameters(signature(version, 'LLM.generate_async'))}): ...", "", methods,
            "class _TorchLLM(BaseLLM): ...", "class LLM(_TorchLLM): ...", "",
        )),
        "llmapi/llm_args.py": "\n".join((
            "from enum import StrEnum", "", "from tensorrt_llm.strict import Strict", "",
            *(enumeration(name) for name in FACTS["enums"]),
            *(strict(version, name) for name in CONFIGS),
        )),
        "executor/__init__.py": "\n".join((
            "from .request import *", "from .result import *",
            "from .utils import RequestError", "",
        )),
        "executor/request.py": f"from tensorrt_llm.strict import Strict\n\n{strict(version, 'LoRARequest')}",
        "executor/utils.py": "class RequestError(RuntimeError): ...\nclass EngineDeadError(RuntimeError): ...\n",
        "executor/result.py": "\n".join((
            plain("CompletionOutput", FACTS["fields"]["CompletionOutput"]), "class GenerationResult:",
            "    def __init__(self):", *(f"        self.{each} = None" for each in FACTS["fields"]["RequestOutput"]),
            "", "    def abort(self): ...", "",
        )),
        "_torch/pyexecutor/sampler/__init__.py": "",
        "_torch/pyexecutor/sampler/sampler.py": "\n".join((
            "from .penalties import PenaltyHandler" if does["penalties"] else "",
            "from .seed_manager import _SeedManager" if does["seed"] is not None else "", "",
        )),
    }  # fmt: skip
    files[f"{sampling.replace('.', '/')}.py"] = params
    if fields := [name for name in ("top_k", "min_p") if does[name]]:
        files["_torch/pyexecutor/sampler/sampler_common.py"] = plain("UtilsSamplingParams", ["top_p", *fields])
    read = [f"def {name}(request):\n    return request.{field}" for name, field in READ.items() if does[name]]
    files["_torch/pyexecutor/sampler/ops/apply.py"] = "\n".join(read)
    files["_torch/pyexecutor/guided_decoder.py"] = "\n".join((
        "class GuidedDecoder:", "    def execute(self, logits):", "        failed = self.build()",
        "        return failed" if does["grammar_errors"] else "        return", "",
    ))  # fmt: skip
    given = "guide" if does["tag_formats"] else 'json.loads(guide)["structures"], json.loads(guide)["triggers"]'
    files["_torch/pyexecutor/grammar_matcher.py"] = "\n".join((
        "import json", "", "class XGrammarMatcherFactory:", "    def create(self, guide):",
        f"        return self._compiler.compile_structural_tag({given})", "",
    ))  # fmt: skip
    if "thinking_token_budget" in signature(version, "SamplingParams"):
        names = "thinking_token_budget, reasoning_start_token_ids, reasoning_end_token_ids"
        files["llmapi/thinking_budget.py"] = "\n".join((
            "class ThinkingBudgetLogitsProcessor:", f"    def __init__(self, {names}):",
            f"        self.given = {names}",
            "    def __call__(self, req_id, logits, token_ids): ...", "",
        ))  # fmt: skip
    if does["penalties"]:
        prompt = "config.prompt_ignore_length" if does["prompt_ignore_length"] else "0"
        files["_torch/pyexecutor/sampler/penalties.py"] = f"def ignored(config):\n    return {prompt}\n"
    if does["seed"] is not None:
        warns = (
            "" if does["seed"] else 'logger.warning_once("partly", key="torch_sampler_per_request_seed_unsupported")\n'
        )
        files["_torch/pyexecutor/sampler/seed_manager.py"] = f"def observe(logger):\n    {warns or '...'}\n"
    return files


def write(folder: Path, version: str) -> Path:
    """Write the package of this version into `folder`. Returns its own folder."""
    root = folder / "tensorrt_llm"
    for name, text in sources(version).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@contextmanager
def importable(root: Path) -> Iterator[Path]:
    """The package in the folder `root` can be imported, until the end."""
    sys.path.insert(0, str(root.parent))
    importlib.invalidate_caches()
    try:
        yield root
    finally:
        sys.path.remove(str(root.parent))
        for name in [name for name in sys.modules if name.split(".")[0] == root.name]:
            del sys.modules[name]
