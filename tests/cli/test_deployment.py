"""What `up` is to run: models, settings and command lines, out of file, variables and flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from api.settings import ApiSettings
from cli.deployment import Deployment, load_deployment
from cli.instance import DataDir
from cli.options import own_command
from cli.registry import place
from cli.up import outside_url
from penstock.config import FLAGS, Config, ConfigError
from workers.engines.llamacpp.settings import LlamacppSettings

TWO_MODELS = """
[models.fast]
engine = "sim"
min_workers = 0
max_workers = 4
[models.small]
engine = "llamacpp"
options.path = "small.gguf"
"""


def loaded(folder: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any) -> Deployment:
    if toml:
        (folder / "penstock.toml").write_text(toml)
    return load_deployment({FLAGS[name]: value for name, value in flags.items()}, environ or {}, folder)


def test_defaults(tmp_path: Path) -> None:
    """Without a word: the embedded engine, its default model, an embedded Redis."""
    deployment = loaded(tmp_path)
    assert deployment.model_names == ("smollm2-135m-instruct",)
    assert deployment.engines == "llamacpp"
    assert deployment.redis_url is None
    assert deployment.needs_weights


@pytest.mark.parametrize(
    ("flags", "environ", "name"),
    [
        ({"engine": "sim"}, {}, "sim"),
        ({"engine": "sim", "model": "toy"}, {}, "toy"),
        ({"engine": "trtllm"}, {"PENSTOCK_TRTLLM_MODEL": "/models/llama-8b/"}, "llama-8b"),
    ],
)
def test_model_name_follows_the_engine(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], name: str
) -> None:
    """The one model that is served without a [models] table."""
    deployment = loaded(tmp_path, environ=environ, **flags)
    assert deployment.model_names == (name,)
    assert not deployment.needs_weights


def test_trtllm_without_checkpoint_is_refused(tmp_path: Path) -> None:
    """There is nothing to serve, and the error names the key."""
    with pytest.raises(ConfigError, match=r"trtllm\.model"):
        loaded(tmp_path, engine="trtllm")


def test_flags_outrank_variables_outrank_the_file(tmp_path: Path) -> None:
    """The last word wins, key by key."""
    toml = "[api]\nport = 1001\nhost = '127.0.0.2'\n[sim]\nslots = 3\n"
    deployment = loaded(tmp_path, toml, {"PENSTOCK_PORT": "1002", "PENSTOCK_SIM_SLOTS": "4"}, port=1003)
    assert (deployment.api.host, deployment.api.port) == ("127.0.0.2", 1003)
    assert deployment.config.raw["sim"]["slots"] == "4"


def test_workers_flag_sets_every_model(tmp_path: Path) -> None:
    """The same number as least and most, whatever the models say; their options stay."""
    deployment = loaded(tmp_path, TWO_MODELS, workers=2)
    assert [(m.min_workers, m.most_workers) for m in deployment.models.values()] == [(2, 2), (2, 2)]
    assert deployment.models["small"].options == {"path": "small.gguf"}


def test_every_shape_has_its_worker_program(tmp_path: Path) -> None:
    """Named in its command line; with --workers each shape has that number; curves that make no sense are refused
    before anything is started."""
    model = "[models.m]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 3\n"
    toml = model + "[models.m.shapes.wide]\n{}\n[models.m.shapes.thin]\n{}\n"
    deployment = loaded(tmp_path, toml.format("upto = 4", ""))
    program = deployment.worker_program(DataDir(tmp_path), "worker-1", "m", "thin")
    assert program.shape == "thin" and program.argv[-4:] == ("--model", "m", "--shape", "thin")
    for workers in (2, 0):
        pools = loaded(tmp_path, workers=workers).models["m"].pools
        assert [(each.min_workers, each.most_workers) for each in pools.values()] == [(workers, workers)] * 2
    with pytest.raises(ConfigError, match=r"models\.m\.shapes\.thin: by the curves"):
        loaded(tmp_path, toml.format("curve = [[1, 9], [8, 9]]", "curve = [[1, 5], [8, 5]]"))


def test_no_workers_are_a_flag_and_no_setting_of_a_model(tmp_path: Path) -> None:
    """--workers 0 says what it means; a model that may never have one is a mistake, unless the flag replaces it."""
    toml = "[models.m]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 0\n"
    with pytest.raises(ConfigError, match=r"models\.m\.max_workers"):
        loaded(tmp_path, toml)
    assert [loaded(tmp_path, toml, workers=number).models["m"].most_workers for number in (0, 2)] == [0, 2]


def test_model_flag_chooses_the_default_among_several(tmp_path: Path) -> None:
    """It comes first; one that is not configured is refused with the nearest name."""
    assert loaded(tmp_path, TWO_MODELS, model="small").model_names == ("small", "fast")
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        loaded(tmp_path, TWO_MODELS, model="smal")


def test_weights_are_fetched_only_for_a_model_that_runs_on_them(tmp_path: Path) -> None:
    """Not for a model with a path of its own, nor where no worker is wanted."""
    assert not loaded(tmp_path, TWO_MODELS).needs_weights
    (tmp_path / "penstock.toml").unlink()
    assert not loaded(tmp_path, workers=0).needs_weights


def test_bad_model_name_is_refused(tmp_path: Path) -> None:
    """Names stand in keys and URLs."""
    with pytest.raises(ConfigError, match="a model name has"):
        loaded(tmp_path, engine="sim", model="a b")


def test_children_read_what_was_merged(tmp_path: Path) -> None:
    """The saved settings hold the real address, port, counters' folder and weights, for the owner alone."""
    deployment = loaded(tmp_path, "[redis]\nlease_ms = 900\n")
    home = DataDir(tmp_path / "data")
    with home.lock():
        home.prepare()
        weights = tmp_path / "w.gguf"
        deployment.save(home, redis_url="redis://:pw@127.0.0.1:9/0", port=4321, weights=weights)
        saved = Config.saved(home.settings)
    assert saved.raw["redis"] == {"lease_ms": 900, "url": "redis://:pw@127.0.0.1:9/0"}
    assert saved.raw["api"]["port"] == 4321
    assert saved.raw["telemetry"]["metrics_dir"] == str(home.metrics)
    assert saved.section("llamacpp", LlamacppSettings).path == weights
    assert saved.raw["models"]["smollm2-135m-instruct"]["engine"] == "llamacpp"


