"""The units in docker/systemd: settings that exist, time to drain, files enough; every role as its unit starts it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_files import DOCKER, ROOT, SECTIONS, SLACK_S
from house import House, eventually, redis_process
from redis import Redis

from api.settings import ApiSettings
from api.stream.connection_guard import RESERVED_FILES
from cli.instance import UpSettings
from offline.settings import OfflineSettings
from penstock.config import load
from streaming.keys import fleet_key
from workers.settings import WorkerSettings

UNITS = sorted((DOCKER / "systemd").glob("*.service"))
DRAIN_S = {"api": ApiSettings().drain_s, "workers": WorkerSettings().drain_s, "offline": OfflineSettings().drain_s}
MODEL = "my-model"


def service(unit: Path) -> dict[str, str]:
    """Its section [Service]; the values of `Environment` one below the other."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text(encoding="utf-8"))
    return dict(parser["Service"])


def variables(found: dict[str, str]) -> dict[str, str]:
    """No unit has more than one; its other variables are in files of the machine."""
    return dict([found["Environment"].split("=", 1)]) if "Environment" in found else {}


def role_of(unit: Path) -> str:
    """The module that it runs; "" for `penstock up`."""
    found = re.search(r"-m penstock\.run (\w+)", service(unit)["ExecStart"])
    return found[1] if found else ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_a_unit_says_fits_the_settings(unit: Path) -> None:
    """Its variables are settings, it waits for the drain, and its API may open as many files as it wants."""
    found, role = service(unit), role_of(unit)
    sections = SECTIONS["worker" if role == "workers" else role] if role else {"up": UpSettings}
    load(sections, path=None, environ=variables(found))
    drain_s = DRAIN_S.get(role, 0) if role else max(DRAIN_S.values())
    assert int(found["TimeoutStopSec"]) >= drain_s + SLACK_S
    if role in ("", "api"):
        assert int(found["LimitNOFILE"]) == ApiSettings().max_connections + RESERVED_FILES
    assert (found["NoNewPrivileges"], found["ProtectSystem"]) == ("yes", "strict")


def test_a_worker_is_no_user_of_another_role() -> None:
    """A user reads the variables of its processes, and so their logins. API and offline processes share files that
    only their owner may read; the page makes each user."""
    users: dict[str, set[str]] = {}
    for unit in UNITS:
        users.setdefault(service(unit)["User"], set()).add(role_of(unit))
    assert users == {
        "penstock": {"", "api", "offline"},
        "penstock-scheduler": {"scheduler"},
        "penstock-worker": {"workers"},
    }
    (made,) = re.findall(r"^# for user in ([^;]+); do useradd", (ROOT / "docs/production.md").read_text(), re.MULTILINE)
    assert set(made.split()) == set(users)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[House]:
    """Every role, started by the command, in the folder and with the variables of its unit."""
    folders = {"/etc/penstock": tmp_path / "etc", "/var/lib": tmp_path / "lib"}
    for folder in folders.values():
        folder.mkdir()
    (folders["/etc/penstock"] / "penstock.toml").write_text(f'[models.{MODEL}]\nengine = "sim"\n')
    processes = []
    with redis_process(tmp_path, None, "--appendonly", "yes") as url:
        house = House(url, tmp_path)
        try:
            for unit in UNITS:
                if role_of(unit):
                    processes.append(_start(unit, house, {name: str(path) for name, path in folders.items()}))
            eventually(lambda: house.get("/readyz")[0] == 200, OSError)
            with Redis.from_url(url, decode_responses=True) as redis:
                eventually(lambda: len(redis.zrange(fleet_key("procs"), 0, -1)) == len(processes))
            yield house
        finally:
            for process in processes:
                process.terminate()
            codes = [process.wait(60) for process in processes]
            house.close()
    assert codes == [0] * len(processes)


def _start(unit: Path, house: House, folders: dict[str, str]) -> subprocess.Popen[bytes]:
    found = service(unit)
    text = json.dumps(found).replace("%i", MODEL).replace("/opt/penstock/bin/python", sys.executable)
    for name, folder in folders.items():
        text = text.replace(name, folder)
    found = json.loads(text)
    assert Path(found["EnvironmentFile"]).suffix == ".env"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environ |= {"PENSTOCK_REDIS_URL": house.redis_url, "PENSTOCK_API_PORT": str(house.port)}
    environ |= variables(found)
    with (house.folder / f"{unit.stem}.log").open("wb") as log:
        words = shlex.split(found["ExecStart"])
        return subprocess.Popen(words, cwd=found["WorkingDirectory"], env=environ, stdout=log, stderr=log)


@pytest.mark.slow
def test_the_roles_answer_a_chat_and_end_well(started: House) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    status, _, answer = started.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3
