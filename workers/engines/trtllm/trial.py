"""Child process of `penstock doctor trtllm`: puts settings into the package's own classes, without a GPU.

Reads one JSON object from stdin and prints one JSON list and nothing else: [symbol, state, name, reason] for each
trial. The native code of the package is replaced by stubs, and of its packages only the modules that the classes need
are imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

PACKAGE, NATIVE = "tensorrt_llm", "tensorrt_llm.bindings"
BARE = ("", "llmapi", "executor")
"""Packages whose own `__init__` is not run: it would import the whole engine."""


class StubMeta(type):
    """Metaclass of stubs: every name is there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StubMeta(name, (Stub,), {})


class Stub(metaclass=StubMeta):
    """Stands for a class, a function or a value of the native code; as an enumeration it has no members."""

    __members__: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the native modules, as stubs."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        native = fullname == NATIVE or fullname.startswith(f"{NATIVE}.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if native else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: getattr(Stub, name)


def prepare(root: Path) -> None:
    sys.meta_path.insert(0, Stubs())
    for name in BARE:
        bare = ModuleType(f"{PACKAGE}.{name}".rstrip("."))
        bare.__path__ = [str(root / name)]
        sys.modules[bare.__name__] = bare


def tried(asked: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The trials. Of a class that cannot be imported here all are skipped."""
    for symbol, trial in (("TorchLlmArgs", _settings), ("SamplingParams", _sampling)):
        if symbol not in asked["modules"]:
            continue  # the source says so already
        try:
            kind = getattr(importlib.import_module(asked["modules"][symbol]), symbol)
        except ModuleNotFoundError as error:
            yield symbol, "skipped", symbol, f"it needs {error.name}, which is not here"
        except Exception as error:  # noqa: BLE001 - code of another package, which runs on stubs
            yield symbol, "skipped", symbol, f"it cannot be imported with stubs: {type(error).__name__}: {error}"
        else:
            yield from trial(kind, asked)


def _settings(kind: Any, asked: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Each setting by itself, by its type alone: the whole class and its validators look at the GPUs."""
    make: Any = importlib.import_module("pydantic").create_model
    for model, plain in asked["settings"].items():
        for name, value in plain.items():
            if (field := kind.model_fields.get(name)) is None:
                continue  # the source says so already
            one = make("One", __config__={"arbitrary_types_allowed": True}, **{name: (field.annotation, field)})
            state, reason = _outcome(lambda one=one, name=name, value=value: one(**{name: value}))
            yield "TorchLlmArgs", state, f"{model}: {name}", reason


def _sampling(kind: Any, asked: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    state, reason = _outcome(lambda: kind(**asked["sampling"]), (ValueError, TypeError))
    yield "SamplingParams", state, "SamplingParams of a request", reason


def _outcome(make: Any, refusals: tuple[type[Exception], ...] = (ValueError,)) -> tuple[str, str]:
    """`refusals`: errors that refuse what was given. pydantic's own is a ValueError."""
    try:
        make()
    except refusals as error:
        details: list[dict[str, Any]] = getattr(error, "errors", list)()
        return "fails", "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details) or str(error)
    except Exception as error:  # noqa: BLE001 - code of another package, which runs on stubs
        return "skipped", f"it cannot be tried with stubs: {type(error).__name__}: {error}"
    return "holds", ""


if __name__ == "__main__":
    request, answer = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints, at its end too, is no part of the answer
    prepare(Path(request["root"]))
    print(json.dumps(list(tried(request))), file=answer, flush=True)
