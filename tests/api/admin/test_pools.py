"""/admin/pools and `penstock scale`: what is shown, who may change it, and what a waiting job is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from house import ADMIN_TOKEN, House, eventually, unstarted
from openapi_document import SCHEMAS, conforms

from api.waits import STALE_S, PlanReader
from cli.__main__ import main
from cli.client import Client
from streaming.batches.file_store import FileStore
from streaming.fleet.plans import Plan
from streaming.fleet.process import Prospect
from streaming.fleet.settings import ModelSettings
from streaming.order import Priority
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

TWO = "[models.sim]\nengine = 'sim'\nmin_workers = 0\nmax_workers = 3\n[models.'org/big']\nengine = 'sim'\n"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An API process and a scheduler; nobody starts workers."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "penstock.toml").write_text(TWO)
    with unstarted(folder) as house:
        house.environ |= {"PENSTOCK_SCHEDULER_TICK_S": "0.1", "PENSTOCK_SCHEDULER_LEAD_S": "2"}
        house.start("scheduler", "--id", "scheduler-1")
        house.start_api()
        eventually(lambda: pool(house)["want"] == 0)
        yield house


def pool(house: House, model: str = "sim") -> dict[str, Any]:
    return dict(json.loads(house.get(f"/admin/pools/{model}")[1]))


def put(house: House, body: Any, model: str = "sim") -> tuple[int, dict[str, Any]]:
    status, _, answer = house.request("PUT", f"/admin/pools/{model}", body)
    return status, json.loads(answer)


class Told(NamedTuple):
    """A command's exit code and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def scale(gate: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """`penstock scale ...` about the gate, in this process; connections that end with a command's process end here."""
    monkeypatch.chdir(gate.folder)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)
    opened, find = [], Client.find
    monkeypatch.setattr(Client, "find", lambda where: opened.append(find(where)) or opened[-1])

    def run(*words: str, url: str = gate.url) -> Told:
        code = main(["scale", *words, "--url", url])
        while opened:
            opened.pop()._api.close()
        return Told(code, *capsys.readouterr())

    return run


# --- over HTTP -------------------------------------------------------------------------------------------------------


def test_everything_is_shown(gate: House) -> None:
    """Both models, with plan, reason, lanes and limits; the leader, and what it did; all as the document says."""
    answer = json.loads(gate.get("/admin/pools")[1])
    assert conforms(answer, SCHEMAS["PoolList"])
    sim, big = answer["data"]
    assert (sim["model"], sim["want"], sim["min"], sim["max"], sim["pool"]) == ("sim", 0, 0, 3, "local")
    assert (big["model"], big["want"], big["min"]) == ("org/big", 1, 1) and big["reason"]
    assert sim["reason"] and sim["override"] is None and sim["workers"] == []
    assert sim["lanes"]["batch"]["waiting"] == 0 and sim["wake_s"] > 0
    assert answer["leader"]["id"].startswith("scheduler-1@") and answer["leader"]["epoch"] == sim["epoch"]
    assert any(action["action"] == "lead" for action in answer["actions"])
    assert conforms(pool(gate, "org/big"), SCHEMAS["Pool"])


def test_a_number_is_set_paused_and_resumed(gate: House) -> None:
    """Each at once, with who and when; DELETE lets the scheduler decide again."""
    status, answer = put(gate, {"want": 2})
    assert status == 200 and conforms(answer, SCHEMAS["Pool"])
    override = answer["override"]
    assert (override["want"], override["paused"], override["by"], override["until"]) == (2, False, "local", None)
    assert eventually(lambda: pool(gate)["want"] == 2)
    assert "by hand" in pool(gate)["reason"]
    _, answer = put(gate, {"paused": True, "for_s": 600})
    override = answer["override"]
    assert override["paused"] and round(override["until"] - override["at"]) == 600
    assert eventually(lambda: "paused" in pool(gate)["reason"]) and pool(gate)["want"] == 2
    status, _, body = gate.request("DELETE", "/admin/pools/sim")
    assert status == 200 and json.loads(body)["override"] is None
    assert eventually(lambda: "paused" not in pool(gate)["reason"])
    assert gate.request("DELETE", "/admin/pools/sim")[0] == 200, "again is no error"
    actions = [action["action"] for action in json.loads(gate.get("/admin/pools")[1])["actions"]]
    assert [kind for kind in reversed(actions) if kind in ("set", "pause", "resume")][-3:] == ["set", "pause", "resume"]
    put(gate, {"want": 0, "for_s": 1})
    assert eventually(lambda: pool(gate)["override"] is None)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "want", "either"),
        ({"want": 1, "paused": True}, "want", "either"),
        ({"want": 4}, "want", "from 0 to 3: for more, raise max_workers of [models.sim] (or --workers of penstock up)"),
        ({"want": -1}, "want", "from 0 to 3: for fewer, lower min_workers of [models.sim]"),
        ({"want": True}, "want", "whole number"),
        ({"want": "2"}, "want", "whole number"),
        ({"paused": False}, "paused", "DELETE"),
        ({"want": 1, "for_s": 0}, "for_s", "at least 1"),
        ({"want": 1, "for_s": 1.5}, "for_s", "whole number"),
        ({"want": 1, "forever": 1}, "forever", "is no known field (known: for_s, paused, want)"),
        (b"[]", None, "object"),
        (b"{", None, "valid JSON"),
    ],
)
def test_bad_overrides_are_refused_in_plain_words(gate: House, body: Any, param: str | None, words: str) -> None:
    """400 with the field and the fix, and nothing is changed."""
    status, _, answer = gate.request("PUT", "/admin/pools/sim", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param) and words in error["message"]
    assert pool(gate)["override"] is None


def test_a_job_that_no_worker_may_run_is_shown_everywhere(gate: House) -> None:
    """Set to 0 by an operator: the job, the pool, the verdict, the readiness and the doctor say so until it is
    resumed."""
    from cli.doctor import redis as inspected  # noqa: PLC0415 - imports an engine

    put(gate, {"want": 0})
    job = json.loads(gate.post("/v1/jobs", {"model": "sim", "messages": [{"role": "user", "content": "hello"}]})[2])
    try:
        eventually(lambda: "operator" in json.loads(gate.get(f"/v1/jobs/{job['id']}")[1])["queue_reason"])
        assert "sim" in json.loads(gate.get("/readyz")[1])["stalled"]
        assert conforms(pool(gate), SCHEMAS["Pool"]) and "resume" in pool(gate)["stalled"]["fix"]
        verdict = eventually(
            lambda: (found := json.loads(gate.get("/admin/overview")[1])["verdict"])["flow"] == "stopped" and found
        )
        assert "sim" in verdict["title"]
        models = {"sim": ModelSettings(engine="sim", min_workers=0, max_workers=3)}
        found = list(inspected(RedisSettings(url=gate.redis_url), FileStore(gate.folder / "files"), models))
        assert [(each.name, each.status) for each in found if each.name == "lanes"] == [("lanes", "fail")]
    finally:
        gate.request("DELETE", "/admin/pools/sim")
        gate.post(f"/v1/jobs/{job['id']}/cancel", {})
    assert pool(gate)["stalled"] is None
    assert eventually(lambda: "sim" not in json.loads(gate.get("/readyz")[1]).get("stalled", {}))


def test_a_waiting_job_is_told_when_its_model_will_be_awake(gate: House) -> None:
    """At zero workers the model is listed, the job is held, and its ETA is the cold start; later it is less."""
    gate.request("DELETE", "/admin/pools/sim")
    assert "sim" in [model["id"] for model in json.loads(gate.get("/v1/models")[1])["data"]]
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
    cold_ms = 1000 * pool(gate)["cold_start_s"]

    def told() -> tuple[str, int]:
        status, headers, answer = gate.post("/v1/jobs", body)
        assert status == 202
        return json.loads(answer)["id"], int(headers["x-queue-eta-ms"])

    job_id, eta_ms = eventually(told, KeyError)  # the plans are read every second
    assert 0 < eta_ms <= cold_ms
    again = [gate.post("/v1/jobs", body, {"Idempotency-Key": "eta"}) for _ in range(2)]
    told_eta = ["x-queue-eta-ms" in headers for _, headers, _ in again]
    assert told_eta == [True, False], "a job that was there already is not at the end of its lane"
    job = json.loads(gate.get(f"/v1/jobs/{job_id}")[1])
    assert job["status"] == "queued" and 0 < job["eta_ms"] <= cold_ms
    eventually(lambda: pool(gate)["want"] >= 1)
    assert eventually(lambda: json.loads(gate.get(f"/v1/jobs/{job_id}")[1])["eta_ms"] < eta_ms)
    for row in json.loads(gate.get("/v1/jobs?limit=100")[1])["data"]:
        gate.post(f"/v1/jobs/{row['id']}/cancel", {})


# --- at the command line ---------------------------------------------------------------------------------------------


def test_status_has_a_row_for_each_model(scale: Callable[..., Told]) -> None:
    """Who leads goes to stderr; as JSON, one object a line and nothing else."""
    done = scale("status")
    _, *rows = done.stdout.splitlines()
    assert done.returncode == 0 and [row.split()[0] for row in rows] == ["sim", "org/big"]
    assert "scheduler-1@" in done.stderr and "leads" in done.stderr
    done = scale("status", "--json")
    sim, big = (json.loads(line) for line in done.stdout.splitlines())
    assert (sim["model"], big["model"], done.stderr) == ("sim", "org/big", "") and sim["decided_at"].endswith("Z")


def test_set_pause_resume_and_log(scale: Callable[..., Told]) -> None:
    """Each answers with the pool; the log has who did what, the newest first."""
    done = scale("set", "org/big", "1", "--for", "10m")
    assert done.returncode == 0 and "set to 1 by local" in done.stdout and " until " in done.stdout
    assert "paused by local" in scale("pause", "org/big").stdout
    assert json.loads(scale("resume", "org/big", "--json").stdout)["override"] is None
    rows = [json.loads(line) for line in scale("log", "--json").stdout.splitlines()]
    by_hand = [row for row in rows if row["model"] == "org/big" and row["by"] == "local"]
    assert [row["action"] for row in by_hand] == ["resume", "pause", "set"]
    assert "resume" in scale("log").stdout


# --- what can be expected --------------------------------------------------------------------------------------------


def learnt(want: int = 1, wake_s: float = 0.0, at_ms: int = 1_000, **lane: Any) -> PlanReader:
    outlook = PlanReader()
    plan = Plan(model="m", want=want, reason="r", at_ms=at_ms, wake_s=wake_s, lanes={"batch": Prospect(**lane)})
    outlook.learn({"m": plan}, 1_000)
    return outlook


def test_an_eta_follows_the_place_in_the_lane() -> None:
    """From what was expected at the lane's end: more for each job more, less for each less, never less than nothing."""
    outlook = learnt(wait_s=10.0, each_s=0.5, waiting=20)
    assert [outlook.eta_ms("m", Priority.BATCH, before) for before in (20, 22, 10, 0)] == [10_000, 11_000, 5_000, 0]


