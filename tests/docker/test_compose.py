"""The compose deployment: its parts know each other, its settings are settings, and its roles run as it says."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import docker_files
import pytest
from batching import answers_are_right, begin, content, ended, line
from docker_files import (
    COMPOSE,
    ONES,
    ROOT,
    VERSION,
    document,
    images,
    is_pinned,
    logins,
    new_key,
    pin,
    settings_only,
    versions,
)
from house import eventually, free_port, redis_process
from openai import OpenAI
from redis import Redis

from api.auth.keys import Keyring, check_exposure
from api.settings import ApiSettings, KeySettings
from penstock.config import Config
from streaming.fleet.settings import ModelSettings
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import check_level

pytestmark = pytest.mark.slow

FILE: dict[str, Any] = document(COMPOSE / "compose.yaml")
SERVICES: dict[str, Any] = FILE["services"]
ROLES = {"api": "api", "worker": "worker", "scheduler": "scheduler", "offline": "offline"}
"""Services of ours, and the role of each."""

IMAGES = images()


def image_of(service: str) -> str:
    return str(SERVICES[service]["image"].partition(":")[0])


def environ_of(service: str) -> dict[str, str]:
    """The variables that are ours: the image's, and what compose lays over them. Its login is not in the tree."""
    return settings_only({**IMAGES[image_of(service)][1].environ(), **SERVICES[service]["environment"]})


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, str]:
    """penstock.toml as `docker/new-key` makes it, and the key it prints."""
    return new_key(COMPOSE, tmp_path / "compose")


def config_of(service: str, settings: Path) -> Config:
    return docker_files.config_of(ROLES[service], settings, environ_of(service))


def mounted(service: str) -> dict[str, str]:
    """Its settings files: what is read at each name in /etc/penstock."""
    found = {str(Path(each["target"])): each["source"] for each in SERVICES[service]["volumes"]}
    return {Path(target).name: source for target, source in found.items() if target.startswith("/etc/penstock/")}


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ROLES)
def test_its_settings_are_settings(service: str, made: tuple[Path, str]) -> None:
    """File and variables together are what the role takes, and all roles find the same Redis and model."""
    config = config_of(service, made[0])
    url = config.section("redis", RedisSettings).url
    assert re.fullmatch(rf"redis://{service}:[0-9a-f]{{48}}@redis:6379/0", url)
    assert "env_file" not in SERVICES[service], "whoever may inspect a container reads its variables"
    (model,) = config.table("models", ModelSettings)
    assert f"--model {model}" == " ".join(SERVICES["worker"]["command"])


def test_the_key_opens_the_door(made: tuple[Path, str]) -> None:
    """What is printed is a key of the file; the door may stand open to other machines; no key is in the tree."""
    settings, key = made
    config = config_of("api", settings)
    keyring = Keyring(config.table("keys", KeySettings))
    check_exposure(config.section("api", ApiSettings).host, keyring)
    assert keyring.caller(f"Bearer {key}").tenant == "first"
    assert "[keys" not in settings.read_text() and key not in (settings.parent / "secrets" / "api.toml").read_text()


def test_clients_behind_the_published_port_are_many(made: tuple[Path, str]) -> None:
    """All have the address of its gateway, which is no proxy: it passes on what a client says of its address."""
    api = config_of("api", made[0]).section("api", ApiSettings)
    assert 1024 <= api.max_connections_per_client < api.max_connections and not api.trusted_proxies


def test_each_role_gets_the_settings_that_it_reads(made: tuple[Path, str]) -> None:
    """Keys are the API's, webhooks its and those of the offline processes; no worker could read them."""
    for service, role in ROLES.items():
        files = mounted(service)
        assert files == {"penstock.toml": "./penstock.toml", f"penstock.{role}.toml": f"./secrets/{role}.toml"}
        assert all((made[0].parent / source).stat().st_mode & 0o777 == 0o644 for source in files.values())
        assert bool(config_of(service, made[0]).raw.get("keys")) == (role == "api")


# --- containers ------------------------------------------------------------------------------------------------------


def test_every_image_is_pinned() -> None:
    """Ours at this version; others by a digest that must be given, whose name stands in docker/images."""
    ours = {name: service["image"] for name, service in SERVICES.items() if "build" in service}
    assert set(ours) == set(ROLES)
    assert all(image.rpartition(":")[2] == VERSION and is_pinned(image) for image in ours.values())
    others = [service["image"] for name, service in SERVICES.items() if name not in ours]
    others += {SERVICES[name]["build"]["args"]["PYTHON"] for name in ours}
    for image in others:
        required = re.fullmatch(r"\$\{(\w+):\?run sh docker/pin-images docker/compose first\}", image)
        assert required and required[1] in versions(), image


