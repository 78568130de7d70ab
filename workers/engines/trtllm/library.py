"""Imports the parts of TensorRT-LLM that this adapter uses. No other module imports it, and only a starting engine
calls this one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.engine import EngineDead
from workers.engines.trtllm.facts import Facts, read
from workers.engines.trtllm.settings import TrtllmSettings

ANCHOR = "1.3.0rc23"
"""The version of TensorRT-LLM that this adapter was written for."""
THINKING = "ThinkingBudgetLogitsProcessor"


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of the installed package that this adapter uses, and the number of GPUs."""

    facts: Facts
    llm: Any
    sampling: Any
    request_error: type[Exception]
    """The error of a single request. Any other error counts as a dead engine: older versions have no class for that."""
    guided: Any
    """None unless the settings need it; also the next one."""
    lora_request: Any
    zeros: Any
    """Makes a tensor of so many zeros."""
    thinking: Any
    """The logits processor that ends reasoning; None where the installed version has none."""
    gpus: int


def load(settings: TrtllmSettings) -> Library:
    """Import TensorRT-LLM. Raises EngineDead when it is missing or incompatible."""
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # it sends usage statistics by default
    try:
        facts = read(Path(next(iter(import_module("tensorrt_llm").__path__))))
        names = ["LLM", "SamplingParams", "RequestError"]
        names += ["GuidedDecodingParams"] if settings.guided_decoding else []
        names += ["LoRARequest"] if settings.adapters else []
        if absent := [name for name in names if name not in facts.modules]:
            raise ImportError(f"it has no {', '.join(absent)}")
        names += [THINKING] if THINKING in facts.modules else []
        found = {name: getattr(import_module(facts.modules[name]), name) for name in names}
        torch = import_module("torch")
        gpus = int(torch.cuda.device_count())
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library it links to is missing
        raise EngineDead(
            f"TensorRT-LLM cannot be used: {error}. It needs a machine with NVIDIA GPUs and about version {ANCHOR}, "
            "see docs/tensorrt-llm.md"
        ) from error
    return Library(
        facts=facts,
        llm=found["LLM"],
        sampling=found["SamplingParams"],
        request_error=found["RequestError"],
        guided=found.get("GuidedDecodingParams"),
        lora_request=found.get("LoRARequest"),
        zeros=partial(torch.zeros, dtype=torch.float32),
        thinking=found.get(THINKING),
        gpus=max(gpus, _ranks()),
    )


def _ranks() -> int:
    """The GPUs of all machines, if trtllm-llmapi-launch started this process: MPI runs a process for each. Else 0."""
    launched = os.environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1"
    return int(os.environ.get("tllm_mpi_size", "0")) if launched else 0  # noqa: SIM112 - the launcher's own name


def read_config(path: Path | None) -> dict[str, Any]:
    """A settings file of TensorRT-LLM (YAML); {} without one. Raises EngineDead."""
    if path is None:
        return {}
    try:
        import yaml  # noqa: PLC0415 - TensorRT-LLM brings it along

        found = yaml.safe_load(path.read_text())
        json.dumps(found, default=str)
    except ImportError as error:
        raise EngineDead(f"config: {path} is YAML, and PyYAML is not installed: pip install pyyaml") from error
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:  # such as a map within itself
        raise EngineDead(f"config: {path} cannot be read: {error}") from error
    if not isinstance(found, dict | None):
        raise EngineDead(f"config: {path} holds no fields of TorchLlmArgs: write name: value")
    return found or {}
