"""Which engine serves a model, by its configuration. Engines are imported only when they are chosen."""

from __future__ import annotations

from pathlib import Path

from runtime.config import Config
from streaming.settings import ModelSettings
from workers.engines.base import Engine
from workers.settings import LlamacppSettings, SimSettings, TrtllmSettings


def build(model: str, settings: ModelSettings, config: Config, data_dir: Path) -> Engine:
    """An engine that is not started yet. Raises ConfigError, EngineDead."""
    match settings.engine:
        case "sim":
            from workers.engines.sim.engine import SimEngine  # noqa: PLC0415

            return SimEngine(model, config.section("sim", SimSettings, settings.options))
        case "llamacpp":
            from workers.engines.llamacpp.engine import LlamacppEngine  # noqa: PLC0415
            from workers.engines.weights import fetch  # noqa: PLC0415

            options = config.section("llamacpp", LlamacppSettings, settings.options)
            gguf = options.path or fetch(data_dir / "weights", lambda _phase, _done, _total: None)
            return LlamacppEngine(model, options, gguf)
        case "trtllm":
            from workers.engines.trtllm.engine import TrtllmEngine  # noqa: PLC0415

            return TrtllmEngine(model, config.section("trtllm", TrtllmSettings, settings.options))
