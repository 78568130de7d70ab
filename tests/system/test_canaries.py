"""Twenty secrets and more through every error path: none comes out in logs, traces, metrics, arguments of processes or
answers to others.

Most have no shape that a redactor could know: what does not go into a log need not be hidden there.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batching import jsonl, line, said
from house import House, eventually, free_port, redis_process, start_role
from otlp_collector import Collector, collector
from redis import Redis

from streaming.keys import partition_key

__all__ = ["collector"]

pytestmark = pytest.mark.slow

NAMES = (
    "api_key", "bob_key", "admin_key", "wrong_key", "redis_password", "wrong_password", "webhook_secret", "webhook_url",
    "prompt", "failing_prompt", "poison_prompt", "waiting_prompt", "idempotency_key", "metadata", "unknown_field",
    "bad_json", "query", "path", "cookie", "x_api_key", "file_line", "form_field", "schema", "stop", "huge", "record",
    "setting_url", "setting_secret", "setting_key", "body_model", "user", "answered_prompt", "batch_prompt",
    "answer", "batch_answer", "created_key", "rotated_key", "judged_text",
)  # fmt: skip
INFRASTRUCTURE = (
    "bob_key", "admin_key", "redis_password", "wrong_password", "webhook_secret", "webhook_url",
    "created_key", "rotated_key", "record",
)  # fmt: skip
"""Those that no client sent: no answer to anybody may hold them."""

ANSWER_TOKENS = 12


class Canaries(dict[str, str]):
    """A value for each name, found again by the part nobody else has."""

    def __init__(self) -> None:
        super().__init__({name: f"{name}-{secrets.token_hex(8)}" for name in NAMES})
        self["webhook_secret"] = f"whsec_{secrets.token_hex(16)}"  # hexadecimal is base64 too
        self["metadata"] = f"sk-proj-{secrets.token_hex(16)}"
        # What the simulated engine says to a prompt is as hard to guess as the prompt.
        for answer, prompt in (("answer", "answered_prompt"), ("batch_answer", "batch_prompt")):
            self[answer] = said(self[prompt], ANSWER_TOKENS)

    def found_in(self, text: str, names: tuple[str, ...] = NAMES) -> list[str]:
        return [name for name in names if self._part(name) in text]

    def _part(self, name: str) -> str:
        value, made = self[name], "sk-penstock-"  # what a server has made may have a hyphen anywhere
        return value.removeprefix(made) if value.startswith(made) else value.rpartition("-")[2].removeprefix("whsec_")


class Told:
    """Everything that came out: by whom it was told and to whom."""

    def __init__(self, house: House, canaries: Canaries) -> None:
        self.house, self.canaries = house, canaries
        self.answers: dict[str, list[str]] = {name: [] for name in ("ann", "bob", "admin", "nobody", "web", "new")}

    def ask(
        self, who: str, method: str, path: str, body: Any = None, /, **headers: str
    ) -> tuple[int, dict[str, Any] | None]:
        """The status, and the body if it is JSON; headers are named with underscores."""
        keys = {"ann": "api_key", "bob": "bob_key", "admin": "admin_key", "web": "created_key", "new": "rotated_key"}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if who in keys and "Authorization" not in given:
            given["Authorization"] = f"Bearer {self.canaries[keys[who]]}"
        try:
            status, answered, data = self.house.request(method, path, body, given)
        except (OSError, http.client.HTTPException):
            return 0, None  # the server closed a connection whose body it would not read
        text = data.decode()
        self.answers[who].append(f"{answered} {text}")
        try:
            return status, json.loads(text)
        except ValueError:
            return status, None


SETTINGS = """
[telemetry]
log_level = "debug"
otlp_endpoint = "http://127.0.0.1:{collector}"
[redis]
max_attempts = 1
timeout_s = 0.5
lane_limit = 3
[api]
body_limit = 4096
[sim]
faults = true
slots = 4
[keys.ann]
tenant = "ann"
sha256 = "{ann}"
[keys.bob]
tenant = "bob"
sha256 = "{bob}"
[keys.ops]
tenant = "ops"
admin = true
sha256 = "{ops}"
[moderation]
model = "sim"
[webhooks.hook]
url = "http://127.0.0.1:{closed}/hook?token={hook}"
secret = "{secret}"
tenant = "ann"
allow_http = true
networks = ["127.0.0.0/8"]
"""


@pytest.fixture
def told(tmp_path: Path, collector: Collector) -> Iterator[Told]:
    """All roles but workers, with keys, a webhook that nobody answers and a store with a password."""
    canaries = Canaries()
    digests = {
        name: hashlib.sha256(canaries[key].encode()).hexdigest()
        for name, key in (("ann", "api_key"), ("bob", "bob_key"), ("ops", "admin_key"))
    }
    hook = {"hook": canaries["webhook_url"], "secret": canaries["webhook_secret"], "closed": free_port()}
    (tmp_path / "penstock.toml").write_text(SETTINGS.format(collector=collector.server_port, **hook, **digests))
    with redis_process(tmp_path, None, "--appendonly", "yes") as url:
        with Redis.from_url(url) as store:
            store.config_set("requirepass", canaries["redis_password"])
        with House(url.replace("redis://", f"redis://:{canaries['redis_password']}@"), tmp_path) as house:
            house.forks = False
            house.start("offline")
            house.start("scheduler")
            house.start_api()
            yield Told(house, canaries)


def test_no_secret_comes_out_again(told: Told, collector: Collector) -> None:
    """Each step shows by its status that it took the path it is for; then everything that came out is searched."""
    house, canaries = told.house, told.canaries
    poisoned = waiting_lane(told)
    house.start("workers", "--id", "worker-1").wait(30)  # by the job that kills it
    refused(told)
    house.start("workers", "--id", "worker-2")
    house.wait_ready()
    eventually(lambda: told.ask("ann", "GET", f"/v1/jobs/{poisoned}")[1]["status"] == "failed")  # type: ignore[index]
    engine_fails(told)
    answered(told)
    malformed_batch(told)
    good_batch(told)
    webhook_fails(told)
    keys_are_made(told)
    text_is_judged(told)
    others_look(told)
    arguments = told_by_arguments(house)
    store_down(told)
    refused_settings = settings_refused(told)
    metrics = house.request("GET", "/metrics", headers={"Authorization": f"Bearer {canaries['admin_key']}"})[2].decode()
    for process in house._processes:
        process.send_signal(signal.SIGTERM)
    for process in house._processes:
        process.wait(30)
    logs = "".join(path.read_text(errors="replace") for path in sorted(house.folder.glob("*-*.log")))
    spans = b"".join(collector.received).decode("latin-1")
    assert "a job failed" in logs or "Traceback" in logs or '"level":"error"' in logs, "something was logged at all"
    assert "http.route" in spans and "penstock.job.id" in spans and "penstock_" in metrics
    for text in (logs, spans, metrics, arguments, refused_settings):
        assert not (found := canaries.found_in(text)), f"{found} in {text[:200]}"
    kept = "".join(path.read_bytes().decode("latin-1") for path in house.folder.rglob("*") if path.is_file())
    assert "key_" in kept and not canaries.found_in(kept, ("created_key", "rotated_key")), "the store has hashes"
    of_ann = tuple(name for name in NAMES if name not in ("bob_key", "admin_key"))
    for who in ("bob", "nobody"):
        assert not canaries.found_in("".join(told.answers[who]), of_ann), who
    for who, answers in told.answers.items():
        never = (*INFRASTRUCTURE[:-1], "idempotency_key", "api_key", "wrong_key")
        assert not canaries.found_in("".join(answers), never), who


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def waiting_lane(told: Told) -> str:
    """Jobs wait, as many as the lane holds: one whose record is damaged, one that will kill its worker."""
    canaries = told.canaries
    status, damaged = told.ask("ann", "POST", "/v1/jobs", chat(canaries["waiting_prompt"]))
    assert status == 202 and damaged
    with Redis.from_url(told.house.redis_url) as store:
        store.hset(partition_key(0, "job", damaged["id"]), "body", b"\xc1" + canaries["record"].encode())
    said = {"metadata": {"upstream": canaries["metadata"]}, "queue": {"priority": "standard"}}
    for number in range(2):
        words = canaries["poison_prompt"] + (" [[crash@1]]" if number else "")
        status, poisoned = told.ask(
            "ann", "POST", "/v1/jobs", chat(words, **said), Idempotency_Key=f"{number}-" + canaries["idempotency_key"]
        )
        assert status == 202 and poisoned
    status, _ = told.ask("ann", "POST", "/v1/jobs", chat(canaries["waiting_prompt"], **said))
    assert status == 429
    return str(poisoned["id"])


def refused(told: Told) -> None:
    """What never becomes a job."""
    canaries = told.canaries
    path = "/v1/chat/completions"
    cases: list[tuple[int, str, str, Any, dict[str, str]]] = [
        (401, "POST", path, chat(canaries["prompt"]), {"Authorization": f"Bearer {canaries['wrong_key']}"}),
        (401, "POST", path, chat(canaries["prompt"]), {"Authorization": canaries["wrong_key"]}),
        (400, "POST", path, b'{"model": "sim", "messages": "' + canaries["bad_json"].encode(), {}),
        (400, "POST", path, chat("x", stop=[canaries["stop"]] * 9), {}),
        (400, "POST", path, chat("x", temperature=canaries["stop"]), {}),
        (404, "POST", path, chat("x", model=canaries["body_model"]), {}),
        (413, "POST", path, chat(canaries["huge"] + "x" * 8000), {}),
        (415, "POST", path, chat(canaries["prompt"]), {"Content-Type": f"text/{canaries['prompt']}"}),
        (404, "GET", f"/v1/{canaries['path']}", None, {"Cookie": f"sid={canaries['cookie']}"}),
        (404, "GET", f"/v1/jobs/{canaries['path']}", None, {"X-Api-Key": canaries["x_api_key"]}),
        (400, "GET", f"/v1/jobs?cursor={canaries['query']}", None, {"Cookie": canaries["cookie"]}),
        (400, "GET", f"/v1/jobs?limit={canaries['query']}&token={canaries['query']}", None, {}),
        (403, "GET", f"/admin/dlq/{canaries['path']}", None, {}),
        (405, "DELETE", f"{path}?key={canaries['query']}", None, {"X-Api-Key": canaries["x_api_key"]}),
        (422, "POST", "/v1/jobs", chat(canaries["prompt"]), {"Idempotency-Key": "0-" + canaries["idempotency_key"]}),
        (400, "POST", "/v1/jobs", chat("x"), {"Idempotency-Key": canaries["idempotency_key"] * 20}),
    ]  # fmt: skip
    for status, method, target, body, headers in cases:
        assert told.ask("ann", method, target, body, **headers)[0] == status, (status, method, target)


def engine_fails(told: Told) -> None:
    """A request fails in its engine; one asks for what the engine cannot do; one has a field that nobody knows."""
    canaries, path = told.canaries, "/v1/chat/completions"
    assert told.ask("ann", "POST", path, chat(canaries["failing_prompt"] + " [[fail@1]]"))[0] == 500
    assert told.ask("ann", "POST", path, chat("x", **{canaries["unknown_field"]: canaries["unknown_field"]}))[0] == 200
    schema = {"name": "a", "schema": {"const": canaries["schema"]}}
    asked = chat("x", response_format={"type": "json_schema", "json_schema": schema})
    eventually(lambda: told.ask("ann", "POST", path, asked)[0] == 400)  # once the model's card is known


def answered(told: Told) -> None:
    """What is asked is answered: at once, as a stream, and as a job whose result is read twice."""
    canaries, path = told.canaries, "/v1/chat/completions"
    asked = chat(canaries["answered_prompt"], max_tokens=ANSWER_TOKENS, user=canaries["user"])
    status, found = told.ask("ann", "POST", path, asked)
    assert status == 200 and found and found["choices"][0]["message"]["content"] == canaries["answer"]
    assert told.ask("ann", "POST", path, asked | {"stream": True})[0] == 200
    status, job = told.ask("ann", "POST", "/v1/jobs", asked)
    assert status == 202 and job
    for _ in range(2):
        status, seen = told.ask("ann", "GET", f"/v1/jobs/{job['id']}?wait=30")
        assert status == 200 and seen and seen["status"] == "completed"
        status, found = told.ask("ann", "GET", f"/v1/jobs/{job['id']}/result")
        assert status == 200 and found and found["choices"][0]["message"]["content"] == canaries["answer"]


BOUNDARY = "b0undary"


def form(lines: bytes, purpose: str = "batch") -> bytes:
    """An upload of a file with these lines."""
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--{BOUNDARY}\r\n'
        f'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    return head.encode() + lines + f"\r\n--{BOUNDARY}--\r\n".encode()


FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def batch_of(told: Told, lines: bytes) -> dict[str, Any]:
    """A batch of these lines, once it is over."""
    status, file = told.ask("ann", "POST", "/v1/files", form(lines), **FORM)
    assert status == 200 and file
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, batch = told.ask("ann", "POST", "/v1/batches", asked)
    assert status == 200 and batch

    def over() -> dict[str, Any] | None:
        _, now = told.ask("ann", "GET", f"/v1/batches/{batch['id']}")
        return now if now and now["status"] in ("failed", "completed") else None

    return eventually(over)


def malformed_batch(told: Told) -> None:
    """A file whose lines are none, and an upload that is no form."""
    canaries = told.canaries
    secret = canaries["file_line"]
    lines = jsonl([line(0), {"custom_id": secret, "body": secret}]) + secret.encode()
    assert told.ask("ann", "POST", "/v1/files", form(lines, canaries["form_field"]), **FORM)[0] == 400
    assert batch_of(told, lines)["status"] == "failed"


def good_batch(told: Told) -> None:
    """One line that is answered, and one that fails in its engine."""
    canaries = told.canaries
    more: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "user": canaries["user"]}
    lines = [line(0, canaries["batch_prompt"], **more), line(1, canaries["failing_prompt"] + " [[fail@1]]", **more)]
    done = batch_of(told, jsonl(lines))
    assert done["status"] == "completed"
    assert (done["request_counts"]["completed"], done["request_counts"]["failed"]) == (1, 1)
    told.ask("ann", "GET", f"/v1/files/{done['output_file_id']}/content")
    assert canaries["batch_answer"] in told.answers["ann"][-1]
    told.ask("ann", "GET", f"/v1/files/{done['error_file_id']}/content")
    assert '"r-1"' in told.answers["ann"][-1]


def webhook_fails(told: Told) -> None:
    """Nobody listens there: attempts fail, and an admin sees why."""

    def tried() -> bool:
        _, listed = told.ask("admin", "GET", "/admin/webhooks")
        return bool(listed) and any(each["attempts"] for each in listed["data"])

    eventually(tried)


def keys_are_made(told: Told) -> None:
    """A key is created, used, refused, rotated and revoked. Only the answer that makes it has it."""
    canaries = told.canaries

    def made(path: str, name: str, body: dict[str, Any]) -> str:
        status, _, data = told.house.post(path, body, {"Authorization": f"Bearer {canaries['admin_key']}"})
        assert status in (200, 201)
        canaries[name] = json.loads(data)["key"]
        return str(json.loads(data)["id"])

    key = made("/admin/keys", "created_key", {"tenant": "web", "label": "of a page", "endpoints": ["chat", "jobs"]})
    for who, status in (("web", 200), ("new", 401)):
        assert told.ask(who, "POST", "/v1/chat/completions", chat("x"))[0] == status
    made(f"/admin/keys/{key}/rotate", "rotated_key", {})
    for who, status in (("web", 401), ("new", 200)):
        assert told.ask(who, "POST", "/v1/chat/completions", chat("x"))[0] == status
    assert told.ask("new", "POST", "/v1/chat/completions", chat("x", model="none"))[0] == 404
    assert told.ask("new", "GET", f"/v1/files?key={canaries['rotated_key']}")[0] == 403
    for path in ("", f"/{key}"):
        status, shown = told.ask("admin", "GET", f"/admin/keys{path}")
        assert status == 200 and shown
    assert told.ask("admin", "DELETE", f"/admin/keys/{key}")[0] == 200
    assert told.ask("new", "GET", "/v1/jobs")[0] == 401


def text_is_judged(told: Told) -> None:
    """By a model that gives no verdict."""
    status, _ = told.ask("ann", "POST", "/v1/moderations", {"model": "sim", "input": told.canaries["judged_text"]})
    assert status == 503


def others_look(told: Told) -> None:
    """Whatever another tenant, and somebody without a key, may ask."""
    _, mine = told.ask("ann", "GET", "/v1/jobs")
    assert mine and mine["data"]
    for who in ("bob", "nobody"):
        for each in mine["data"]:
            for path in ("", "/result", "/events", "/stream", "/timing"):
                assert told.ask(who, "GET", f"/v1/jobs/{each['id']}{path}")[0] in (401, 404)
            assert told.ask(who, "GET", f"/v1/messages/msg_{each['id']}")[0] in (401, 404)
        for path in ("/v1/jobs", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/models", "/v1/usage",
                     "/admin/dlq", "/admin/tenants",
                     "/admin/usage", "/healthz", "/readyz", "/version", "/openapi.json", "/"):  # fmt: skip
            told.ask(who, "GET", path)
    assert told.ask("admin", "GET", "/admin/dlq")[0] == 200
    keyed = {"Idempotency_Key": "0-" + told.canaries["idempotency_key"]}
    assert told.ask("bob", "POST", "/v1/jobs", chat("x"), **keyed)[0] == 202


def told_by_arguments(house: House) -> str:
    """What `ps` shows of our processes."""
    running = [process.pid for process in house._processes if process.poll() is None]
    assert len(running) >= 4
    return "".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") for pid in running)


def store_down(told: Told) -> None:
    """The store hangs; what is asked meanwhile is refused."""
    with Redis.from_url(told.house.redis_url) as store:
        pid = store.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        keyed = {"Idempotency_Key": told.canaries["idempotency_key"]}
        assert told.ask("ann", "POST", "/v1/jobs", chat(told.canaries["prompt"]), **keyed)[0] == 503
        assert told.ask("ann", "POST", "/v1/chat/completions", chat(told.canaries["prompt"]))[0] == 503
        assert told.ask("ann", "GET", f"/v1/jobs/job_00{'0' * 30}?token={told.canaries['query']}")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)


ROLES = ("api", "workers", "scheduler", "offline")


def settings_refused(told: Told) -> str:
    """What each role that reads a setting says of it where it cannot use it, and of a store that does not take its
    password."""
    house, canaries = told.house, told.canaries
    folder = house.folder / "refused"
    folder.mkdir()
    hook = f'url = "https://a.example/?a={canaries["setting_url"]}"\nsecret = "{canaries["setting_key"]}"'
    texts: list[tuple[str, tuple[str, ...]]] = [
        (f'[redis]\nurl = "redis://:{canaries["setting_url"]}@127.0.0.1:port/0"\n', ROLES),
        (f'[redis]\nurl = "redis://:{canaries["setting_url"]}/of@127.0.0.1:6379/0"\n', ("api",)),
        (f'[redis]\nurl = "{canaries["setting_url"]}"\n', ("api",)),
        (f"[webhooks.a]\n{hook}\n", ("api", "offline")),
        (f'[keys.a]\ntenant = "a"\nsha256 = "{canaries["setting_key"]}"\n', ("api",)),
        (f'[redis]\npassword = "{canaries["setting_secret"]}"\n', ROLES),
        (f'[redis]\nurl = "redis://:{canaries["setting_url"]}@127.0.0.1\n', ("api",)),
    ]
    environ = {name: value for name, value in house.environ.items() if name != "PENSTOCK_REDIS_URL"}
    heard = ""
    for number, (text, roles) in enumerate(texts):
        path = folder / f"{number}.toml"
        path.write_text(text)
        for role in roles:
            said = folder / f"{number}.{role}"
            with said.open("wb") as log:
                code = start_role(role, ["--config", str(path)], environ, folder, log.fileno()).wait(60)
            assert code == 2 and "error:" in said.read_text(), (text, role, said.read_text())
            heard += said.read_text()
    wrong = house.redis_url.replace(canaries["redis_password"], canaries["wrong_password"])
    house.start("workers", PENSTOCK_REDIS_URL=wrong)
    eventually(lambda: "invalid username-password" in house.log("workers"))
    return heard
