"""Plug-ins that cannot be built: each is refused with the setting at fault and the fix, before a worker starts."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from penstock.config import Config, ConfigError
from streaming.fleet.settings import ModelSettings
from workers.engines import registry
from workers.engines.registry import build, check_name

EXAMPLE = Path(__file__).parents[3] / "examples" / "engine"
MODULE = """
import msgspec
from echo_engine import Echo

class NoStruct(Echo):
    Settings = dict

class Plain(Echo):
    Settings = None
    def __init__(self, model, options):
        self.options = options

class Adapted(Echo):
    class Settings(Echo.Settings):
        adapters: dict[str, str] = {}


class NotAsync(Echo):
    def check(self, request): ...

class Raises(Echo):
    def __init__(self, model, settings):
        raise OSError("no device")

class Outer:
    class Inner(Echo): ...

def made(model, options):
    return Plain(model, options)

def nothing(model, options): ...
number = 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable for one test: the example, a module with good and bad engines, and some that cannot be imported."""
    (tmp_path / "some_engines.py").write_text(MODULE)
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "needs.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("some_engines", "breaks", "needs", "echo_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "no_such_module:Echo",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_module' (try",
        ),
        ("echo_engine:Ehco", "echo_engine:Ehco cannot be imported: AttributeError"),
        ("some_engines:number", "is no engine: a int, not a class"),
        ("echo_engine:Answer", "is no engine: it has no start, check, stop, submit, cancel, stats, health"),
        ("some_engines:nothing", "is no engine: it has no start"),
        ("some_engines:NotAsync", "is no engine: check must be `async def`"),
        ("some_engines:NoStruct", "its Settings is no msgspec.Struct"),
        ("some_engines:Raises", "some_engines:Raises cannot be built: OSError: no device"),
        ("breaks:Echo", "breaks:Echo cannot be imported: RuntimeError: no driver (try: python -c"),
        ("sym", "no engine 'sym' is installed (did you mean 'sim'?; a plug-in is module:class (docs/engines.md))"),
    ],
)
def test_what_is_no_engine_is_refused(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        build("m", ModelSettings(engine=name), Config({}), tmp_path)
    assert str(refused.value).startswith("models.m.engine: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"slots": "many"}, "models.m.options.slots: expected a whole number"),
        ({"slot": 3}, "models.m.options.slot: no such setting (did you mean 'slots'?)"),
    ],
)
def test_options_are_held_against_the_engines_own_struct(
    options: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        build("m", ModelSettings(engine="echo_engine:Echo", options=options), Config({}), tmp_path)
    assert str(refused.value).startswith(problem)


def test_adapters_are_an_option_of_the_class(tmp_path: Path) -> None:
    """One whose settings have none is refused them."""
    with pytest.raises(ConfigError, match=r"models.m.adapters: this engine takes none"):
        build("m", ModelSettings(engine="echo_engine:Echo", adapters={"a": "/a"}), Config({}), tmp_path)
    assert build("m", ModelSettings(engine="some_engines:Adapted", adapters={"a": "/a"}), Config({}), tmp_path)


@pytest.mark.parametrize("name", ["echo_engine:Echo", "some_engines:Outer.Inner", "some_engines:made"])
def test_a_class_a_nested_class_or_a_function_makes_an_engine(name: str) -> None:
    assert callable(registry.build_plugin(name, "m", {}).submit)


def test_an_entry_point_gives_an_engine_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its group; a name that is not installed is compared with it."""
    found = EntryPoints([EntryPoint("echo", "echo_engine:Echo", registry.GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    assert type(registry.build_plugin("echo", "m", {"slots": 3})).__name__ == "Echo"
    with pytest.raises(ConfigError, match=r"up\.engine: no engine 'ecco' is installed \(did you mean 'echo'"):
        check_name("ecco", "up.engine")


def test_an_installed_engine_of_a_built_in_name_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Penstock's own is built, as if the other were not there."""
    found = EntryPoints([EntryPoint("sim", "echo_engine:Echo", registry.GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))
    built = build("m", ModelSettings(engine="sim"), Config({}), tmp_path)
    assert type(built).__name__ != "Echo" and "write the installed one of that name as module:class" in caplog.text


def test_a_name_is_checked_without_an_import() -> None:
    """A built-in one, and a class; whether that can be imported is for the worker's environment to say."""
    check_name("sim", "up.engine")
    check_name("breaks:Echo", "up.engine")
    assert "breaks" not in sys.modules
