"""Callers with tokens of an issuer, at several API processes that read `[oidc]`; what they do is in one audit log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from house import eventually, unstarted
from issuer import AUDIENCE, issuing, private_key

from bench.ports import free_port
from cli.__main__ import main

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_a_token_is_served_at_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without its issuer; without a token, nobody is. An admin's token works for commands."""
    with issuing() as issuer, unstarted(tmp_path) as house:
        text = f'[oidc]\nissuer = "{issuer.url}"\naudience = "{AUDIENCE}"\nscope_claim = "roles"\n'
        (tmp_path / "penstock.toml").write_text(text)
        other = free_port()
        house.start_all("workers")
        house.start_api(other)
        token, admin = issuer.token(), issuer.token(roles=["penstock:admin"], sub="bob", tenant="ops")
        headers, forged = {"Authorization": f"Bearer {token}"}, issuer.token(key=private_key("RSA", 1))
        for port in (house.port, other):
            eventually(lambda port=port: house.get("/readyz", port)[0] == 200)
            assert house.request("POST", "/v1/chat/completions", CHAT, headers, port)[0] == 200
            assert house.request("GET", "/v1/models", None, {"Authorization": f"Bearer {forged}"}, port)[0] == 401
            assert house.request("GET", "/v1/models", None, {"Authorization": ""}, port)[0] == 401
        issuer.status = 500
        assert house.request("POST", "/v1/chat/completions", CHAT, headers)[0] == 200
        monkeypatch.setenv("PENSTOCK_API_KEY", admin)
        for number, port in enumerate((house.port, other)):
            url = f"http://127.0.0.1:{port}"
            assert main(["keys", "create", f"team-{number}", "--expires", "60s", "--url", url]) == 0
        assert main(["keys", "create", "web", "--url", house.url]) != 0

        def noted() -> bool:
            capsys.readouterr()
            assert main(["audit", "--json", "--url", house.url]) == 0
            found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            said = {(each["action"], each["outcome"], each["who"], each["detail"].get("tenant")) for each in found}
            return said == {
                ("key.create", "done", "oidc:bob", "team-0"),
                ("key.create", "done", "oidc:bob", "team-1"),
                ("key.create", "refused", "oidc:bob", "web"),
            }

        eventually(noted)
        log = house.log("api")
        assert "Traceback" not in log and not any(each in log for each in (token, admin, forged))