def test_digests_are_found_where_the_images_come_from(made: tuple[Path, str], tmp_path: Path) -> None:
    """One for each image that compose asks for. An image that cannot be had, or has none, is named, and nothing is
    written that half fits."""
    folder = made[0].parent
    refused = pin(tmp_path, str(folder), BROKEN="redis:7.4.6")
    assert refused.returncode == 1 and "redis:7.4.6 cannot be pulled" in refused.stderr
    refused = pin(tmp_path, str(folder), LOCAL="prom/prometheus:*")
    assert refused.returncode == 1 and "has no digest" in refused.stderr and not (folder / ".env").exists()
    assert pin(tmp_path, str(folder)).returncode == 0
    found = dict(line.split("=") for line in (folder / ".env").read_text().splitlines())
    asked = set(re.findall(r"\$\{(\w+):\?", (COMPOSE / "compose.yaml").read_text(encoding="utf-8")))
    assert set(found) == asked and len(asked) == 5
    assert found == {name: f"{versions()[name].rpartition(':')[0]}@sha256:{ONES}" for name in asked}


# --- who reaches whom ------------------------------------------------------------------------------------------------


def test_networks_are_apart() -> None:
    """Only the roles reach Redis, and Redis and workers reach nothing else; clients reach the API alone."""
    on = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert set().union(*on.values()) == set(FILE["networks"])
    members = {network: {name for name, mine in on.items() if network in mine} for network in FILE["networks"]}
    assert members["back"] == {"redis", *ROLES} and members["front"] == {"api", "offline"}
    assert members["telemetry"] == {"collector", "prometheus", *ROLES}
    assert members["monitoring"] == {"collector", "prometheus", "grafana"}
    internal = {name for name, network in FILE["networks"].items() if network and network["internal"]}
    assert internal == {"back", "telemetry"}
    assert {name for name, mine in on.items() if mine <= internal} == {"redis", "worker", "scheduler"}
    for name, service in SERVICES.items():
        assert not service.get("ports") or on[name] - internal, "no port of an internal network is published"


def test_redis_lets_nobody_in_without_a_password(made: tuple[Path, str]) -> None:
    """Its users are those of the file made beside the settings, which has hashes only and is read by another user; the
    passwords are for their owner alone."""
    secrets = made[0].parent / "secrets"
    command = SERVICES["redis"]["command"]
    target = command[command.index("--aclfile") + 1]
    (mount,) = [each for each in SERVICES["redis"]["volumes"] if isinstance(each, dict)]
    assert (mount["source"], mount["target"], mount["read_only"]) == ("./secrets/users.acl", target, True)
    users = (secrets / "users.acl").read_text()
    assert "requirepass" not in command and "nopass" not in users.replace("user probe reset on nopass ", "")
    on = {line.split()[1] for line in users.splitlines() if " on " in line}
    assert on == {"probe", *ROLES}
    found = logins(made[0].parent)
    passwords = {role: url.split(":")[2].split("@")[0] for role, url in found.items()}
    assert set(found) == set(ROLES) and len(set(passwords.values())) == len(ROLES)
    for role, password in passwords.items():
        assert password not in users and f"user {role} reset on #{sha256(password.encode()).hexdigest()} " in users
    # Read in the containers by other users than here, where nobody else enters the folder.
    assert {stat.S_IMODE(each.stat().st_mode) for each in secrets.iterdir()} == {0o644}
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    shown = json.dumps(FILE)
    assert "redis://" not in shown and "requirepass" not in shown


def test_monitoring_has_no_door_without_a_key(made: tuple[Path, str]) -> None:
    """Every user of the machine, and every page in a browser on it, reaches a published port: there are the API's and
    Grafana's, which asks for a login made for this deployment alone and serves no rebound name."""
    published = {name: service["ports"] for name, service in SERVICES.items() if service.get("ports")}
    assert published == {"api": ["127.0.0.1:8000:8000"], "grafana": ["127.0.0.1:3000:3000"]}
    grafana = SERVICES["grafana"]
    environ = grafana["environment"]
    assert environ["GF_AUTH_ANONYMOUS_ENABLED"] == environ["GF_USERS_ALLOW_SIGN_UP"] == "false"
    assert (environ["GF_SERVER_DOMAIN"], environ["GF_SERVER_ENFORCE_DOMAIN"]) == ("localhost", "true")
    mounted_at = environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    (source,) = [each.split(":")[0] for each in grafana["volumes"] if each.split(":")[1] == mounted_at]
    assert re.fullmatch("[0-9a-f]{48}", (made[0].parent / source).read_text().strip())
    assert not {"GF_SECURITY_ADMIN_PASSWORD", "GF_AUTH_DISABLE_LOGIN_FORM"} & set(environ), "none stands in the tree"


