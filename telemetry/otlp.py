"""OTLP: encodes ended spans as protobuf, and sends them to a collector in batches, from a thread of its own.

A request has six spans. OpenTelemetry's SDK and exporter take 340 us of CPU for each, this file takes 22
(docs/decisions/0011). The numbers of fields are those of opentelemetry-proto: common.proto, trace.proto and
trace_service.proto.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias, get_args
from urllib.parse import unquote

from penstock.loops import ExpectedErrors, backoff
from telemetry.redaction import HIDDEN, clean, is_secret

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]
Value: TypeAlias = str | int | float | bool | Sequence[str]
Attributes: TypeAlias = Mapping[str, Value]

# --- protobuf ---------------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    """Encode an unsigned number."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_TAGS = [_varint(number << 3 | 2) for number in range(16)]
"""Of fields whose value is bytes, by the field's number."""
_LENGTHS = [_varint(size) for size in range(512)]


def _field(number: int, data: bytes) -> bytes:
    """Encode a field that holds bytes, a text or a message."""
    size = len(data)
    return _TAGS[number] + (_LENGTHS[size] if size < len(_LENGTHS) else _varint(size)) + data


def _value(value: object) -> bytes:
    """Encode an AnyValue."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    if isinstance(value, list):
        return _field(5, b"".join([_field(1, _value(each)) for each in value]))
    return _field(1, str(value).encode("utf-8", "replace"))


@lru_cache(maxsize=4096, typed=True)
def _attribute(number: int, name: str, value: str | int | float | bool | tuple[str, ...]) -> bytes:
    """Encode a KeyValue without secrets, as this field of its message. Most are those of the span before."""
    return _field(number, _field(1, name.encode()) + _field(2, _value(HIDDEN if is_secret(name) else clean(value))))


def _attributes(number: int, attributes: Attributes) -> bytes:
    return b"".join([
        _attribute(number, name, tuple(value) if isinstance(value, list) else value)
        for name, value in attributes.items()
    ])  # fmt: skip


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    return _field(5, name.encode("utf-8", "replace"))


# --- spans ------------------------------------------------------------------------------------------------------------


_KINDS: Mapping[str, bytes] = {kind: bytes((0x30, number)) for number, kind in enumerate(get_args(Kind), 1)}
_TIMES = struct.Struct("<BQBQ")


def encode_span(
    carrier: Mapping[str, str],
    parent: Mapping[str, str],
    name: str,
    kind: Kind,
    times: tuple[int, int],
    attributes: Attributes,
    events: Iterable[tuple[str, Attributes, int]],
    links: Iterable[str],
    error: str | None,
) -> bytes:
    """Encode a span. `carrier` has its `traceparent` and `tracestate`, `parent` the former if there is one; they and
    `links` are valid headers. `times`: begin and end (Unix nanoseconds); `events` have a name, attributes and a time;
    `error`: why the operation failed."""
    traceparent = carrier["traceparent"]
    parts = [_ids(traceparent), _name(name), _KINDS[kind], _TIMES.pack(0x39, times[0], 0x41, times[1])]
    parts.append(_attributes(9, attributes))
    if tracestate := carrier.get("tracestate"):
        parts.append(_field(3, tracestate.encode()))
    if parent:
        parts.append(b"\x22\x08" + bytes.fromhex(parent["traceparent"][36:52]))
    for what, about, at_ns in events:
        parts.append(_field(11, struct.pack("<BQ", 0x09, at_ns) + _field(2, what.encode()) + _attributes(3, about)))
    for link in links:
        parts.append(_field(13, _ids(link) + b"\x35" + _flags(link)))
    if error is not None:
        parts.append(_field(15, _field(2, error.encode("utf-8", "replace")) + b"\x18\x02"))
    parts.append(b"\x85\x01" + _flags(traceparent))
    return _field(2, b"".join(parts))


def _ids(traceparent: str) -> bytes:
    """Encode the ids of trace and span, the first fields of spans and links."""
    return b"\x0a\x10" + bytes.fromhex(traceparent[3:35]) + b"\x12\x08" + bytes.fromhex(traceparent[36:52])


def _flags(traceparent: str) -> bytes:
    """Encode the flags: those of the context, and (bits 8 and 9) that the parent may be of another process."""
    return bytes((int(traceparent[53:55], 16), 3, 0, 0))


# --- the thread -------------------------------------------------------------------------------------------------------


EXPORT_TIMEOUT_S = 5.0
"""For one batch including retries; a batch that the collector has not accepted by then is dropped."""
RETRYABLE = (429, 502, 503, 504)
"""Statuses after which a batch is sent again."""


class SpanSender:
    """Sends encoded spans in batches. The standard variables OTEL_BSP_SCHEDULE_DELAY (ms), OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE, OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES apply.

    Raises ValueError if one of them is malformed.
    """

    def __init__(self, service: str, endpoint: str) -> None:
        import httpx2  # noqa: PLC0415 - it takes 60 ms to import, and few deployments have a collector

        about = _pairs("OTEL_RESOURCE_ATTRIBUTES") | {"service.name": service, "service.namespace": "penstock"}
        self._resource = _field(1, _attributes(1, about))
        self._scope = _field(1, _field(1, b"penstock"))
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._delay_s = _number("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        self._most = _number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._batch = min(self._most, _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512))
        headers = {"content-type": "application/x-protobuf", **_pairs("OTEL_EXPORTER_OTLP_HEADERS")}
        self._client = httpx2.Client(headers=headers, timeout=EXPORT_TIMEOUT_S)
        try:
            httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"telemetry.otlp_endpoint is {endpoint!r}: {error}") from None
        self._failed = httpx2.HTTPError
        self._dropped = ExpectedErrors(Dropped, log.warning, "spans are dropped: %s", once=True)
        self._waiting: deque[bytes] = deque()
        self._due, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def send(self, span: bytes) -> None:
        """Queue an encoded span; it is dropped if too many wait. For any thread."""
        waiting = self._waiting
        if len(waiting) < self._most:
            waiting.append(span)
        else:
            with self._dropped:
                raise Dropped(f"{self._most} wait for the collector (OTEL_BSP_MAX_QUEUE_SIZE)")
        if len(waiting) >= self._batch:
            self._due.set()

    def close(self, timeout_s: float) -> None:
        """Send the last spans, and end the thread; give up on them after `timeout_s`."""
        self._closing.set()
        self._due.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set() or self._waiting:
            if not self._closing.is_set():
                self._due.wait(self._delay_s)
                self._due.clear()
            while self._waiting:
                with self._dropped:
                    self._post([self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))])
        self._client.close()

    def _post(self, spans: Sequence[bytes]) -> None:
        """Send a batch, more than once if need be. Raises Dropped."""
        body = _field(1, self._resource + _field(2, self._scope + b"".join(spans)))
        until = time.monotonic() + EXPORT_TIMEOUT_S
        for pause_s in backoff(0.5, EXPORT_TIMEOUT_S):
            try:
                with self._client.stream("POST", self._url, content=body) as answer:  # its body is of no interest
                    status = answer.status_code
                failure, again = f"the collector answered HTTP {status}", status in RETRYABLE
                if status < 300:
                    return
            except self._failed as error:
                failure, again = f"the collector cannot be reached: {error or type(error).__name__}", True
            if not again or time.monotonic() + pause_s > until:
                raise Dropped(failure)
            self._closing.wait(pause_s)


class Dropped(Exception):
    """Spans are lost, and why."""


def _number(name: str, default: int) -> int:
    """Read a positive number from the environment. Raises ValueError."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not int(text):
        raise ValueError(f"the variable {name} is {text!r}: write a positive whole number, or unset it")
    return int(text)


def _pairs(name: str) -> dict[str, str]:
    """Read `name=value` pairs, separated by commas, from the environment; values are URL-encoded. Raises ValueError."""
    found = {}
    for pair in os.environ.get(name, "").split(","):
        key, tied, value = pair.partition("=")
        if not pair.strip():
            continue
        if not tied or not key.strip():
            raise ValueError(f"the variable {name} needs pairs like name=value, separated by commas")
        found[key.strip()] = unquote(value.strip())
    return found