def test_command_lines_of_the_roles(tmp_path: Path) -> None:
    """Each role is a module of its own, safe from folders of the same name, under its name in `ps`."""
    deployment, home = loaded(tmp_path, engine="sim"), DataDir(tmp_path)
    api = deployment.api_program(home, 1, [7, 8])
    worker = deployment.worker_program(home, "worker-2", "sim")
    scheduler = deployment.scheduler_program(home)
    start = (sys.executable, "-P", "-m")
    settings = ("--settings", str(home.settings))
    assert api.argv == (*start, "api", *settings, "--id", "api-1", "--listen-fd", "7", "--listen-fd", "8")
    assert worker.argv == (*start, "workers", *settings, "--id", "worker-2", "--model", "sim")
    assert scheduler.argv == (*start, "scheduler", *settings, "--id", "scheduler-1")
    assert deployment.offline_program(home, 2).argv == (*start, "offline", *settings, "--id", "offline-2")
    assert api.fds == (7, 8)
    assert worker.grace_s > deployment.worker.drain_s


def test_the_command_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name if the PATH leads to this very program, else by the path from this folder."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    program = folder / "penstock"
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert own_command(".venv/bin/penstock") == ".venv/bin/penstock"
    assert own_command(str(program)) == ".venv/bin/penstock"
    monkeypatch.setenv("PATH", str(folder))
    assert own_command(str(program)) == "penstock"
    monkeypatch.setenv("PATH", f"/usr/bin:{folder}")
    monkeypatch.setattr("sys.executable", str(program))
    assert own_command("/src/cli/__main__.py") == "penstock -m cli"
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(folder)
    assert own_command("penstock") == "./penstock"
    monkeypatch.chdir("/")
    assert own_command(str(program)) == str(program.relative_to("/"))


@pytest.mark.parametrize(
    ("host", "hosts", "url"),
    [("0.0.0.0", (), "http://box:9"), ("::", ("api.example",), "http://api.example:9"),  # noqa: S104 - not listened on
     ("127.0.0.1", (), ""), ("192.0.2.1", (), "")],
)  # fmt: skip
def test_other_machines_are_told_a_name(
    monkeypatch: pytest.MonkeyPatch, host: str, hosts: tuple[str, ...], url: str
) -> None:
    """One that the server answers to; the single address it listens on is shown anyway."""
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    assert outside_url(ApiSettings(host=host, hosts=hosts), 9) == url


def test_the_place_of_a_store_shows_no_password() -> None:
    assert place("rediss://user:pw@db.example:6380/1") == "db.example:6380"
    assert place("redis+cluster://:pw@a:1,b:2") == "a:1,b:2"
    assert place("unix:///run/redis.sock") == "/run/redis.sock"