@pytest.mark.parametrize("service", SERVICES)
def test_each_container_may_little(service: str) -> None:
    """Nothing is written to an image, no capability is kept, none can be gained, and only this machine may knock."""
    spec = SERVICES[service]
    assert spec["read_only"] is True and spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in spec.get("ports", ()))
    assert spec["deploy"]["resources"]["limits"]["memory"], "one that grows must not take the others with it"
    assert spec["pids_limit"] <= 512
    for mount in spec.get("tmpfs", ()):
        assert {"size=64m", "noexec", "nosuid"} <= set(mount.partition(":")[2].split(","))


# --- alive -----------------------------------------------------------------------------------------------------------


async def test_redis_keeps_what_is_promised(tmp_path: Path) -> None:
    """A server with these very options lacks nothing for the level of the roles."""
    program, *options = SERVICES["redis"]["command"]
    assert program == "redis-server"
    at = options.index("--aclfile")
    with redis_process(tmp_path, None, *options[:at], *options[at + 2 :]) as url:
        assert await shortfalls(url) == []


async def shortfalls(url: str) -> list[str]:
    """What this server lacks for the level of the roles."""
    wire = RedisClient.open(RedisSettings(url=url))
    try:
        return await check_level(wire)
    finally:
        await wire.close()


@contextmanager
def guarded_redis(folder: Path, data: Path) -> Iterator[dict[str, str]]:
    """Redis as compose starts it, with the users made in `folder`; its address by role, with each role's own login. It
    is healthy by compose's own test, whose words a Python client says here."""
    program, *options = SERVICES["redis"]["command"]
    options[options.index("--aclfile") + 1] = str(folder / "secrets" / "users.acl")
    words = SERVICES["redis"]["healthcheck"]["test"][1].split()
    login = {"username": words[words.index("--user") + 1], "password": words[words.index("--pass") + 1]}
    (data / program).mkdir()
    with redis_process(data / program, None, *options, login=login) as url:
        yield {role: each.replace("redis:6379/0", url.partition("//")[2]) for role, each in logins(folder).items()}


class Container:
    """A role started by its image's entrypoint with compose's arguments, variables and settings; only addresses and the
    engine differ, for here is no other network and no weights, and a folder stands for the volume."""

    def __init__(self, service: str, settings: Path, redis_url: str, port: int) -> None:
        self.folder, self.test = settings.parent, SERVICES[service]["healthcheck"]["test"]
        for name, source in mounted(service).items():
            text = (self.folder / source).read_text()
            (self.folder / name).write_text(text.replace(logins(self.folder)[service], redis_url))
        differs = {"PENSTOCK_TELEMETRY_METRICS_HOST": "127.0.0.1"}
        differs["PENSTOCK_TELEMETRY_METRICS_PORT"] = str(free_port())
        if service == "api":
            differs |= {"PENSTOCK_API_HOST": "127.0.0.1", "PENSTOCK_API_PORT": str(port)}
        if "PENSTOCK_FILES_DIR" in environ_of(service):
            differs["PENSTOCK_FILES_DIR"] = str(self.folder / "files")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), "HOSTNAME": os.uname().nodename}  # this tree, wherever it lies
        self.environ = {**environ_of(service), **differs, **ours}
        self.environ.pop("PENSTOCK_TELEMETRY_OTLP_ENDPOINT")
        *_, shell, flag, line, zero = IMAGES[image_of(service)][1].command("ENTRYPOINT")
        words = [shell, flag, line, zero, *SERVICES[service].get("command", ())]
        self.process = subprocess.Popen(words, cwd=self.folder, env=self.environ)

    def healthy(self) -> bool:
        """As compose asks."""
        kind, *words = self.test
        assert kind == "CMD"
        return subprocess.run(words, cwd=self.folder, env=self.environ, check=False).returncode == 0


def test_the_roles_run_as_the_file_says(made: tuple[Path, str], tmp_path: Path) -> None:
    """Each becomes healthy by its own check and ends well when stopped; together they answer a batch to the key."""
    settings, key = made
    settings.write_text(settings.read_text().replace('"llamacpp"', '"sim"'))
    port, lines = free_port(), [line(number, model="smollm2-135m-instruct") for number in range(2)]
    with ExitStack() as stack:
        urls, roles = stack.enter_context(guarded_redis(settings.parent, tmp_path)), list[Container]()
        for service in ROLES:
            roles.append(Container(service, settings, urls[service], port))
            stack.callback(roles[-1].process.kill)
        with Redis.from_url(urls["api"]) as redis:
            eventually(lambda: redis.zcard(fleet_key("procs")) == len(ROLES))  # asking takes a process each time
        for each in roles:
            eventually(each.healthy)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as openai:
            done = ended(openai, begin(openai, lines))
            answers_are_right(content(openai, done.output_file_id), lines)
        for each in roles:
            each.process.terminate()
        assert [each.process.wait(30) for each in roles] == [0] * len(roles)
