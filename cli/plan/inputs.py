"""Inputs of a plan: the model and the device that flags name, also from a file or measured on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from planner.facts import catalogue
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.facts.model_config import from_config, from_gguf

CPU = "cpu"


def model_named(name: str | None, config: Path | None) -> ModelShape:
    """The model of --model, or of the file of --config. Raises PlanError."""
    if config is None:
        if name is None:
            raise PlanError("no model is named: give --model NAME, such as llama-3.1-8b, or --config config.json")
        return catalogue.model(name)
    if name is not None:
        raise PlanError("--model and --config both name a model: leave one out")
    return _of_gguf(config) if config.suffix == ".gguf" else _of_config(config)


def device_named(name: str) -> Accelerator:
    """A device of the catalogue, or this machine's CPU, measured now (a second). Raises PlanError."""
    if name.lower() != CPU:
        return catalogue.device(name)
    from cli.plan.cpu import measured_cpu  # noqa: PLC0415 - numpy, which only this needs

    return measured_cpu()


def _of_config(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise PlanError(f"{path} is no config.json of a model: it nests too deep") from None
    except ValueError as error:
        raise PlanError(f"{path} is no config.json of a model: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} is no config.json of a model: it holds no object")
    return from_config(config, path.parent.name if path.stem == "config" and path.parent.name else path.stem)


def _of_gguf(path: Path) -> ModelShape:
    from workers.engines.llamacpp.gguf import GgufError, read  # noqa: PLC0415 - most plans read none

    try:
        file = read(path)
    except (GgufError, OSError) as error:
        raise PlanError(str(error)) from None
    starts = sorted({tensor.offset for tensor in file.tensors})
    ends = dict(zip(starts, [*starts[1:], file.size], strict=True))
    # A type whose size the parser does not know takes what lies before the next tensor.
    sizes = {tensor.name: tensor.nbytes or ends[tensor.offset] - tensor.offset for tensor in file.tensors}
    return from_gguf(file.metadata, sizes, file.vocabulary, path.stem)
