"""Prepared requests: a kept one changes nothing, whatever was asked before."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.admission import MAX_CACHED, PreparedRequest, PreparedRequests, prepare, read_request
from api.auth.keys import Caller
from api.chat import prefers_async
from api.openai.errors import ApiError
from api.openai.schemas import Kind
from api.services import Services
from api.settings import ApiSettings
from penstock.engine import Capabilities, ModelCard
from streaming.events import EventSettings, EventSubscriptions
from streaming.fleet.aliases import NO_ALIASES, Target
from streaming.order import Priority

CALLER = Caller("a", Priority.STANDARD)


def services(*, penalties: bool = True) -> Services:
    found = SimpleNamespace(
        settings=ApiSettings(),
        cards={"m": card(penalties=penalties)},
        aliases=NO_ALIASES,
        meant=lambda _tenant, name: Target(name),
        relay=SimpleNamespace(address="here"),
        subscriptions=EventSubscriptions(EventSettings(), {}),
    )
    return cast(Services, found)


def card(*, penalties: bool = True) -> ModelCard:
    can = Capabilities(penalties=penalties)
    return ModelCard(name="m", engine="sim", context=4096, max_output=512, capabilities=can, created=1)


def state(caller: Caller = CALLER) -> dict[str, Any]:
    return {"caller": caller}


def outcome(make: Any) -> Any:
    """What became of a request: all that its job has, or the error."""
    try:
        prepared: PreparedRequest = make()
    except ApiError as error:
        return error.status, error.body
    job = msgspec.structs.replace(prepared.job, prompt=prepared.prompt)
    asked = prepared.asked
    return job, prepared.ignored, asked.queue, asked.include_usage, asked.version_read


messages = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}
    ),
    st.sampled_from([
        *({"role": role, "content": "x"} for role in ("developer", "tool", "function", "robot")),
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x", "name": "y"},
        {"role": "user", "content": 5},
        {"role": "user", "content": "\ud800"},
        {"role": "function", "content": "x", "name": "f"},
        {"role": "assistant", "content": "", "refusal": "no"},
        "x",
    ]),
)  # fmt: skip
options = st.sampled_from([
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 5, "temperature": 0.5, "n": 2, "stop": ["a"], "seed": 3},
    {"queue": {"priority": "batch", "on_disconnect": "continue", "do_not_queue": True}},
    {"unknown": {"a": [1]}, "metadata": {"a": "b"}, "user": "u"},
    {"service_tier": "priority", "reasoning_effort": "none"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"max_tokens": 0},
    {"n": 1e999},
    {"presence_penalty": 1},
    {"endpoint": "/v1/chat/completions"},
    {"endpoint": "/v1/completions", "prompt": "x"},
])  # fmt: skip
chats = st.builds(
    lambda fields, said, ascii_only: json.dumps(
        {"model": "m", "messages": said, **fields}, ensure_ascii=ascii_only
    ).encode(errors="surrogatepass"),
    options,
    st.lists(messages, max_size=3),
    st.booleans(),
)


kinds = st.sampled_from(["chat", "job"])


@given(st.lists(st.tuples(kinds, chats), min_size=1, max_size=6), st.booleans())
def test_a_request_is_prepared_alike_whatever_was_asked_before(asked: list[tuple[Kind, bytes]], waits: bool) -> None:
    """Also after the same options with other messages or at another endpoint, valid or not, and after an error."""
    served, prepared = services(), PreparedRequests()
    for kind, body in [*asked, *asked]:
        kept = outcome(lambda kind=kind, body=body: prepared.read(served, state(), kind, body, waits=waits))
        fresh = outcome(
            lambda kind=kind, body=body: prepare(served, CALLER, read_request(served, state(), kind, body), waits=waits)
        )
        assert kept == fresh


BODY = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "presence_penalty": 1}'


def test_a_request_is_prepared_anew_for_another_card_caller_and_way_to_answer() -> None:
    served, prepared = services(), PreparedRequests()
    first = prepared.read(served, state(), "chat", BODY, waits=True)
    assert first.job.reply_to == "here" and not prepared.read(served, state(), "chat", BODY, waits=False).job.reply_to
    higher = Caller("b", Priority.INTERACTIVE)
    other = prepared.read(served, state(higher), "chat", BODY, waits=True).job
    assert (first.job.tenant, first.job.priority) == ("a", Priority.STANDARD)
    assert (other.tenant, other.priority) == ("b", Priority.INTERACTIVE)
    served.cards = {"m": card(penalties=False)}
    with pytest.raises(ApiError, match="presence_penalty"):
        prepared.read(served, state(), "chat", BODY, waits=True)


BAD = [b'"\xff"', b"[" * 2000 + b"]" * 2000, b"1" * 5000, b'"\\ud800"']


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", [b"x", b"messages", b"presence_penalty"])
def test_a_repeated_field_is_validated_too(field: bytes, bad: bytes) -> None:
    """Only its last value counts, but the others are read."""
    served, prepared = services(), PreparedRequests()
    body = BODY.replace(b'{"model"', b'{"x": 1, "model"')
    repeated = body.replace(b'{"x"', b'{"%b": %b, "x"' % (field, bad))
    for each in (body, repeated, body, repeated):
        kept = outcome(lambda each=each: prepared.read(served, state(), "chat", each, waits=True))
        fresh = outcome(
            lambda each=each: prepare(served, CALLER, read_request(served, state(), "chat", each), waits=True)
        )
        assert kept == fresh and (each == body) == (kept[0] != 400)


def test_each_of_many_options_is_prepared_for_itself() -> None:
    served, prepared = services(), PreparedRequests()
    for seed in [*range(MAX_CACHED + 8), 0]:
        body = BODY.replace(b'"presence_penalty": 1', b'"seed": %d' % seed)
        assert prepared.read(served, state(), "chat", body, waits=True).job.sampling.seed == seed


def test_the_model_of_a_refused_request_is_noted() -> None:
    """The record of a refusal names it; also of one that comes again."""
    served, prepared = services(penalties=False), PreparedRequests()
    for kind in ("chat", "job", "chat"):
        noted = state()
        with pytest.raises(ApiError, match="presence_penalty"):
            prepared.read(served, noted, kind, BODY, waits=True)  # type: ignore[arg-type]
        assert noted["model"] == "m"
    plain = BODY.replace(b', "presence_penalty": 1', b"")
    for _ in range(2):
        noted = state()
        prepared.read(served, noted, "chat", plain, waits=True)
        assert noted["model"] == "m"


@pytest.mark.parametrize("prefer", ["respond-async", "Respond-Async", "wait=10, respond-async;foo=1"])
def test_who_asks_for_it_gets_a_job_instead_of_an_answer(prefer: str) -> None:
    """Prefer (RFC 7240) has other uses, and browsers and libraries send them."""
    assert prefers_async(prefer)
    for other in ("", "wait=10", "return=minimal, a=b", "respond-asynchronously", "handling=respond-async"):
        assert not prefers_async(other)
