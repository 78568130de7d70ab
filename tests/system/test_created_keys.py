"""A created key acts and ends at every API process, also for answers that are open."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from house import ADMIN_TOKEN, House, eventually, unstarted

from bench.ports import free_port
from cli.__main__ import main

pytestmark = pytest.mark.slow

# It would end by itself after 80 s.
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4000}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)
    with unstarted(tmp_path) as house:
        house.environ |= {"PENSTOCK_SIM_STEP_MS": "20"}
        house.start_all("workers")
        yield house


def command(house: House, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints."""
    assert main(["keys", *words, "--url", house.url]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("stream", [True, False])
def test_a_revoked_key_ends_its_answers_at_every_process(
    house: House, capsys: pytest.CaptureFixture[str], *, stream: bool
) -> None:
    other = free_port()
    house.start_api(other)
    made = json.loads(command(house, capsys, "create", "web", "--label", "of a page", "--json"))
    headers = {"Authorization": f"Bearer {made['key']}", "Content-Type": "application/json"}
    eventually(lambda: house.get("/v1/models", other)[0] == 401)
    with closing(http.client.HTTPConnection("127.0.0.1", other, timeout=60)) as line:
        line.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": stream}).encode(), headers)
        if stream:
            answer = line.getresponse()
            assert answer.status == 200 and answer.readline()
        else:
            eventually(lambda: json.loads(house.request("GET", "/admin/tenants/web")[2])["running"] == 1)
        command(house, capsys, "revoke", made["id"])
        answer = answer if stream else line.getresponse()
        rest = answer.read()
        assert b'"invalid_api_key"' in rest and b"[DONE]" not in rest
        assert answer.status == (200 if stream else 401)
    assert house.request("GET", "/v1/models", headers=headers, port=other)[0] == 401
    eventually(lambda: json.loads(house.request("GET", "/admin/tenants/web")[2])["running"] == 0)
    assert "Traceback" not in house.log("api")


def test_keys_are_listed_with_their_last_use(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    key = command(house, capsys, "create", "web", "--lane", "batch", "--expires", "30d").strip()
    headers = {"Authorization": f"Bearer {key}"}
    assert house.request("GET", "/v1/models", headers=headers)[0] == 200

    def used() -> bool:
        (listed,) = [json.loads(line) for line in command(house, capsys, "ls", "--json").splitlines()]
        assert listed["highest_lane"] == "batch" and listed["expires_at"]
        return listed["last_used_at"] is not None

    eventually(used)
    name = json.loads(command(house, capsys, "ls", "--json"))["id"]
    new = command(house, capsys, "rotate", name).strip()
    assert house.request("GET", "/v1/models", headers=headers)[0] == 401
    assert house.request("GET", "/v1/models", headers={"Authorization": f"Bearer {new}"})[0] == 200
    lines = [line for line in house.log("api").splitlines() if '"penstock.audit"' in line]
    assert [json.loads(line)["action"] for line in lines if '"key.' in line] == ["key.create", "key.rotate"]
    assert not any(secret in line for line in lines for secret in (key, new))

    def noted() -> bool:
        capsys.readouterr()
        assert main(["audit", "--json", "--since", "1h", "--url", house.url]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(each["action"], each["target"]) for each in found] == [("key.rotate", name), ("key.create", name)]

    eventually(noted)
