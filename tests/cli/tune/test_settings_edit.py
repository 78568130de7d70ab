"""Settings editor: it changes the keys it is asked for and no other line, or says what to write."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from cli.output import Problem
from cli.tune.settings_edit import Keys, apply_settings, changes_for, check_applicable, with_value
from penstock.config import ConfigError
from planner.tuning import Recommendation

WANTED = Recommendation(48, 30_720, replicas=2)
CURVE = ((1.0, 10.0), (2.0, 19.5))
SLOTS: Keys = ("models", "m", "options", "slots")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[models.m.options]\nslots = 48\n"),
        ("# mine\n[api]\nport = 1\n", "# mine\n[api]\nport = 1\n\n[models.m.options]\nslots = 48\n"),
        ('[models.m]\nengine = "sim"\n', '[models.m]\noptions.slots = 48\nengine = "sim"\n'),
        ("[models.m]\noptions.slots = 8  # few\n[api]\n", "[models.m]\noptions.slots = 48  # few\n[api]\n"),
        ('[models.m]\noptions.slots = "8 # 9"# was "7" # or\n', '[models.m]\noptions.slots = 48# was "7" # or\n'),
        ("# a\r\n[models.m]\r\nx = 1\r\n", "# a\r\n[models.m]\r\noptions.slots = 48\r\nx = 1\r\n"),
        ("[models.m]\r\noptions.slots = 8 # b\r\n", "[models.m]\r\noptions.slots = 48 # b\r\n"),
        ("[models.m.options]\nslots = 8\n", "[models.m.options]\nslots = 48\n"),
        ("[models]\nm.options.slots = 8\n", "[models]\nm.options.slots = 48\n"),
        ('[models."m"]\nx = """\n[models.m]\noptions.slots = 8\n"""', None),
    ],
)
def test_one_key_is_set_and_the_rest_stays(before: str, after: str | None) -> None:
    found = with_value(before, SLOTS, 48)
    wanted = tomllib.loads(before)
    wanted.setdefault("models", {}).setdefault("m", {}).setdefault("options", {})["slots"] = 48
    assert tomllib.loads(found) == wanted
    assert after is None or found == after


def test_an_inline_table_is_left_to_its_owner() -> None:
    with pytest.raises(Problem) as caught:
        with_value('[models]\nm = { engine = "sim" }\n', SLOTS, 48)
    assert "write models.m.options.slots = 48" in caught.value.next_step


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ("trtllm", {("options", "max_batch_size"): 48, ("options", "kv_cache", "max_tokens"): 30_720}),
        ("sim", {("options", "slots"): 48, ("options", "kv_tokens"): 30_720}),
        ("llamacpp", {("options", "slots"): 48}),
    ],
)
def test_each_engine_has_its_own_names(engine: str, wanted: dict[Keys, int]) -> None:
    found = changes_for("m", engine, {"models": {"m": {"engine": engine}}}, WANTED, CURVE, None)
    assert found == {("models", "m", *keys): value for keys, value in wanted.items()} | {
        ("models", "m", "max_workers"): 2
    }
    bare = changes_for("m", engine, {}, WANTED, CURVE, None)
    assert {keys[0] for keys in bare} == {engine}


def test_a_shape_gets_its_curve() -> None:
    settings = {"models": {"m": {"engine": "sim", "shapes": {"big": {}, "small": {}}}}}
    found = changes_for("m", "sim", settings, WANTED, CURVE, "big")
    assert found["models", "m", "shapes", "big", "curve"] == [[1.0, 10.0], [2.0, 19.5]]
    assert found["models", "m", "shapes", "big", "max_workers"] == 2
    with pytest.raises(Problem, match="no such shape"):
        changes_for("m", "sim", settings, WANTED, CURVE, "medium")


def test_an_engine_of_others_is_theirs() -> None:
    with pytest.raises(Problem, match="upstream is not a setting"):
        changes_for("m", "upstream", {}, WANTED, CURVE, None)


def test_it_is_written_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('# mine\n[models.m]\nengine = "sim"\nmin_workers = 1\n')
    applied = apply_settings(tmp_path, "m", WANTED, CURVE, None)
    text = path.read_text()
    assert text.startswith("# mine\n") and tomllib.loads(text)["models"]["m"]["options"]["slots"] == 48
    assert applied.changes == [
        "models.m.options.slots = 48", "models.m.options.kv_tokens = 30720", "models.m.max_workers = 2"
    ]  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["penstock.toml"]


def test_what_would_not_load_is_not_written(tmp_path: Path) -> None:
    """A curve for one shape of two: the other has none, and the scheduler could not compare them."""
    path = tmp_path / "penstock.toml"
    before = '[models.m]\nengine = "sim"\n[models.m.shapes.big]\nupto = 8\n[models.m.shapes.small]\n'
    path.write_text(before)
    with pytest.raises(ConfigError, match="with the measured settings"):
        apply_settings(tmp_path, "m", WANTED, CURVE, "big")
    assert path.read_text() == before and [each.name for each in tmp_path.iterdir()] == ["penstock.toml"]


def test_a_batch_that_is_withheld_is_not_written(tmp_path: Path) -> None:
    """Throughput that still rises, or a sweep that was cut short, speaks for no batch."""
    path, open_end = tmp_path / "penstock.toml", replace(WANTED, withheld="throughput still rises at 48")
    before = '[models.m]\nengine = "sim"\noptions.slots = 256\n'
    path.write_text(before)
    told: list[str] = []
    assert not apply_settings(tmp_path, "m", open_end, CURVE, None, told.append).changes
    assert path.read_text() == before and not told


def test_old_and_new_are_told_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('[models.m]\nengine = "sim"\noptions.slots = 256\n')
    told: list[tuple[str, bool]] = []
    apply_settings(tmp_path, "m", WANTED, CURVE, None, lambda line: told.append((line, "48" in path.read_text())))
    assert told[:2] == [
        ("models.m.options.slots: 256 -> 48", False), ("models.m.options.kv_tokens: not set -> 30720", False)
    ]  # fmt: skip


def test_a_folder_without_a_file_gets_the_lines_told(tmp_path: Path) -> None:
    check_applicable(tmp_path, "llama-8b", None)
    found = apply_settings(tmp_path, "llama-8b", WANTED, CURVE, None)
    assert not found.is_written and not list(tmp_path.iterdir())
    assert found.changes[:2] == [
        "[models.llama-8b.options]", "# engine trtllm: max_batch_size = 48, kv_cache.max_tokens = 30720"
    ]  # fmt: skip


def test_a_model_of_another_folder_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[models.m]\nengine = "sim"\n')
    with pytest.raises(Problem, match="does not configure the model 'other'"):
        apply_settings(tmp_path, "other", WANTED, CURVE, None)


def test_what_cannot_be_written_is_known_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[models.m]\nengine = "sim"\n')
    check_applicable(tmp_path, "m", None)
    assert [each.name for each in tmp_path.iterdir()] == ["penstock.toml"]
    with pytest.raises(Problem, match="no such shape"):
        check_applicable(tmp_path, "m", "big")


def test_a_file_keeps_its_link_its_mode_and_the_ends_of_its_lines(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_bytes(b'# mine\r\n[models.m]\r\nengine = "sim" # a simulation\r\n')
    real.chmod(0o640)
    folder = tmp_path / "instance"
    folder.mkdir()
    (folder / "penstock.toml").symlink_to(real)
    apply_settings(folder, "m", WANTED, CURVE, None)
    assert (folder / "penstock.toml").is_symlink() and real.stat().st_mode & 0o777 == 0o640
    written = real.read_bytes()
    assert written.startswith(b"# mine\r\n[models.m]\r\n") and written.endswith(b'engine = "sim" # a simulation\r\n')
    assert b"options.slots = 48\r\n" in written and b"\n" not in written.replace(b"\r\n", b"")


def test_a_file_that_cannot_be_read_or_written_says_so_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_bytes(b'# \xff\n[models.m]\nengine = "sim"\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        check_applicable(tmp_path, "m", None)
    file.write_text('[models.m]\nengine = "sim"\n')
    monkeypatch.setattr("os.access", lambda path, mode: path != file)
    with pytest.raises(Problem) as caught:
        check_applicable(tmp_path, "m", None)
    assert "cannot be written" in caught.value.message
