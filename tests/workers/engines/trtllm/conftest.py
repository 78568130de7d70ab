"""The double of TensorRT-LLM in the place of the package, and engines on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from trtllm_double import SIGNATURES, DoubleLLM, RequestError, Rig, facts, strict

from workers.engines.trtllm.engine import TrtllmEngine
from workers.engines.trtllm.settings import TrtllmSettings


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The double in the place of the package; its parts by name, to be changed by a test before the engine starts."""
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "to be restored")
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    monkeypatch.setattr(DoubleLLM, "instances", [])
    monkeypatch.setattr(DoubleLLM, "load_error", None)
    params = {name: strict(name, SIGNATURES[name]) for name in ("SamplingParams", "GuidedDecodingParams")}
    monkeypatch.setattr(DoubleLLM, "loop", None)
    modules = {
        "tensorrt_llm": {"__path__": ["/double"]},
        "tensorrt_llm.llmapi": {
            "LLM": DoubleLLM,
            "RequestError": RequestError,
            "LoRARequest": strict("LoRARequest", SIGNATURES["LoRARequest"]),
            **params,
        },
        "torch": {"cuda": SimpleNamespace(device_count=lambda: 8), "FloatTensor": tuple},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    library = SimpleNamespace(modules={name: sys.modules[name] for name in modules}, facts=facts())
    monkeypatch.setattr("workers.engines.trtllm.library.read", lambda root: library.facts)
    return library


@pytest.fixture
async def rig(library: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts engines: `await rig(setting=value, ...)`; every one is stopped at the end."""
    rigs: list[Rig] = []
    for limit in ("GRACE_S", "SHUTDOWN_S"):
        monkeypatch.setattr(f"workers.engines.trtllm.engine.{limit}", 0.05)

    async def start(clock: Callable[[], float] = time.monotonic, **settings: Any) -> Rig:
        chosen = TrtllmSettings(**({"model": str(tmp_path), "max_seq_len": 4096} | settings))
        made = Rig(TrtllmEngine("toy", chosen, clock))
        made.card = await made.engine.start(made.steps.append, made.phases.append)
        rigs.append(made)
        return made

    yield start
    for made in rigs:
        made.llm.hang.set()
        await made.engine.stop()


@pytest.fixture
async def started(rig: Any) -> Rig:
    """With the settings as they are by themselves."""
    return await rig()
