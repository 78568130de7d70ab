"""Settings: file, variables, flags, in that order; every mistake names the key, what was expected and the nearest."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from api.settings import ApiSettings, KeySettings, MediaSettings, ModerationSettings, OidcSettings
from cli.instance import UpSettings
from offline.settings import OfflineSettings
from penstock.config import FLAGS, SECTIONS, Config, ConfigError, Sources, build, field_meanings, load
from penstock.content import ContentSettings
from scheduler.policy.snapshot import Shape
from scheduler.settings import KubernetesSettings, SchedulerSettings, shapes_of
from streaming.batches.file_store import BatchSettings, FilesSettings
from streaming.events import End, EventSettings, WebhookSettings
from streaming.fleet.aliases import AliasSettings
from streaming.fleet.settings import LaneTargets, LatencyTargets, ModelSettings, Resources, ShapeSettings, served_models
from streaming.jobs.settings import QuotaSettings, TenantSettings
from streaming.redis.settings import RedisSettings
from telemetry.records.schema import RecordSettings
from telemetry.settings import TelemetrySettings
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.registry import sections
from workers.engines.sim.settings import SimSettings
from workers.settings import WorkerSettings

KINDS = {"api": ApiSettings, "redis": RedisSettings, "models": ModelSettings, "keys": KeySettings,
         "webhooks": WebhookSettings}  # fmt: skip
ENGINE_KINDS = {"sim": SimSettings, "llamacpp": LlamacppSettings}


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
        ("[api]\nport = 70000\n", {}, ("api.port: must be at most 65535",)),
        ("[api]\nkeep_alive_s = 60\n", {}, ("api.keep_alive_s: must be at most 20",)),
        ("[sim]\nslots = 0\n", {}, ("sim.slots: must be at least 1",)),
        ("[llamacpp]\ntop_p = 0\n", {}, ("llamacpp.top_p: must be more than 0",)),
        ("", {"PENSTOCK_SIM_STEP_MS": "inf"}, ("sim.step_ms: must be finite",)),
        ("[models.m]\nengine = 'own'\noptions.a = [1, {b = inf}]\n", {}, ("models.m.options: must be finite",)),
        ("[llamacpp]\npath = ''\n", {}, ("llamacpp.path", "a path: it is empty")),
        ("[llamacpp]\npath = '~nobody-here/m.gguf'\n", {}, ("llamacpp.path", "no home folder for '~nobody-here")),
        ("[webhooks.w]\nevents = ['job.done']\n", {}, ("webhooks.w.events: expected a list, each one of job.com",)),
        ("port = 8001\n", {}, ("port: no such section",)),
        ("[models.m]\nengine = 'llamacpp'\npath = 'm.gguf'\n", {}, ("models.m.path: no such",)),
        ("[models.m]\nengine = 'sim'\nshapes.a.slots = 3\n", {}, ("models.m.shapes.a.slots: no such setting",)),
        ("api = 3\n", {}, ("api", "expected a table")),
        ("[models.m]\nengine = 'sim'\nmin_workers = 2\nmax_workers = 1\n", {}, ("models.m", "less than")),
        ("[keys.k]\nsha256 = 'plain'\ntenant = 't'\n", {}, ("keys.k.sha256: this is not a SHA-256", "sha256sum")),
        ("[api]\nadmin_token_sha256 = 'plain'\n", {}, ("api.admin_token_sha256: this is not", "sha256sum")),
        (
            "",
            {"PENSTOCK_API_TRUSTED_PROXIES": "10.1.0.1/16"},
            ("api.trusted_proxies: '10.1.0.1/16' is no network; write 10.1.0.0/16 or one address.",),
        ),
        ("[api", {}, ("cannot be read",)),
        ("", {"PENSTOCK_PROT": "1"}, ("PENSTOCK_PROT", "PENSTOCK_PORT")),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, environ: dict[str, str], words: tuple[str, ...]) -> None:
    """The key, what was expected, the nearest known key."""
    with pytest.raises(ConfigError) as error:
        load(KINDS | ENGINE_KINDS, path=written(tmp_path, text), environ=environ)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "plain" not in str(error.value), "what stands in the place of a hash may be the key itself"


def test_sections_of_other_processes_are_left_to_them(tmp_path: Path) -> None:
    """A role reads its own sections and accepts that there are others."""
    path = written(tmp_path, "[sim]\nstep_ms = 1\n[scheduler]\ntick_s = 2\n")
    found = load(KINDS, path=path, environ={"PENSTOCK_SIM_STEP_MS": "3", "PENSTOCK_API_PORT": "9"})
    assert found.section("api", ApiSettings).port == 9


def test_merged_settings_reach_a_child_process_and_nobody_else(tmp_path: Path) -> None:
    """Saved settings read back the same, and only their owner may read them: they may hold a password."""
    config = load(KINDS, environ={"PENSTOCK_REDIS_URL": "redis://:secret@127.0.0.1/0"})
    config.save(tmp_path / "settings.json")
    assert Config.saved(tmp_path / "settings.json").section("redis", RedisSettings).url.startswith("redis://:secret")
    assert (tmp_path / "settings.json").stat().st_mode & 0o077 == 0


DOCUMENTED: dict[str, type[msgspec.Struct]] = {
    "up": UpSettings, "api": ApiSettings, "redis": RedisSettings, "worker": WorkerSettings,
    "scheduler": SchedulerSettings, "kubernetes": KubernetesSettings, "telemetry": TelemetrySettings,
    "records": RecordSettings,
    "files": FilesSettings, "batch": BatchSettings, "offline": OfflineSettings, "models.<name>": ModelSettings,
    "aliases": AliasSettings,
    "models.<name>.targets.<lane>": LatencyTargets, "models.<name>.shapes.<shape>": ShapeSettings,
    "oidc": OidcSettings, "keys.<name>": KeySettings, "webhooks.<name>": WebhookSettings, "events": EventSettings,
    "quotas": QuotaSettings, "tenants.<name>": TenantSettings,
    "content.<name>": ContentSettings, "moderation": ModerationSettings,
    "media": MediaSettings,
    **sections(),
}  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
DEFAULTS = {
    (part.partition("]")[0], key): default
    for part in PAGE.split("\n## [")[1:]
    for key, default in re.findall(r"^\| `(\w+)` \| (.+?) \|", part, re.MULTILINE)
}
"""The second cell of each row of the page."""
IN_WORDS: dict[str, tuple[Any, ...]] = {
    "required": (msgspec.NODEFAULT,),
    "none": (None, ()),
    "empty": ("", ()),
    "by the keys": (None,),
    "unset": (None,),
    "all of them": (get_args(End),),
    "`{}`": ({}, QuotaSettings(), Resources(), LaneTargets()),
    "`[]`": ((),),
    '`["input", "output"]`': (("input", "output"),),
    "Llama Guard 3's": (ModerationSettings().categories,),
    '`["RS256", "ES256", "EdDSA"]`': (("RS256", "ES256", "EdDSA"),),
}
"""What a default that is said in words may be."""


def test_every_setting_is_documented() -> None:
    """docs/configuration.md has a section per section and a row per key, and no row for a key that is gone."""
    assert set(DEFAULTS) == {(name, key) for name, kind in DOCUMENTED.items() for key in kind.__struct_fields__}
    assert {section.partition(".")[0] for section in DOCUMENTED} == set(SECTIONS)


def test_every_default_is_as_documented() -> None:
    """People leave out what they read is right for them; a default that changes is changed on the page as well."""
    for (section, key), said in DEFAULTS.items():
        field = next(each for each in msgspec.structs.fields(DOCUMENTED[section]) if each.name == key)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if said in IN_WORDS:
            assert default in IN_WORDS[said], (section, key)
        else:
            plain = default.value if isinstance(default, Enum) else default
            assert said == f"`{str(plain).lower() if isinstance(plain, bool) else plain}`", (section, key)


# --- shapes ----------------------------------------------------------------------------------------------------------

CURVES = {"wide": [[1, 50], [32, 400], [128, 500]], "narrow": [[1, 20], [32, 300], [128, 1100]]}


def shaped(folder: Path, **shapes: str) -> dict[str, ModelSettings]:
    """A model with these shapes, as rows of TOML."""
    rows = [f"[models.m.shapes.{name}]\n{text}\n" for name, text in shapes.items()]
    model = "[models.m]\nengine = 'sim'\nmax_workers = 4\ncost_per_hour = 2\noptions.slots = 8\noptions.step_ms = 3\n"
    return load(KINDS, path=written(folder, model + "".join(rows)), environ={}).table("models", ModelSettings)


def test_what_a_shape_leaves_out_is_the_models(tmp_path: Path) -> None:
    """Bounds, cost and options; and a model without shapes is its own only pool."""
    model = shaped(tmp_path, wide="upto = 9\nmin_workers = 0\nmax_workers = 1\noptions.slots = 2", narrow="")["m"]
    wide, narrow = model.pools["wide"], model.pools["narrow"]
    assert (wide.min_workers, wide.most_workers, wide.options) == (0, 1, {"slots": 2, "step_ms": 3})
    assert (narrow.min_workers, narrow.most_workers, narrow.options) == (1, 4, {"slots": 8, "step_ms": 3})
    assert (wide.cost_per_hour, model.least_wanted, model.most_wanted) == (2, 0, 4)
    assert shapes_of("m", model) == (Shape("wide", 9), Shape("narrow"))
    alone = shaped(tmp_path)["m"]
    assert alone.pools == {"": alone} and shapes_of("m", alone) == ()


@pytest.mark.parametrize(("rows", "bounds"), [("min_workers = 0", (0, 1)), ("", (1, 1)), ("min_workers = 3", (3, 3))])
def test_a_model_may_always_have_a_worker(tmp_path: Path, rows: str, bounds: tuple[int, int]) -> None:
    """Without max_workers, at least one."""
    config = load(KINDS, path=written(tmp_path, f"[models.m]\nengine = 'sim'\n{rows}\n"), environ={})
    model = served_models(config.table("models", ModelSettings))["m"]
    assert (model.min_workers, model.most_workers) == bounds


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ("min_workers = 0\nmax_workers = 0", "models.m.max_workers"),
        ("min_workers = 0\nmax_workers = 0\nshapes.a.upto = 3\nshapes.b.cost_per_hour = 1", "models.m.max_workers"),
        ("cost_per_hour = 3\nbudget_per_hour = 2", "models.m"),
        ("cost_per_hour = 1\nbudget_per_hour = 2\nshapes.a.upto = 3\nshapes.b.cost_per_hour = 3", "models.m"),
    ],
)
def test_a_model_that_may_have_no_worker_is_refused(tmp_path: Path, rows: str, field: str) -> None:
    """Its jobs would wait for ever."""
    path = written(tmp_path, f"[models.m]\nengine = 'sim'\n{rows}\n")
    with pytest.raises(ConfigError) as error:
        config = load(KINDS, path=path, environ={})
        served_models(config.table("models", ModelSettings))
    assert error.value.key.startswith(field)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"wide": "upto = 0", "narrow": ""}, ("shapes.wide.upto", "0.0")),
        ({"wide": "", "narrow": ""}, ("shapes.wide", "upto is missing")),
        ({"wide": "upto = 3", "narrow": "upto = 4"}, ("shapes.narrow", "last shape")),
        ({"wide": "upto = 3\nmni_workers = 1", "narrow": ""}, ("shapes.wide.mni_workers", "'min_workers'")),
        ({"wide": "upto = 3\nmin_workers = 5", "narrow": ""}, ("shapes.wide", "max_workers 4 is less than")),
        ({"wide": "upto = 3\nmin_workers = 0\nmax_workers = 0", "narrow": ""}, ("shapes.wide", "wait for ever")),
        ({"wide": "curve = [[1, 2]]", "narrow": ""}, ("shapes.narrow", "curve is missing")),
        ({"wide": "curve = [[1, 2]]\nupto = 3", "narrow": "curve = [[1, 2]]"}, ("shapes.wide", "one or the other")),
        ({"wide": "curve = [[3, 2], [1, 2]]", "narrow": "curve = [[1, 2]]"}, ("shapes.wide", "rising")),
        ({"wide": "curve = [[1, 2, 3]]", "narrow": "curve = [[1, 2]]"}, ("shapes.wide.curve", "length 2")),
        ({"wide": "upto = 3"}, ("one shape alone",)),
        ({"Wide": "upto = 3", "narrow": ""}, ("small letters",)),
        (
            {"a": "upto = 3", "b": "upto = 3", "c": ""},
            ("shapes.b: upto 3 is not more than that of the shape before it",),
        ),
    ],
)
def test_shapes_that_make_no_sense_are_refused(shapes: dict[str, str], words: tuple[str, ...], tmp_path: Path) -> None:
    """The message names the shape and what to do."""
    with pytest.raises(ConfigError) as error:
        shaped(tmp_path, **shapes)
    assert all(word in str(error.value) for word in ("models.m", *words))


def test_thresholds_are_read_from_curves(tmp_path: Path) -> None:
    """Where the lines cross; a shape that is never the best is refused by its name."""
    model = shaped(tmp_path, **{name: f"curve = {curve}" for name, curve in CURVES.items()})["m"]
    wide, narrow = shapes_of("m", model)
    assert 32 < wide.upto < 128 and narrow == Shape("narrow")
    backwards = shaped(tmp_path, **{name: f"curve = {CURVES[name]}" for name in ("narrow", "wide")})["m"]
    with pytest.raises(ConfigError, match=r"models\.m\.shapes\.wide: by the curves another shape"):
        shapes_of("m", backwards)


@pytest.mark.parametrize("name", ["", "a b", ":a", "ä", "a#b", "a\nb", "x" * 129])
def test_a_models_name_is_checked_by_every_process(name: str) -> None:
    """It stands in keys and channels of the store, and a # would make it one of its pools."""
    assert served_models({"org/Model-1.5:q4_k": ModelSettings(engine="sim")})
    with pytest.raises(ConfigError, match="a model name has letters"):
        served_models({name: ModelSettings(engine="sim")})


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        ({"a:b": "/a"}, "a name has letters"),
        ({"": "/a"}, "a name has letters"),
        ({"2": "/a"}, "m:2 is the name of a model, too"),
        ({"x" * 64: "/a"}, None),
    ],
)
def test_an_adapters_name_is_checked_by_every_process(adapters: dict[str, str], problem: str | None) -> None:
    """It is a part of a model's name in requests, which has 128 characters at most."""
    models = {"m": ModelSettings(engine="sim", adapters=adapters), "m:2": ModelSettings(engine="sim")}
    if problem is None:
        assert served_models(models)
        models, problem = {"m" * 64: models["m"]}, "has more than 128 characters"
    with pytest.raises(ConfigError, match=problem):
        served_models(models)


