"""What a doctor finds, and how it is told."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from cli_instance import a_state, running_at
from msgspec.structs import replace
from redis import Redis

from cli import deployment as engines
from cli import doctor as checks
from cli.deployment import load_deployment
from cli.doctor import Check, _running, examine, files, judge_redis, summary
from cli.instance import DataDir, ProcessEntry

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


def test_missing_engine_is_a_failure(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """The import is tried; what it says and how to get the engine are told."""
    monkeypatch.setitem(checks.PACKAGES, "llamacpp", ("no_such_engine", "pip install it"))
    out = told("doctor", code=1).out
    assert "No module named 'no_such_engine'" in out and "pip install it" in out


def test_the_settings_of_what_runs_are_looked_at(tmp_path: Path) -> None:
    """Flags of `up` have set them, so no file tells them."""
    flags = {("upstream", "urls"): "http://127.0.0.1:1/v1", ("up", "engine"): "upstream", ("up", "model"): "m"}
    running, home = load_deployment(flags, {}, tmp_path), DataDir(tmp_path / "data")
    home.run.mkdir(parents=True)
    running.config.save(home.settings)
    given = load_deployment({}, {}, tmp_path)
    assert [found.url for found in engines.look(_running(given, home))] == ["http://127.0.0.1:1/v1"]
    home.settings.write_text("{")
    assert _running(given, home) is given


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The check names what is in the way."""
    (tmp_path / "file").touch()
    assert checks.folder(tmp_path / "new" / "data").status == "ok"
    assert checks.folder(tmp_path / "file").status == "fail"


def test_model_files(tmp_path: Path) -> None:
    """The default model: absent is fine, damaged is not. A file of one's own: there, and of the right kind."""
    default = tmp_path / "default.gguf"
    assert checks.default_weights(default).status == "ok"
    default.write_bytes(b"GGUF")
    assert checks.default_weights(default).status == "fail"
    assert checks.own_weights("m", default).status == "ok"
    default.write_bytes(b"<html>")
    assert "not a GGUF file" in checks.own_weights("m", default).detail
    assert checks.own_weights("m", tmp_path / "missing").status == "fail"


def test_proxy_that_catches_local_requests() -> None:
    """A proxy is a warning unless this machine is exempt."""
    assert checks.proxies({"http_proxy": "http://proxy"}).status == "warn"
    assert checks.proxies({"http_proxy": "http://proxy", "no_proxy": "localhost,127.0.0.1"}).status == "ok"
    assert checks.proxies({}).status == "ok"


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


@pytest.mark.parametrize(("text", "environ", "says"), [
    ('[redis]\nurl = "redis://127.0.0.1:1/0"\n', {}, "penstock.toml, line 2"),
    ("", {"PENSTOCK_REDIS_URL": "redis://127.0.0.1:1/0"}, "variable PENSTOCK_REDIS_URL"),
])  # fmt: skip
def test_a_redis_that_is_away_is_said_to_be_set_where_it_was(
    text: str, environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "penstock.toml").write_text(text)
    deployment = load_deployment({}, environ, tmp_path)
    found = [each for each in examine(deployment, DataDir(tmp_path / "data"), None, {}) if each.name == "redis"]
    assert [(each.status, says in each.hint) for each in found] == [("fail", True)]


@pytest.mark.parametrize("text", ["", '[redis]\nurl = "redis://127.0.0.1:1/0"\n'])
def test_where_a_running_instance_got_its_redis(text: str, tmp_path: Path, told: Any) -> None:
    """From the file, or from a flag of `up` that nobody knows any more."""
    (tmp_path / "penstock.toml").write_text(text)
    redis_url = "redis://127.0.0.1:1/0"
    with running_at("http://127.0.0.1:1", tmp_path / "data", redis_url=redis_url) as home:
        load_deployment({}, {}, tmp_path).save(home, redis_url=redis_url, port=1, weights=None)
        (found,) = found_in(told, home, "redis")
    assert ("penstock.toml, line 2" if text else "when the instance was started") in found["hint"]
    assert "PENSTOCK_REDIS_URL" not in found["hint"]
