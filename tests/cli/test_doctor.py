"""What a doctor finds, and how it is told."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from cli_instance import a_state, running_at
from msgspec.structs import replace
from redis import Redis
from trtllm_package import write

from cli import deployment as engines
from cli import doctor as checks
from cli.__main__ import main
from cli.deployment import load_deployment
from cli.doctor import Check, check_records, files, judge_redis, summary
from cli.instance import DataDir, ProcessEntry
from telemetry.records.reader import create
from telemetry.records.schema import ENCODER, RecordSettings, SampleRecord

pytestmark = pytest.mark.slow

SOUND = {
    "server": "valkey", "version": "9.1.2", "redis_version": "7.2.4", "appendonly": "yes", "appendfsync": "everysec",
    "maxmemory-policy": "noeviction", "maxmemory": "1000000", "used_memory": "700000", "maxclients": "10000",
    "connected_clients": "7000", "replicas": "0", "min-replicas-to-write": "0", "offset_ms": "3",
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without settings, a port that is free, no proxy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_PORT", "0")
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.mark.parametrize(("fact", "value", "name", "status"), [
    ("redis_version", "6.2.14", "redis redis_version", "fail"),
    ("maxmemory-policy", "allkeys-lru", "redis maxmemory-policy", "fail"),
    ("maxmemory", "0", "redis maxmemory", "warn"),
    ("appendonly", "no", "redis appendonly", "fail"),
    ("appendfsync", "no", "redis appendfsync", "fail"),
    ("offset_ms", "-5000", "clock", "warn"),
    ("connected_clients", "8000", "redis maxclients", "warn"),
    ("used_memory", "800000", "redis maxmemory", "warn"),
])  # fmt: skip
def test_each_finding_has_its_remedy(fact: str, value: str, name: str, status: str) -> None:
    """One wrong fact, one finding, one way to mend it; none of a server that keeps what it is given."""
    assert list(judge_redis("D1", SOUND)) == []
    (found,) = judge_redis("D1", SOUND | {fact: value})
    assert (found.name, found.status) == (name, status)
    assert found.hint


def test_passing_checks_are_shown_only_on_request(told: Any) -> None:
    """The summary comes last; as JSON, one object has all."""
    assert told("doctor").out.strip().split("\n")[-1] in ("Ready.", "1 warning.")
    assert "ok    python" in told("doctor -v").out
    report = json.loads(told("doctor --json").out)
    assert report["ok"] is True
    assert all(set(check) == {"name", "status", "detail", "hint"} for check in report["checks"])
    fail, warn = Check("a", "fail", ""), Check("b", "warn", "")
    assert (summary([fail, fail, warn]), summary([])) == ("2 things to fix, 1 warning.", "Ready.")


def test_bad_setting_is_a_finding(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """A variable nobody knows is named with the nearest one; that is exit code 1, not 2."""
    monkeypatch.setenv("PENSTOCK_PROT", "1")
    out = told("doctor", code=1).out
    assert "PENSTOCK_PROT" in out and "PENSTOCK_PORT" in out and out.endswith("1 thing to fix.\n")


def found_in(told: Any, home: DataDir, name: str, code: int = 1) -> list[dict[str, str]]:
    """What `penstock doctor` says of one thing."""
    report = json.loads(told("doctor --json --data-dir", str(home.path), code=code).out)
    return [check for check in report["checks"] if check["name"] == name]


def test_a_worker_that_does_not_start_is_a_failure(redis_url: str, tmp_path: Path, told: Any) -> None:
    """With the reason, while the running instance tries again and again; no more once it is ready."""
    cause = "the engine does not start: RuntimeError: no weights in /x"
    worker = ProcessEntry(
        role="worker", id="worker-1", pid=None, state="starting", since=1.0, failed_starts=4, cause=cause
    )
    state = {"redis_url": redis_url, "processes": (worker,)}
    with running_at("http://127.0.0.1:1", tmp_path / "data", **state) as home:
        (found,) = found_in(told, home, "process")
        assert found["status"] == "fail" and str(home.log("worker-1")) in found["hint"]
        assert found["detail"] == "worker-1 does not start: RuntimeError: no weights in /x (4 times in a row)"
        ready = replace(worker, failed_starts=0, state="ready")
        home.write(a_state(home, **state | {"processes": (ready,)}))
        told("doctor --data-dir", str(home.path))


def test_redis_that_does_not_answer(told: Any) -> None:
    """The address is named, without its password."""
    out = told("doctor --redis-url redis://:secret@127.0.0.1:1/0", code=1).out
    assert "fail  redis: 127.0.0.1:1" in out and "secret" not in out


def test_redis_that_runs_is_judged(redis_url: str, told: Any) -> None:
    """The test server's append-only file is good enough for D1; without one, what to do is said."""
    told("doctor --redis-url", redis_url)
    with Redis.from_url(redis_url) as client:
        client.config_set("appendonly", "no")
        try:
            assert "CONFIG SET appendonly yes" in told("doctor --redis-url", redis_url, code=1).out
        finally:
            client.config_set("appendonly", "yes")


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The check names what is in the way."""
    (tmp_path / "file").touch()
    assert [next(checks.folder(tmp_path / name)).status for name in ("new/data", "file")] == ["ok", "fail"]


def test_model_files(tmp_path: Path) -> None:
    """The default model: absent is fine, damaged is not. A file of one's own: there, and of the right kind."""
    default = tmp_path / "default.gguf"
    assert checks.default_weights(default).status == "ok"
    default.write_bytes(b"<html>")
    assert checks.default_weights(default).status == "fail"
    for name in ("default.gguf", "missing"):
        own = load_deployment({}, {"PENSTOCK_LLAMACPP_PATH": str(tmp_path / name)}, tmp_path)
        assert [each.status for each in checks.weights(own, tmp_path)] == ["fail"]


