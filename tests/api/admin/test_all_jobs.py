"""/admin/jobs, /admin/keys and /admin/overview: every tenant's jobs, nobody's prompts, and long lists page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from openapi_document import SCHEMAS, conforms

from api.admin import overview
from streaming.redis.client import RedisClient

SECRET = "a prompt that is nobody else's"


KEYS = {"root": key_of("sk-root", "ops", admin=True), "a": key_of("sk-a", "a"), "b": key_of("sk-b", "b")}
ADMIN = {"Authorization": "Bearer sk-root"}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, KEYS) as api:
        yield api


async def put(api: LocalApi, by: str, lane: str = "standard", **metadata: str) -> str:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": SECRET}],
        "metadata": metadata,
        "queue": {"priority": lane},
    }
    answer = await api.post("/v1/jobs", body, Authorization=f"Bearer sk-{by}")
    return str(answer.json()["id"])


async def listed(api: LocalApi, **params: str | int) -> dict[str, Any]:
    answer = await api.client.get("/admin/jobs", params=params, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert conforms(found, SCHEMAS["AdminJobList"])
    assert {job["tenant"] for job in found["data"] if job["preview"] is not None} <= {"ops"}  # the key's own tenant
    assert answer.text.count(SECRET) == sum(job["preview"] == SECRET for job in found["data"])
    return found


def ids(page: dict[str, Any]) -> list[str]:
    return [job["id"] for job in page["data"]]


async def test_an_admin_lists_the_jobs_of_any_tenant(api: LocalApi) -> None:
    own, of_a, of_b = await put(api, "root"), await put(api, "a", "batch", order="A-17"), await put(api, "b")
    assert ids(await listed(api)) == [own]
    assert ids(await listed(api, tenant="a")) == [of_a]
    everyone = await listed(api, tenant="*")
    assert {job["id"]: job["tenant"] for job in everyone["data"]} == {own: "ops", of_a: "a", of_b: "b"}
    for one, params in (
        (of_a, {"lane": "batch"}), (of_a, {"search": "A-1"}), (of_b, {"search": of_b}), (of_b, {"search": of_b[:14]}),
        (own, {"search": SECRET[1:5].upper()}),
    ):  # fmt: skip
        assert ids(await listed(api, tenant="*", **params)) == [one], params
    for params in ({"status": "failed"}, {"model": "other"}, {"lane": "interactive"}, {"search": "zz"}):
        assert ids(await listed(api, tenant="*", **params)) == [], params
    wrong = {"lane": "fast", "status": "lost", "tenant": "a b", "search": "x" * 65, "cursor": "now", "limit": "101"}
    for name, value in wrong.items():
        answer = await api.client.get("/admin/jobs", params={name: value}, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_tenant_filters_its_jobs_and_sees_what_they_asked(api: LocalApi) -> None:
    """By each filter alone and by all; never those of another tenant."""
    made = [await put(api, "a", lane) for lane in ("batch", "standard", "batch")]
    await put(api, "b", "batch")
    own = {"Authorization": "Bearer sk-a"}

    async def found(**params: str) -> list[dict[str, Any]]:
        answer = (await api.client.get("/v1/jobs", params=params, headers=own)).json()
        assert conforms(answer, SCHEMAS["JobList"])
        return list(answer["data"])

    rows = await found()
    assert [row["id"] for row in rows] == made[::-1] and {row["preview"] for row in rows} == {SECRET}
    first = next(row["created_at"] for row in rows if row["id"] == made[0])
    for wanted, params in (
        ([made[2], made[0]], {"lane": "batch"}), ([made[1]], {"lane": "standard", "model": "sim", "status": "queued"}),
        ([], {"model": "other"}), (made[::-1], {"since": str(first)}), ([], {"since": str(first + 3600)}),
        ([], {"until": str(first - 1)}), (made[::-1], {"until": str(first + 3600)}), (made[::-1], {"tenant": "b"}),
    ):  # fmt: skip
        assert [row["id"] for row in await found(**params)] == wanted, params


async def test_a_page_ends_behind_a_job_that_was_cancelled_before_its_time(api: LocalApi, wire: RedisClient) -> None:
    """Such a job is listed by the time of its cancel, which its record does not tell: the next page begins there."""
    later = {"model": "sim", "messages": [{"role": "user", "content": SECRET}], "queue": {"delay_ms": 3_600_000}}
    made: list[str] = []
    for wanted in (True, None, False, True):
        if wanted is None:
            answer = await api.post("/v1/jobs", later | {"metadata": {"is": "yes"}}, Authorization="Bearer sk-a")
            made.append(answer.json()["id"])
            await api.post(f"/admin/jobs/{made[-1]}/cancel", {}, **ADMIN)
        else:
            made.append(await put(api, "a", **({"is": "yes"} if wanted else {})))
        listed_ms = await wire.now_ms()
        while await wire.now_ms() == listed_ms:  # no two are listed at one time
            await asyncio.sleep(0)
    oldest, cancelled, _, newest = made
    page = await listed(api, tenant="a", search="yes", limit=2)
    assert ids(page) == [newest, cancelled]
    assert ids(await listed(api, tenant="a", search="yes", limit=2, cursor=page["next_cursor"])) == [oldest]


@pytest.mark.slow
async def test_a_long_list_comes_in_pages_each_job_once(api: LocalApi) -> None:
    made = [await put(api, "ab"[number % 2], number="even" if number % 4 else "four") for number in range(60)]
    for number in range(20):
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": SECRET}],
            "queue": {"delay_ms": 60_000 + number},
        }
        answer = await api.post("/v1/jobs", body, Authorization=f"Bearer sk-{'ab'[number % 2]}")
        made.append(answer.json()["id"])
    filters: list[tuple[dict[str, str], list[str]]] = [({}, made), ({"search": "four"}, made[:60:4])]
    for params, wanted in filters:
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = await listed(api, tenant="*", limit=11, **params, **cursor)
            assert len(page["data"]) <= 11
            seen += ids(page)
            if not page["has_more"]:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert len(seen) == len(set(seen)) and set(seen) == set(wanted)


async def test_of_other_tenants_jobs_it_shows_all_but_request_and_answer(api: LocalApi) -> None:
    own, of_a = await put(api, "root"), await put(api, "a")
    for job, readable in ((own, True), (of_a, False)):
        answer = await api.client.get(f"/admin/jobs/{job}", headers=ADMIN)
        shown = answer.json()
        assert conforms(shown, SCHEMAS["AdminJob"]) and shown["readable"] is readable and SECRET not in answer.text
    assert (await api.client.get(f"/v1/jobs/{of_a}?include=input", headers=ADMIN)).status_code == 404
    unknown = await api.client.get(f"/admin/jobs/{of_a[:-1]}{'1' if of_a[-1] == '0' else '0'}", headers=ADMIN)
    assert unknown.status_code == 404
    assert (await api.client.get("/admin/jobs/job_x", headers=ADMIN)).status_code == 404


async def test_a_cancelled_job_says_who_cancelled_it(api: LocalApi) -> None:
    """Its owner and an administrator see the same, in the job, in its error, in both lists and in its last event."""
    for by, path, who in (("a", "/v1", {"Authorization": "Bearer sk-a"}), ("root", "/admin", ADMIN)):
        job, own = await put(api, "a"), {"Authorization": "Bearer sk-a"}
        first = (await api.client.post(f"{path}/jobs/{job}/cancel", headers=who)).json()
        again = (await api.client.post(f"/v1/jobs/{job}/cancel", headers=own)).json()
        assert (first["already_ended"], again["already_ended"]) == (False, True)
        expected = {"a": "owner", "root": "admin"}[by]
        shown = (await api.client.get(f"/v1/jobs/{job}", headers=own)).json()
        rows = [(await api.client.get("/v1/jobs", headers=own)).json()["data"][0]]
        rows.append((await listed(api, tenant="a"))["data"][0])
        for each in (first, again, shown, *rows):
            assert (each["cancelled_by"], each["error"]["cancelled_by"]) == (expected, expected)
            assert (each["error"]["type"], each["error"]["code"]) == ("cancelled_error", "job_cancelled")
        refused = await api.client.get(f"/v1/jobs/{job}/result", headers=own)
        assert refused.status_code == 409 and refused.json()["error"] == shown["error"]
        events = (await api.client.get(f"/v1/jobs/{job}/events", headers=own)).text
        assert f'"cancelled_by":"{expected}"' in events.split("event: cancelled")[1]
    left = await put(api, "a")
    assert (await api.client.get(f"/v1/jobs/{left}", headers=own)).json()["cancelled_by"] is None


async def test_the_keys_are_listed_without_what_would_open_anything(api: LocalApi) -> None:
    answer = await api.client.get("/admin/keys", headers=ADMIN)
    assert conforms(answer.json(), SCHEMAS["KeyList"])
    assert [(one["name"], one["tenant"], one["highest_lane"]) for one in answer.json()["data"]] == [
        ("a", "a", "interactive"), ("b", "b", "interactive"), ("root", "ops", "interactive"),
    ]  # fmt: skip
    assert "sk-" not in answer.text and KEYS["a"].sha256 not in answer.text


async def test_all_who_look_at_once_cost_one_look(api: LocalApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are told why jobs wait."""
    await put(api, "a")
    looks = 0

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return real(*args)

    real = overview.read
    monkeypatch.setattr(overview, "read", counted)
    answers = await asyncio.gather(*(api.client.get("/admin/overview", headers=ADMIN) for _ in range(12)))
    assert looks == 1 and len({answer.content for answer in answers}) == 1
    found = answers[0].json()
    assert conforms(found, SCHEMAS["Overview"])
    assert found["verdict"]["flow"] == "stopped" and "no worker runs" in found["verdict"]["title"]
    assert found["pools"][0]["lanes"]["standard"]["waiting"] == 1
