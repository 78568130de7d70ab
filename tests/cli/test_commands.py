"""Exit codes and the errors of commands that reach nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_instance import running_at

from cli.__main__ import main
from cli.app import LazyGroup, app
from cli.instance import DataDir
from penstock import __version__
from workers.engines.llamacpp import weights

JSON_COMMANDS = [["ps"], ["jobs", "ls"], ["jobs", "show", "x"], ["submit", "hi"]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a folder without settings or instance, and nothing listens where they look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_PORT", "1")


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """As --help does; a group without a command is wrong usage."""
    assert main([]) == 0
    said = capsys.readouterr()
    assert "Usage: penstock " in said.out and not said.err
    assert main(["jobs"]) == 2
    assert "penstock jobs --help" in capsys.readouterr().err


def test_misspelt_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, with the nearest name."""
    assert main(["doctr"]) == 2
    assert "Did you mean 'doctor'" in capsys.readouterr().err


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_nothing_running_is_code_3(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With --json stdout is empty and stderr holds the error object."""
    assert main([*command, "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["error"]["next"].startswith("penstock up")


def test_down_without_instance_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to stop."""
    assert main(["down"]) == 3
    assert "nothing is running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("PENSTOCK_PROT", "1", "PENSTOCK_PORT"), ("PENSTOCK_WORKERS", "many", "a whole number")],
)
def test_bad_variable_names_key_and_remedy(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting nobody knows, or of the wrong kind, is wrong usage."""
    monkeypatch.setenv(variable, value)
    assert main(["up", "--engine", "sim"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "error:" in error


def test_redis_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """An address no Redis can have is a wrong setting; nothing is left of the start."""
    assert main(["up", "--engine", "sim", "--port", "0", "--redis-url", "redis://127.0.0.1:port"]) == 2
    assert "error: redis" in capsys.readouterr().err
    assert not Path(".penstock", "run").exists()


def test_bad_settings_file_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key of penstock.toml that nobody knows stops every command that reads it."""
    (tmp_path / "penstock.toml").write_text('[up]\nengin = "sim"\n')
    assert main(["ps"]) == 2
    said = "up.engin: no such setting\ncause: set in penstock.toml, line 2\nnext:  did you mean 'engine'?"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "environ", "cause"),
    [
        ('options.path = "gone.gguf"', {}, "set in penstock.toml, line 4"),
        ("", {"PENSTOCK_LLAMACPP_PATH": "gone.gguf"}, "set by the variable PENSTOCK_LLAMACPP_PATH"),
        ('shapes.a = {upto = 1}\nshapes.b.options.path = "gone.gguf"', {}, "set in penstock.toml, line 5"),
    ],
)
def test_missing_model_file_is_found_before_the_start(
    settings: str,
    environ: dict[str, str],
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No worker is started three times for it, and nothing else is."""
    (tmp_path / "penstock.toml").write_text(f'[models.m]\nengine = "llamacpp"\nmin_workers = 1\n{settings}\n')
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_PORT", "0")
    assert main(["up"]) == 2
    error = capsys.readouterr().err
    assert f"path: there is no {tmp_path / 'gone.gguf'}\ncause: {cause}\n" in error
    assert not Path(".penstock").exists()
    assert main(["up", "--workers", "0", "--host", "nowhere.invalid"]) != 0  # no worker: no file is needed
    assert "there is no" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"<html>", b"GGU", b"", None])
def test_damaged_model_file_is_found_before_the_start(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its first bytes; a folder is none, either."""
    path = tmp_path / "m.gguf"
    path.mkdir() if content is None else path.write_bytes(content)
    (tmp_path / "penstock.toml").write_text('[models.m]\nengine = "llamacpp"\noptions.path = "m.gguf"\n')
    monkeypatch.setenv("PENSTOCK_PORT", "0")
    assert main(["up"]) == 2
    error = capsys.readouterr().err
    assert f"models.m.options.path: {path} is not a GGUF file\ncause: set in penstock.toml, line 3\n" in error
    assert not Path(".penstock").exists()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("[api", "next:  write the file as UTF-8 TOML"),
        (None, "next:  correct the path"),
        ('[models.m]\nengine = "sim"\nmin_workers = 2\nmax_workers = 1\n', ""),
        ("[api]\nport = 'x'\n", "next:  penstock help environment"),
    ],
)
def test_the_page_of_variables_is_named_where_it_helps(
    text: str | None, step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `up` and of the doctor, with the file that --config names."""
    monkeypatch.delenv("PENSTOCK_PORT")
    path = tmp_path / "my.toml"
    if text is not None:
        path.write_text(text)
    assert main(["up", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert step in error and ("next:" in error) == bool(step)
    assert main(["doctor", "--config", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checks"][0]
    assert found["status"] == "fail" and found["hint"].startswith(step.removeprefix("next:  "))


def test_exposed_host_without_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Any address but loopback needs an API key."""
    assert main(["up", "--engine", "sim", "--host", "0.0.0.0"]) == 2  # noqa: S104
    assert "no API key is configured" in capsys.readouterr().err


def test_unreachable_redis_is_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    """`ps --redis-url` says what it could not reach."""
    assert main(["ps", "--redis-url", "redis://127.0.0.1:1/0"]) == 3
    assert "Redis" in capsys.readouterr().err


def test_exposed_key_file_is_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key others can read is not used."""
    folder = tmp_path / ".penstock"
    folder.mkdir()
    (folder / "api-key").write_text("secret")
    (folder / "api-key").chmod(0o644)
    assert main(["submit", "hi"]) == 4
    assert "chmod 600" in capsys.readouterr().err


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As SECURITY.md asks for it, and as most commands have it."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock, version {__version__}\n"


def test_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is 128 + SIGINT."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "main", interrupted)
    assert main(["version"]) == 130


def test_unexpected_error_is_one_block(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback unless --debug asks for it."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(app, "main", broken)
    assert main(["version"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert main(["version", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes and environment have pages of their own, and every command has help."""
    assert main(["help", "exit-codes"]) == 0
    assert "130  interrupted" in capsys.readouterr().out
    assert main(["help", "environment"]) == 0
    page = capsys.readouterr().out
    for name, meaning in (
        ("API_HOSTS", "texts, with commas between [none]"), ("DATA_DIR", "a path [.penstock]"),
        ("SIM_FAULTS", "true or false [false]"), ("FILES_DIR", "a path [files in the data folder]"),
        ("EVENTS_TAKE_PRIORITY", "one of interactive, standard, batch [standard]"),
    ):  # fmt: skip
        assert re.search(rf"^  PENSTOCK_{name} +{re.escape(meaning)}$", page, re.MULTILINE), name
    assert "PENSTOCK_API_KEY" in page and "\n[up]\n" in page
    variables = [line for line in page.split("\n") if re.match("  [A-Z]", line)]
    assert all(re.fullmatch(r"  [A-Z0-9_]+ +\S.* \[[^\[\]]+\]", line) for line in variables), variables
    meanings = [line for line in page.split("\n") if re.match("      [^ ]", line)]
    settings = page[: page.index("  PENSTOCK_API_KEY ")].count("\n  PENSTOCK_")
    assert len(meanings) == settings > 100, "each setting has a meaning below it"
    for command in LazyGroup.COMMANDS:
        assert main(["help", command]) == 0
        assert "Usage: penstock" in capsys.readouterr().out


def test_flags_of_up_are_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """Other tools call these; none may go."""
    assert main(["up", "--help"]) == 0
    page = capsys.readouterr().out
    for flag in (
        "--host", "--port", "--data-dir", "--redis-url", "--engine", "--model", "--workers", "--api-processes",
        "--upstream", "--sim-step-ms", "--sim-prefill-ms", "--sim-slots", "--sim-kv-tokens", "--config", "--detach",
    ):  # fmt: skip
        assert flag in page


@pytest.mark.parametrize("command", [["--help"], ["ps"]])
def test_commands_import_only_what_they_use(command: list[str]) -> None:
    """--help imports no settings, and ps neither HTTP nor Redis nor an event loop: that is what makes them fast."""
    code = (
        "import sys; from cli.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'msgspec', 'asyncio', 'redis', 'httpx2', 'starlette', 'pydantic', 'rich'};"
        "print('imported', *sorted(sys.modules.keys() & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    imported = done.stdout.strip().rpartition("\n")[2].split()[1:]
    assert imported == ([] if command == ["--help"] else ["msgspec"])


def test_the_supervisor_loads_no_command() -> None:
    """The processes that it keeps are none of theirs."""
    heavy = {"click", "cli.options", "cli.logs", "api.settings"}
    code = f"import sys, cli.supervisor; print(*sys.modules.keys() & {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("url", ["foo", "http://[::1"])
def test_a_wrong_address_is_wrong_usage(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "ls", "--url", url]) == 2
    assert f"error: {url} is no address\n" in capsys.readouterr().err


def test_the_fetch_of_the_model_is_a_start_that_others_see_and_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may take minutes. `down` sends SIGTERM to the process that is named."""
    home = DataDir(tmp_path / ".penstock")

    def fetch(_: Path, on_progress: Callable[[str, int, int], None]) -> None:
        on_progress("downloading", 1, 2)
        assert main(["ps"]) == 0
        assert capsys.readouterr().err.endswith("\nstarting: downloading\n")
        assert main(["jobs", "ls"]) == 3
        said = f"error: penstock is starting in {home.path}\ncause: downloading\nnext:  wait for it: penstock ps\n"
        assert capsys.readouterr().err == said
        os.kill(home.running().pid, signal.SIGTERM)

    monkeypatch.setattr(weights, "fetch", fetch)
    assert main(["up", "--port", "0"]) == 130
    assert not home.run.exists()


@pytest.mark.parametrize("flags", [[], ["--now"]])
def test_down_of_an_instance_that_has_just_ended(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read as running, and then had no process any more."""
    with ExitStack() as held:
        held.enter_context(running_at("http://127.0.0.1:9", tmp_path / ".penstock"))

        def ended(*_: int) -> None:
            held.close()
            raise ProcessLookupError

        monkeypatch.setattr("os.kill", ended)
        assert main(["down", *flags]) == 0


def test_a_second_start_in_the_background_keeps_the_output_of_the_first(tmp_path: Path) -> None:
    with running_at("http://127.0.0.1:9", tmp_path / ".penstock") as home:
        output = home.logs / "up.out"
        output.write_text("ready")
        assert main(["up", "--engine", "sim", "--port", "0", "--detach"]) == 1
        assert output.read_text() == "ready"