def test_open_files_for_every_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit counts: API processes raise the other one."""
    deployment = load_deployment({}, {}, tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524_288))
    assert files(deployment).status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    found = files(deployment)
    assert (found.status, found.hint) == ("warn", "ulimit -Hn 20768, or a lower api.max_connections")
    assert "takes 3328 connections, not 20000" in found.detail
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 20_000))
    assert files(deployment).status == "ok", "19,232 of 20,000 are enough"


# --- records ---------------------------------------------------------------------------------------------------------


def records_in(folder: Path, *, running: bool = True, enabled: bool = True) -> Check:
    (check,) = check_records(RecordSettings(enabled=enabled), folder, running=running)
    return check


def sampled(folder: Path, dropped: int, age_s: float = 0.0) -> None:
    at = time.time() - age_s
    path, file = create(folder, at, "api", 1)
    sample = SampleRecord(at_us=int(at * 1e6), role="api", process="api-1", pid=1, cpu_s=1.0, dropped=dropped)
    os.write(file, ENCODER.encode(sample) + b"\n")
    os.close(file)
    os.utime(path, (at, at))


@pytest.mark.parametrize(("samples", "running", "status"), [
    ([(0, 0)], True, "ok"), ([], False, "ok"), ([(3, 0)], True, "warn"), ([(3, 4000), (0, 0)], True, "ok"),
    ([(0, 120)], True, "warn"), ([(0, 120)], False, "ok"),
], ids=["well", "nothing yet", "lost", "lost long ago", "silent", "stopped"])  # fmt: skip
def test_records_are_judged(samples: list[tuple[int, int]], running: bool, status: str, tmp_path: Path) -> None:
    """`samples`: records that were lost, and how many seconds ago that was written."""
    for dropped, age_s in samples:
        sampled(tmp_path, dropped, age_s)
    assert records_in(tmp_path, running=running).status == status
    assert records_in(tmp_path, enabled=False).status == "ok"


# --- plug-in engines, as `up` and `doctor` check them ----------------------------------------------------------------


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "engine"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, whose modules and those of the example can be imported by processes."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (EXAMPLE, tmp_path))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(folder: Path, engine: str, options: str = "") -> None:
    (folder / "penstock.toml").write_text(f'[models.m]\nengine = "{engine}"\n{options}\n')


def checked(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What `penstock doctor` finds, by name."""
    main(["doctor", "--json"])
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}


