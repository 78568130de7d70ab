"""Floods of refused requests: what a sender is answered, what others are answered meanwhile, what is written down."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from house import House, eventually, key_rows, unstarted
from hypothesis import given
from hypothesis import strategies as st

from api.auth.floods import BUCKET_S, MAX_SENDERS, Buckets
from api.auth.hosts import Addresses
from api.settings import ApiSettings

A_MINUTE = 3
"""Tokens of a bucket here: one comes back in 20 s."""
FLOOD = 30
SETTINGS = f"""
[api]
refusals_per_minute = {A_MINUTE}
trusted_proxies = ["127.0.0.1"]
body_limit = 1024
"""


# --- buckets ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100), st.lists(st.floats(0, 30), max_size=200))
def test_no_window_has_more_than_what_a_bucket_holds_and_gets(per_minute: int, pauses_s: list[float]) -> None:
    now_s, taken = 0.0, list[float]()
    buckets = Buckets(per_minute, lambda: now_s)
    for pause_s in pauses_s:
        now_s += pause_s
        told_s = buckets.wait_s("a")
        assert buckets.take("a") == told_s
        if not told_s:
            taken.append(now_s)
    for first, start_s in enumerate(taken):
        for last, end_s in enumerate(taken[first:], first):
            assert last - first + 1 <= per_minute * (1 + (end_s - start_s) / BUCKET_S) + 1e-6


def test_whoever_waits_as_told_finds_a_token() -> None:
    now_s = 0.0
    buckets = Buckets(2, lambda: now_s)
    assert [buckets.take("a"), buckets.take("a"), buckets.take("b")] == [0.0, 0.0, 0.0]
    now_s += buckets.take("a")
    assert 0.0 < now_s <= BUCKET_S and buckets.take("a") == 0.0 < buckets.take("a")


def test_buckets_take_bounded_memory() -> None:
    """Full ones are forgotten, and of too many those that were used longest ago."""
    now_s = 0.0
    buckets = Buckets(60, lambda: now_s)
    for number in range(2 * MAX_SENDERS):
        buckets.take(str(number))
    assert len(buckets.full_at) == MAX_SENDERS
    now_s = 2 * BUCKET_S
    buckets.take("late")
    assert len(buckets.full_at) == 1


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "said", "address"),
    [
        ("9.9.9.9", ("1.1.1.1",), "9.9.9.9"),  # no proxy: it says what it likes
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("6.6.6.6, 1.1.1.1",), "1.1.1.1"),
        ("10.0.0.1", ("6.6.6.6", "1.1.1.1, 10.0.0.2"), "1.1.1.1"),
        ("10.0.0.1", ("1.1.1.1:4711",), "1.1.1.1"),
        ("::ffff:10.0.0.1", ("[2001:db8::1]:80",), "2001:db8::1"),
        ("10.0.0.1", ("6.6.6.6, nonsense",), "10.0.0.1"),
        ("", ("6.6.6.6",), ""),
    ],
)
def test_only_a_trusted_proxy_says_where_a_request_comes_from(peer: str, said: tuple[str, ...], address: str) -> None:
    """Its own word is the last one: what stands before it, anybody may have written."""
    addresses = Addresses(ApiSettings(trusted_proxies=("10.0.0.0/8",)).proxy_networks)
    headers = [(b"x-forwarded-for", each.encode()) for each in said]
    assert addresses.of({"client": (peer, 1) if peer else None, "headers": headers}) == address


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    (folder / "penstock.toml").write_text(SETTINGS + key_rows(noisy="", quiet="", ops="admin = true"))
    with unstarted(folder) as house:
        house.start_api()
        yield house


def sent_by(address: str, key: str = "") -> dict[str, str]:
    return {"X-Forwarded-For": address, **({"Authorization": f"Bearer {key}"} if key else {})}


def code_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[2])["error"]["code"]


def lines_of(house: House, address: str) -> list[dict[str, Any]]:
    written = [json.loads(line) for line in house.log("api").splitlines()]
    return [line for line in written if line["logger"] == "api.access" and line["address"] == address]


def is_bounded(found: Counter[tuple[int, str]], refusal: tuple[int, str]) -> bool:
    """Whether a flood got the refusal as often as a bucket holds, or once more, and 429 otherwise."""
    return found[refusal] in (A_MINUTE, A_MINUTE + 1) and found[429, "too_many_refusals"] == FLOOD - found[refusal]


@pytest.mark.slow
def test_who_guesses_keys_is_told_to_wait_and_nobody_else_is(keyed: House) -> None:
    """Neither another address behind the same proxy, nor a holder of a key at the same address."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    answers = [keyed.post("/v1/chat/completions", body, sent_by("203.0.113.1", "guess")) for _ in range(FLOOD)]
    assert is_bounded(Counter(map(code_of, answers)), (401, "invalid_api_key"))
    assert all(int(headers["retry-after"]) >= 1 for status, headers, _ in answers if status == 429)
    assert code_of(keyed.request("GET", "/v1/jobs", None, sent_by("203.0.113.2"))) == (401, "invalid_api_key")
    assert keyed.request("GET", "/v1/jobs", None, sent_by("203.0.113.1", "quiet"))[0] == 200
    eventually(lambda: any(line["key"] == "quiet" for line in lines_of(keyed, "203.0.113.1")))
    refused = [line for line in lines_of(keyed, "203.0.113.1") if line["key"] is None]
    assert len(refused) <= A_MINUTE + 1 and {line["status"] for line in refused} == {401}


@pytest.mark.slow
def test_logins_are_told_to_wait_before_anything_is_looked_up(keyed: House) -> None:
    """A right one, too: else a guess could be told from a wrong one."""

    def log_in(address: str, key: str) -> tuple[int, dict[str, str], bytes]:
        return keyed.post("/console/session", {"key": key}, sent_by(address))

    found = Counter(code_of(log_in("203.0.113.3", "guess")) for _ in range(FLOOD))
    assert is_bounded(found, (401, "invalid_api_key"))
    assert code_of(log_in("203.0.113.3", "ops")) == (429, "too_many_refusals")
    assert log_in("203.0.113.4", "ops")[0] == 200


@pytest.mark.slow
def test_a_key_that_sends_too_large_bodies_is_stopped_before_they_are_read(keyed: House) -> None:
    """Its bodies of a fair size are served, and those of other keys, of unknown size, too."""

    def send(key: str, size: int, *, chunked: bool) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", keyed.port, timeout=60)
        data = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "x" * size}]}).encode()
        headers = {"Content-Type": "application/json", **sent_by("203.0.113.5", key)}
        try:
            connection.request("POST", "/v1/jobs", iter([data]) if chunked else data, headers, encode_chunked=chunked)
            with connection.getresponse() as answer:
                return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    found = Counter(code_of(send("noisy", 4096, chunked=bool(number % 2))) for number in range(FLOOD))
    assert is_bounded(found, (413, "payload_too_large"))
    assert code_of(send("noisy", 10, chunked=True)) == (429, "too_many_refusals")
    assert send("noisy", 10, chunked=False)[0] < 400 > send("quiet", 10, chunked=True)[0]


@pytest.mark.slow
def test_this_machine_and_its_proxies_have_no_bucket(keyed: House) -> None:
    """Anybody may be behind them."""
    assert {keyed.request("GET", "/v1/jobs", None, {})[0] for _ in range(FLOOD)} == {401}