def test_a_byte_order_mark_is_ignored_and_other_encodings_are_named(tmp_path: Path) -> None:
    """Of the settings file."""
    path = tmp_path / "penstock.toml"
    text = "# é\r\n[api]\r\nport = 1234\r\n"
    path.write_bytes(text.encode("utf-8-sig"))
    assert load({"api": ApiSettings}, path=path, environ={}).section("api", ApiSettings).port == 1234
    path.write_bytes(text.replace("1234", "-1").encode("utf-8-sig"))
    with pytest.raises(ConfigError) as wrong:
        load({"api": ApiSettings}, path=path, environ={})
    assert wrong.value.source.endswith("penstock.toml")
    for encoding, words in (("utf-16", "UTF-16"), ("utf-16-be", "UTF-16"), ("latin-1", "byte 3 is 0xe9")):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ConfigError, match=words):
            load({"api": ApiSettings}, path=path, environ={})


# --- what a setting means ---------------------------------------------------------------------------------------------


class Example(msgspec.Struct):
    """A section."""

    first: int = 1
    """Its number, e.g. 3. More about
    it."""
    second: str = ""
    third: float = 0.5
    """A text over
    two lines"""


def test_a_meaning_is_one_sentence_on_one_line() -> None:
    """An abbreviation ends no sentence before a number; a field without a text has no meaning."""
    assert field_meanings(Example) == {"first": "Its number, e.g. 3.", "third": "A text over two lines"}


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces it in a file or in a variable of a unit."""
    monkeypatch.setenv("HOME", "/home/one")
    assert build(UpSettings, {"data_dir": "~/x"}, "up").data_dir == Path("/home/one/x")
    assert build(RecordSettings, {"dir": "~/x"}, "records").dir == "/home/one/x"


@pytest.mark.parametrize("order", [1, -1])
def test_a_short_name_overrides_the_long_one(order: int) -> None:
    """In whatever order the environment has them; an image sets some of the long ones."""
    environ = dict([("PENSTOCK_API_PORT", "1111"), ("PENSTOCK_PORT", "2222")][::order])
    config = load(KINDS, environ=environ)
    assert config.section("api", ApiSettings).port == 2222
    assert config.sources.of("api.port") == "set by the variable PENSTOCK_PORT"


# --- what has set a key ----------------------------------------------------------------------------------------------


def test_the_strongest_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags outrank variables, and these the file, whose path is short below the folder one is in."""
    monkeypatch.chdir(tmp_path)
    path, variables = tmp_path / "penstock.toml", {("api", "port"): "PENSTOCK_PORT"}
    file = {"api": {"port": 1}, "models": {"a.b": {"options": {"path": "x"}}}}
    assert Sources([("api", "port")], variables, {path: file}).of("api.port") == "set by the flag --port"
    assert Sources([], variables, {path: file}).of("api.port") == "set by the variable PENSTOCK_PORT"
    found = Sources([], {}, {path: file})
    assert found.of("api.port") == found.of("models.a.b.options.path") == "set in penstock.toml"
    assert found.of("api.metrics") == found.of("models.a.b.options.path.x") == ""
    monkeypatch.chdir("/")
    assert found.of("api.port") == f"set in {path.relative_to('/')}"


