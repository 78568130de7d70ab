"""What `up` is to run: models, settings and command lines, out of file, variables, flags and an upstream server."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from docker_files import SECTIONS
from http_serving import QuietHandler, serving_http

from cli import deployment as engines
from cli.deployment import (
    READ_BY,
    ROLES,
    Deployment,
    is_free,
    listening,
    load_deployment,
    next_free,
    own_name,
    with_upstream,
)
from cli.embedded import Embedded
from cli.instance import DataDir, UpSettings
from cli.options import own_command
from cli.output import Exit, Problem, error_block
from penstock import process
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


UNWORKED = "[models.m]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 0\n"
SHAPED = (
    "[models.m]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 3\n"
    "[models.m.shapes.wide]\n{}\n[models.m.shapes.thin]\n{}\n"
)


def loaded(folder: Path, toml: str = "", environ: dict[str, str] | None = None, **flags: Any) -> Deployment:
    if toml:
        (folder / "penstock.toml").write_text(toml)
    return load_deployment({FLAGS[name]: value for name, value in flags.items()}, environ or {}, folder)


def test_defaults(tmp_path: Path) -> None:
    """Without a word: the embedded engine, its default model, an embedded Redis. Weights are fetched only for a model
    that runs on them: not for one with a path of its own, nor where no worker is wanted."""
    deployment = loaded(tmp_path)
    assert (deployment.model_names, deployment.engines) == (("smollm2-135m-instruct",), "llamacpp")
    assert deployment.redis_url is None and deployment.needs_weights
    assert not loaded(tmp_path, workers=0).needs_weights
    assert not loaded(tmp_path, TWO_MODELS).needs_weights


@pytest.mark.parametrize(("toml", "flags", "says"), [
    ("", {"engine": "trtllm"}, r"trtllm\.model"),
    ("", {"engine": "sim", "model": "a b"}, "a model name has"),
    (TWO_MODELS, {"model": "smal"}, "did you mean 'small'"),
    (UNWORKED, {}, r"models\.m\.max_workers"),
    (SHAPED.format("curve = [[1, 9], [8, 9]]", "curve = [[1, 5], [8, 5]]"), {},
     r"models\.m\.shapes\.thin: by the curves"),
], ids=["no checkpoint", "a name", "no such model", "never a worker", "curves"])  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_is_started(
    tmp_path: Path, toml: str, flags: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, toml, **flags)


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
    assert deployment.model_names == (name,) and not deployment.needs_weights


def test_every_shape_has_its_worker_program(tmp_path: Path) -> None:
    """Named in its command line; with --workers each shape has that number."""
    deployment = loaded(tmp_path, SHAPED.format("upto = 4", ""))
    program = deployment.worker_program(DataDir(tmp_path), "worker-1", "m", "thin")
    assert program.shape == "thin" and program.argv[-4:] == ("--model", "m", "--shape", "thin")
    for workers in (2, 0):
        pools = loaded(tmp_path, workers=workers).models["m"].pools
        assert [(each.min_workers, each.most_workers) for each in pools.values()] == [(workers, workers)] * 2


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
    others = {each.id: each for each in deployment.programs(home, [7, 8])}
    api, worker = others["api-1"], deployment.worker_program(home, "worker-2", "sim")

    def begin(package: str, role: str, name: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", package, "--settings", str(home.settings_of(role)), "--id", name)

    assert api.argv == (*begin("api", "api", "api-1"), "--listen-fd", "7", "--listen-fd", "8")
    assert worker.argv == (*begin("workers", "worker", "worker-2"), "--model", "sim")
    assert others["scheduler-1"].argv == begin("scheduler", "scheduler", "scheduler-1")
    assert others["offline-1"].argv == begin("offline", "offline", "offline-1") and len(others) == 3
    assert api.fds == (7, 8) and worker.grace_s > deployment.worker.drain_s


def test_each_process_gets_the_settings_that_it_reads(tmp_path: Path) -> None:
    """And those alone: a worker has neither the hashes of keys nor the secrets of webhooks."""
    assert set(ROLES) == set(SECTIONS)
    for role, kinds in SECTIONS.items():
        read = {name: kind for name, (kind, roles) in READ_BY.items() if role in roles}
        assert read == {"up": UpSettings, **kinds}, role
    secret = "whsec_" + "a" * 32
    deployment = loaded(
        tmp_path,
        f"""
        [keys.mine]
        sha256 = "{"b" * 64}"
        tenant = "mine"
        [webhooks.hook]
        url = "https://hook.example"
        secret = "{secret}"
        tenant = "mine"
    """,
    )
    home = DataDir(tmp_path / "data")
    with home.lock():
        home.prepare()
        deployment.save(home, redis_url="redis://:pw@127.0.0.1:9/0", port=4321, weights=None)
        for role in ROLES:
            path = home.settings_of(role)
            text = path.read_text()
            assert ("b" * 64 in text, secret in text) == (role == "api", role in ("api", "offline")), role
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert Config.saved(path).raw["redis"]["url"] == "redis://:pw@127.0.0.1:9/0"


def test_each_process_gets_the_variables_that_it_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from its file; keys of servers are for the workers that ask servers, and Redis gets none at all."""
    given = {"PENSTOCK_API_KEY": "k", "PENSTOCK_REDIS_PASSWORD": "p", "SERVERS_KEY": "s", "HTTPS_PROXY": "x"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    rows = """
        [models.far]
        engine = "upstream"
        options = { urls = ["http://127.0.0.1:1/v1"], key_env = "SERVERS_KEY" }
        [models.near]
        engine = "sim"
    """
    deployment, home = loaded(tmp_path, rows), DataDir(tmp_path)
    programs = {each.role: each for each in deployment.programs(home, [])}
    programs |= {model: deployment.worker_program(home, "worker-1", model) for model in ("far", "near")}
    found = {role: given.keys() & program.env.keys() for role, program in programs.items()}
    common = {"HTTPS_PROXY"}
    roles = ("api", "scheduler", "offline", "near")
    assert found == {**dict.fromkeys(roles, common), "far": {"HTTPS_PROXY", "SERVERS_KEY"}}
    redis = Embedded(Path("server"), tmp_path, tmp_path / "socket", "password", 1).program(tmp_path / "log")
    assert not given.keys() & redis.env.keys() and redis.env["PATH"] == os.environ["PATH"]


def test_the_command_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name if the PATH leads to this very program, else by the path from this folder."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "penstock").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [".venv/bin/penstock"])
    for path, name in (("/usr/bin", ".venv/bin/penstock"), (f"/usr/bin:{folder}", "penstock")):
        monkeypatch.setenv("PATH", path)
        assert own_command() == name


class Models(QuietHandler):
    """The list of models of a server that takes one key."""

    names: tuple[str, ...] = ()
    key = ""
    loading = 0
    """How often it says that it loads its model."""

    def do_GET(self) -> None:  # noqa: N802
        if Models.loading:
            Models.loading -= 1
            self.send(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
            return
        known = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        names = {"data": [{"id": name} for name in self.names]}
        self.send(200 if known else 401, names if known else {"error": "no"})


@pytest.fixture
def server() -> Iterator[str]:
    """Its address; tests set what `Models` has."""
    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Models)) as found:
        yield f"http://127.0.0.1:{found.server_port}/v1"