def test_an_eta_is_never_before_a_worker_is_there() -> None:
    """Asleep: the whole start, however long ago that was looked at. Waking: what is left of it."""
    asleep = learnt(want=0, wake_s=8.0, at_ms=-2_000, wait_s=8.0)
    assert asleep.eta_ms("m", Priority.BATCH, 0) == 8_000
    falling_asleep = PlanReader()
    plan = Plan(model="m", want=0, reason="r", at_ms=0, cold_start_s=5.0, lanes={"batch": Prospect(0.0)})
    falling_asleep.learn({"m": plan}, 0)
    assert falling_asleep.eta_ms("m", Priority.BATCH, 0) == 5_000, "a worker that still drains is no help"
    eta = learnt(want=1, wake_s=8.0, at_ms=-2_000, wait_s=9.0).eta_ms("m", Priority.BATCH, 0)
    assert eta is not None and 5_900 <= eta <= 6_000


def test_nobody_can_say() -> None:
    """No plan, no such lane, nobody who would begin it, or a plan no scheduler stands behind any more."""
    assert PlanReader().eta_ms("m", Priority.BATCH, 0) is None
    assert learnt(wait_s=1.0).eta_ms("m", Priority.STANDARD, 0) is None
    held = learnt(wait_s=None)
    assert held.eta_ms("m", Priority.BATCH, 0) is None and held.fresh("m"), "no pace of earlier jobs says otherwise"
    assert not held.fresh("other") and not learnt(at_ms=-20_000, wait_s=1.0).fresh("m")
    assert learnt(at_ms=int(1_000 - 1_000 * STALE_S - 1), wait_s=1.0).eta_ms("m", Priority.BATCH, 0) is None


def test_a_plan_from_a_clock_that_is_ahead_is_as_new_as_one_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not make a worker's start take longer than it does."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert learnt(want=1, wake_s=8.0, at_ms=9_000, wait_s=8.0).eta_ms("m", Priority.BATCH, 0) == 8_000