class OnlyApi(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1


class OnlyModel(msgspec.Struct, frozen=True, kw_only=True):
    engine: str


@pytest.mark.parametrize(
    ("text", "environ", "flags", "source"),
    [
        ("[api]\nport = 'x'", {}, {}, "penstock.toml"),
        ("[api]\n\nprot = 1", {}, {}, "penstock.toml"),
        ("[ap]", {}, {}, "penstock.toml"),
        ("[models.a]\n[models.b]\nengine = 1", {}, {}, "penstock.toml"),  # a has no engine
        ("[api]\nport = 2", {"PENSTOCK_PORT": "x"}, {}, "the variable PENSTOCK_PORT"),
        ("[api]\nport = 2", {"PENSTOCK_API_PORT": "x"}, {}, "the variable PENSTOCK_API_PORT"),
        ("[api]\nport = 2", {"PENSTOCK_PORT": "3"}, {("api", "port"): "x"}, "the flag --port"),
    ],
)
def test_every_error_of_the_loader_names_its_source(
    text: str, environ: dict[str, str], flags: dict[tuple[str, str], str], source: str, tmp_path: Path
) -> None:
    """Unknown sections and keys, values of the wrong kind, keys that are missing."""
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({"api": OnlyApi, "models": OnlyModel}, path=path, environ=environ, flags=flags)
    assert caught.value.source.endswith(source), caught.value.source


def test_every_flag_of_up_has_its_setting() -> None:
    """Those that set none aside."""
    from cli.up import up  # noqa: PLC0415

    flags = {flag for param in up.params for flag in param.opts if flag.startswith("--")}
    named = {Sources([target]).of(".".join(target)).removeprefix("set by the flag ") for target in FLAGS.values()}
    assert flags - named == {"--config", "--detach", "--color", "--debug"} and named <= flags