def of(url: str, **flags: Any) -> dict[str, Any]:
    return {"upstream": url, "engine": None, "model": None, **flags}


def test_the_only_model_is_served(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's name for it, and by ours if one is given; then nobody asks the server."""
    monkeypatch.setattr(Models, "names", ("meta-llama/Llama-3.1-8B",))
    served = with_upstream(of(server), {})
    assert (served["engine"], served["model"]) == ("upstream", "meta-llama/Llama-3.1-8B")
    assert with_upstream(of("http://127.0.0.1:1/v1", model="mine"), {})["model"] == "mine"
    assert with_upstream(of("http://127.0.0.1:1/v1"), {"PENSTOCK_MODEL": "mine"})["model"] == "mine"


def test_a_server_that_loads_its_model_is_waited_for(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no longer than allowed."""
    monkeypatch.setattr(Models, "names", ("m",))
    monkeypatch.setattr(Models, "loading", 2)
    monkeypatch.setattr(engines, "RETRY_DELAY_S", 0.0)
    assert with_upstream(of(server), {})["model"] == "m" and Models.loading == 0
    assert "HTTP 503: Loading model" in capsys.readouterr().err
    monkeypatch.setattr(Models, "loading", 9)
    monkeypatch.setattr(engines, "START_TIMEOUT_S", 0.0)
    with pytest.raises(Problem, match="Loading model") as told:
        with_upstream(of(server), {})
    assert told.value.exit_code == Exit.UNREACHABLE


def test_a_key_comes_from_a_variable(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the error says where its name belongs."""
    monkeypatch.setattr(Models, "names", ("a",))
    monkeypatch.setattr(Models, "key", "sk-1")
    with pytest.raises(Problem, match="needs an API key") as told:
        with_upstream(of(server), {})
    assert "PENSTOCK_UPSTREAM_KEY_ENV" in told.value.next_step
    monkeypatch.setenv("THE_KEY", "sk-1")
    assert with_upstream(of(server), {"PENSTOCK_UPSTREAM_KEY_ENV": "THE_KEY"})["model"] == "a"


def test_a_server_that_is_away_is_named() -> None:
    with pytest.raises(Problem, match=r"http://127\.0\.0\.1:1/v1 cannot be used") as told:
        with_upstream(of("http://127.0.0.1:1/v1"), {})
    assert told.value.exit_code == Exit.UNREACHABLE


def test_a_server_that_lacks_an_adapter_is_named(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = f"[models.m]\nengine = 'upstream'\nadapters = {{ sql = 'sql-lora' }}\noptions.urls = ['{server}']\n"
    deployment, found = loaded(tmp_path, toml), list[bool]()
    for names in (("m",), ("m", "sql-lora")):
        monkeypatch.setattr(Models, "names", names)
        [(_, _, facts, problem)] = engines.look(deployment)
        found.append(facts is None and "sql-lora" in problem)
    assert found == [True, False]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("/models/SmolLM2-135M-Instruct.F16.gguf", "SmolLM2-135M-Instruct.F16"),
        ("llama3.1:8b", "llama3.1:8b"),
        ("org/model", "org/model"),
        ("a model", "a-model"),
        ("/", "upstream"),
        ("", "upstream"),
        ("x" * 500, "x" * 128),
    ],
)
def test_a_name_of_a_server_becomes_one_of_ours(name: str, ours: str) -> None:
    assert own_name(name) == ours


# --- the sockets of the API ------------------------------------------------------------------------------------------


def test_taken_port_is_told_with_a_way_out() -> None:
    """The next free port is proposed, in at most four lines."""
    with listening("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with pytest.raises(Problem, match=f"port {port} is taken") as caught, listening("127.0.0.1", port):
            pass
        free = next_free("127.0.0.1", port + 1)
    problem = caught.value
    assert problem.exit_code == 1
    assert len(error_block(problem)) <= 4
    assert problem.next_step == f"penstock up --port {free}"


def test_unknown_host_is_a_problem() -> None:
    """A host that is none of this machine's is told, not thrown."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(Problem, match="cannot listen"), listening(host, 0):
            pass


def test_localhost_is_both_loopbacks() -> None:
    """On one port; if another program has that port of one of them, its name would lead to that program."""
    with listening("localhost", 0) as listeners:
        port = listeners[0].getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port)):
                pass
        assert not is_free("localhost", port) and not is_free("::1", port)
    for host in ("127.0.0.1", "::1"):
        with listening(host, 0) as (other,):
            port = other.getsockname()[1]
            with pytest.raises(Problem, match=f"port {port} is taken"), listening("localhost", port):
                pass


def test_a_machine_may_lack_one_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("::1", "127.0.0.1"):
        # An address of no interface stands for the missing one.
        monkeypatch.setattr(process, "LOCALHOST", tuple(
            {"::1": "2001:db8::1", "127.0.0.1": "192.0.2.1"}[host] if host == missing else host
            for host in ("127.0.0.1", "::1")
        ))  # fmt: skip
        with listening("localhost", 0) as (listener,), socket.create_connection(listener.getsockname()[:2]):
            pass
    monkeypatch.setattr(process, "LOCALHOST", ("192.0.2.1", "2001:db8::1"))
    with pytest.raises(Problem, match="cannot listen"), listening("localhost", 0):
        pass
