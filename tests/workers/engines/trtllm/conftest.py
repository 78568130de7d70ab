"""The double of TensorRT-LLM in the place of the package, and engines on it."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from trtllm_double import DoubleLLM, RequestError, Rig
from trtllm_package import VERSIONS, importable, write

from workers.engines.trtllm.engine import TrtllmEngine
from workers.engines.trtllm.facts import Facts, read
from workers.engines.trtllm.settings import TrtllmSettings

_, OLDER, NEWER = VERSIONS


@pytest.fixture(params=[OLDER, NEWER])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Facts]]:
    """By version, its package and what is read from it."""
    roots = {version: write(tmp_path_factory.mktemp("package"), version) for version in VERSIONS}
    return {version: (root, read(root)) for version, root in roots.items()}


def zeros(count: int, *, dtype: type[float]) -> list[float]:
    return [dtype()] * count


@pytest.fixture
def library(version: str, packages: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The double in the place of the package; its parts, to be changed by a test before the engine starts."""
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "to be restored")
    monkeypatch.delenv("TRTLLM_NO_USAGE_STATS")
    for name, value in {"instances": [], "load_error": None, "loop": None, "version": version}.items():
        monkeypatch.setattr(DoubleLLM, name, value)
    torch = ModuleType("torch")
    vars(torch).update(cuda=SimpleNamespace(device_count=lambda: 8), float32=float, zeros=zeros)
    monkeypatch.setitem(sys.modules, "torch", torch)
    root, facts = packages[version]
    with importable(root):
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        vars(llmapi).update(LLM=DoubleLLM, RequestError=RequestError)
        library = SimpleNamespace(llmapi=llmapi, torch=torch, facts=facts)
        monkeypatch.setattr("workers.engines.trtllm.library.read", lambda folder: {root: library.facts}[folder])
        yield library


@pytest.fixture
async def rig(library: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts engines: `await rig(setting=value, ...)`; every one is stopped at the end."""
    rigs: list[Rig] = []
    for limit in ("GRACE_S", "SHUTDOWN_S", "STUCK_S"):
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
