"""Settings: file, variables, flags, in that order; every mistake names the key, what was expected and the nearest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.settings import ApiSettings, KeySettings
from cli.settings import UpSettings
from offline.settings import OfflineSettings
from scheduler.settings import KubernetesSettings, SchedulerSettings
from streaming.config import Config, ConfigError, load
from streaming.settings import (
    BatchSettings,
    EventSettings,
    FilesSettings,
    ModelSettings,
    WebhookSettings,
    WireSettings,
)
from telemetry.settings import TelemetrySettings
from workers.settings import LlamacppSettings, SimSettings, TrtllmSettings, WorkerSettings

KINDS = {"api": ApiSettings, "redis": WireSettings, "models": ModelSettings, "keys": KeySettings}


def written(folder: Path, text: str) -> Path:
    path = folder / "penstock.toml"
    path.write_text(text)
    return path


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    """Each source overrides only what it names."""
    path = written(tmp_path, '[api]\nport = 1111\nhost = "127.0.0.2"\nwait_s = 5\n')
    environ = {"PENSTOCK_PORT": "2222", "PENSTOCK_API_HOST": "127.0.0.3"}
    config = load(KINDS, path=path, environ=environ, flags={("api", "host"): "127.0.0.4", ("api", "port"): None})
    api = config.section("api", ApiSettings)
    assert (api.host, api.port, api.wait_s) == ("127.0.0.4", 2222, 5)


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("[api]\nprot = 1\n", {}, ("api.prot", "'port'")),
        ("[apy]\nport = 1\n", {}, ("apy", "'api'")),
        ("[api]\nport = 'x'\n", {}, ("api.port", "a whole number")),
        ("[api]\nport = 70000\n", {}, ("api.port", "65535")),
        ("api = 3\n", {}, ("api", "expected a table")),
        ("[models.m]\nengine = 'gpt'\n", {}, ("models.m.engine", "llamacpp")),
        ("[models.m]\n", {}, ("models.m", "engine")),
        ("[models.m]\nengine = 'sim'\nmin_workers = 2\nmax_workers = 1\n", {}, ("models.m", "less than")),
        ("[keys.k]\nsha256 = 'plain'\ntenant = 't'\n", {}, ("keys.k.sha256",)),
        ("[api", {}, ("cannot be read",)),
        ("", {"PENSTOCK_PROT": "1"}, ("PENSTOCK_PROT", "PENSTOCK_PORT")),
        ("", {"PENSTOCK_API_KEEPALIVE_S": "1"}, ("PENSTOCK_API_KEEPALIVE_S", "PENSTOCK_API_KEEP_ALIVE_S")),
        ("", {"PENSTOCK_REDIS_PARTITIONS": "many"}, ("redis.partitions", "a whole number")),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, environ: dict[str, str], words: tuple[str, ...]) -> None:
    """The key, what was expected, the nearest known key."""
    with pytest.raises(ConfigError) as error:
        load(KINDS, path=written(tmp_path, text), environ=environ)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_sections_of_other_processes_are_left_to_them(tmp_path: Path) -> None:
    """A role reads its own sections and accepts that there are others."""
    path = written(tmp_path, "[sim]\nstep_ms = 1\n[scheduler]\ntick_s = 2\n")
    load(KINDS, path=path, environ={"PENSTOCK_SIM_STEP_MS": "3"})


def test_merged_settings_reach_a_child_process_and_nobody_else(tmp_path: Path) -> None:
    """Saved settings read back the same, and only their owner may read them: they may hold a password."""
    config = load(KINDS, environ={"PENSTOCK_REDIS_URL": "redis://:secret@127.0.0.1/0"})
    config.save(tmp_path / "settings.json")
    assert Config.saved(tmp_path / "settings.json").section("redis", WireSettings).url.startswith("redis://:secret")
    assert (tmp_path / "settings.json").stat().st_mode & 0o077 == 0


def test_every_setting_is_documented() -> None:
    """docs/configuration.md has a section per section and a row per key, and no row for a key that is gone."""
    sections = {
        "up": UpSettings, "api": ApiSettings, "redis": WireSettings, "worker": WorkerSettings,
        "scheduler": SchedulerSettings, "kubernetes": KubernetesSettings, "telemetry": TelemetrySettings,
        "files": FilesSettings, "batch": BatchSettings, "offline": OfflineSettings, "models.<name>": ModelSettings,
        "keys.<name>": KeySettings, "webhooks.<name>": WebhookSettings, "events": EventSettings,
        "sim": SimSettings, "llamacpp": LlamacppSettings, "trtllm": TrtllmSettings,
    }  # fmt: skip
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented = {
        part.partition("]")[0]: set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))
        for part in text.split("\n## [")[1:]
    }
    assert documented == {name: set(kind.__struct_fields__) for name, kind in sections.items()}