def test_doctor_builds_a_plug_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(folder, "echo_engine:Echo", "options.slots = 3")
    found = checked(capsys)["engine echo_engine:Echo"]
    assert (found["status"], found["detail"]) == ("ok", "m: can be built")
    configure(folder, "echo_engine:Echo", "options.slots = 'x'")
    found = checked(capsys)["engine echo_engine:Echo"]
    assert found["status"] == "fail" and found["detail"].startswith("models.m.options.slots: expected a whole number")


@pytest.mark.parametrize(("engine", "problem"), [
    ("no_such:Echo", "no_such:Echo cannot be imported: ModuleNotFoundError"),
    ("killed:Echo", "the process that built the engine was killed by SIGKILL"),
])  # fmt: skip
def test_up_starts_nothing_without_its_engine(engine: str, problem: str, folder: Path, told: Any) -> None:
    """Whatever the plug-in does to its process; no server and no process is left, or was there."""
    (folder / "killed.py").write_text(KILLED)
    configure(folder, engine)
    errors = told("up --port 0", code=2).err
    assert f"error: models.m.engine: {problem}" in errors
    assert "cause: set in penstock.toml" in errors and "next:  " in errors
    assert not list((folder / ".penstock").glob("logs/redis-1.log"))


def test_a_plug_in_that_does_not_come_back_is_not_waited_for(
    folder: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CHECK_TIMEOUT_S", 0.5)
    (folder / "hangs.py").write_text("import time\ntime.sleep(600)")
    configure(folder, "hangs:Echo")
    assert "error: models.m.engine: the engine was not built within" in told("up --port 0", code=2).err


@pytest.mark.parametrize(("engine", "option", "error"), [
    ("sim", "options.slotz = 3", "options.slotz: no such setting"),
    ("sim", "shapes.a.upto = 1\nshapes.b.options.slotz = 3", "shapes.b.options.slotz: no such setting"),
])  # fmt: skip
def test_options_of_a_built_in_engine_are_checked_before_the_start(
    engine: str, option: str, error: str, folder: Path, told: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server is started for them and no model is fetched; the doctor sees them, too."""
    configure(folder, engine, option)
    errors = told("up --port 0", code=2).err
    assert f"error: models.m.{error}" in errors and "cause: set in penstock.toml\n" in errors
    assert not (folder / ".penstock").exists()
    assert checked(capsys)["settings"]["detail"].startswith(f"models.m.{error}")


def test_a_flag_at_fault_is_named(folder: Path, told: Any) -> None:
    """Where no model is configured, the setting is that of `up`."""
    errors = told("up --port 0 --engine no_such:Echo", code=2).err
    assert "error: up.engine: no_such:Echo cannot be imported" in errors and "cause: set by the flag --engine" in errors


# --- one engine's package --------------------------------------------------------------------------------------------


def test_doctor_checks_a_tensorrt_llm(tmp_path: Path, told: Any) -> None:
    """A checkout or its package, with the settings of this folder; it fails only for what they need."""
    write(tmp_path / "checkout", "1.4.0rc1")
    Path("penstock.toml").write_text('[models.toy]\nengine = "trtllm"\noptions = { model = "/m", max_seq_len = 64 }\n')
    out = told(f"doctor trtllm --source {tmp_path / 'checkout'}").out
    assert out.startswith("State") and "0 needed" in out.splitlines()[-1]
    with Path("penstock.toml").open("a") as file:
        file.write('[models.two]\nengine = "trtllm"\noptions = { model = "/m", extra = { sampler_type = "auto" } }\n')
    report = json.loads(told(f"doctor trtllm --json --source {tmp_path / 'checkout/tensorrt_llm'}", code=1).out)
    (missing,) = [line for line in report["checks"] if line["state"] == "fails" and line["needed"]]
    assert (report["ok"], missing["name"]) == (False, "TorchLlmArgs.sampler_type")
    assert missing["where"].startswith("llmapi/llm_args.py:")


@pytest.mark.parametrize("flags", ["trtllm", "--installed", "trtllm --installed --source ."])
def test_which_package_is_meant_must_be_said(flags: str, told: Any) -> None:
    told(f"doctor {flags}", code=2)
