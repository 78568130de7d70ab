"""Lifecycle events of jobs and batches in the store: their outboxes, webhook messages, counts of redelivered messages.

The script that changes a job's state appends the event in the same step, if the job's record names a recipient. An
entry stays until it is acknowledged, so delivery is at least once; an event's id is derived from its subject and type,
so receivers can detect duplicates. Nothing here knows brokers or receivers. The settings [webhooks.<name>] and [events]
are here too.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec

from penstock.config import Secret
from streaming.errors import UnknownMessage
from streaming.ids import check_tenant, joined, message_id, partition_of
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import Call, ClientUser, RedisClient, page, whole

End: TypeAlias = Literal[
    "job.completed", "job.failed", "job.cancelled", "job.expired",
    "batch.completed", "batch.failed", "batch.cancelled", "batch.expired",
    "response.completed", "response.failed", "response.cancelled", "response.incomplete",
]  # fmt: skip

ENDS: tuple[End, ...] = get_args(End)


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [webhooks.<name>]: an endpoint that receives the final events of one tenant's jobs, batches and
    responses."""

    url: Secret
    secret: Secret
    """whsec_ and 24 to 64 random bytes in base64; the receiver needs the same."""
    tenant: str = "local"
    """The tenant; `local` is every caller of a server without keys."""
    events: tuple[End, ...] = ENDS
    """Events that it receives without being named; empty: only those of requests that name it in `queue.webhook`."""
    urls: tuple[str, ...] = ()
    """URLs that `queue.webhook` may be instead of this row's name: each of these, and every URL below its path. All
    get this row's secret, networks and limits."""
    networks: tuple[str, ...] = ()
    """Private networks in which the endpoint may be, such as 10.1.0.0/16; without any its address must be public."""
    allow_http: bool = False
    """Allow an endpoint without TLS: others on the network path can read the messages."""
    ca_file: Path | None = None
    """PEM file of the certificate authorities to trust; None: those of this machine."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 10.0
    """For one attempt, from name resolution to the answer."""
    give_up_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 86_400.0
    """How long attempts are retried, with backoff."""

    def __post_init__(self) -> None:
        """Raises ValueError, whose text never has the secret."""
        check_tenant("tenant", self.tenant)
        for field, text in (("url", self.url), *(("urls", each) for each in self.urls)):
            url = urlsplit(text)
            if url.scheme not in PORTS or not url.hostname or url.username is not None:
                raise ValueError(f"{field} must be https://host/path, without a user")
            if not text.isascii():
                raise ValueError(f"{field} must be ASCII: write its host as xn--... and escape its path with %")
            if url.scheme == "http" and not self.allow_http:
                raise ValueError(f"{field} must begin with https:// (allow_http = true lifts that)")
            if not _port_of(url):
                raise ValueError(f"{field} must have a port from 1 to 65535, or none")
            if field == "urls" and (_origin_and_path(text) is None or url.query):
                raise ValueError(
                    "urls must be plain ASCII without spaces, '#', '?', '..' and escapes of such characters"
                )
        for network in self.networks:
            ipaddress.ip_network(network)
        signing_key(self.secret)


PORTS = {"https": 443, "http": 80}
"""By scheme: the port of a URL that names none."""


def _port_of(url: SplitResult) -> int:
    """The port of a URL; 0 if there cannot be such a one. The library's error may repeat a part of a password."""
    try:
        return PORTS.get(url.scheme, 0) if url.port is None else url.port
    except ValueError:
        return 0


_PRINTABLE = re.compile(r"""[!"$-\[\]-~]{1,2048}""")
"""Visible ASCII without the backslash and '#', which parsers of URLs read differently."""
_CHARACTER = r"([\w~!$&'()*+,:=@-]|%(?!2[35EF]|3[BF]|5C|7F)[2-7][0-9A-F])"
"""Of a path: as it is, or an escape of visible ASCII or a space, but of none of # % . / ; ? and the backslash."""
_WITHIN = re.compile(rf"(/(\.?(?!%20){_CHARACTER}({_CHARACTER}|[.;])*)?)*", re.ASCII | re.IGNORECASE)
"""A path that no server resolves to one outside its beginning: a segment begins with one dot at most, and goes on."""


def _origin_and_path(text: str) -> tuple[tuple[str, str, int], str] | None:
    """Split a URL into its origin (scheme, host, port) and its path; None if it is not one that may be compared."""
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    port = _port_of(url)
    if not _PRINTABLE.fullmatch(text) or not url.hostname or url.username is not None or not port:
        return None
    return ((url.scheme, url.hostname, port), url.path or "/") if _WITHIN.fullmatch(url.path) else None


def allows_url(endpoint: WebhookSettings, text: str) -> bool:
    """Whether a request may name this URL: `urls` has its origin and, up to a whole segment, the beginning of its
    path."""
    asked = _origin_and_path(text)
    if asked is None:
        return False
    (origin, path) = asked
    allowed = [each for each in map(_origin_and_path, endpoint.urls) if each is not None and each[0] == origin]
    return any(path == prefix or path.startswith(prefix.rstrip("/") + "/") for _, prefix in allowed)


def signing_key(secret: str) -> bytes:
    """Decode a whsec_ secret. Raises ValueError, whose text never has the secret."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("secret must be whsec_ and 24 to 64 bytes in base64")
    return key


class EventSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [events]."""

    publish_url: str = ""
    """URL of the broker that lifecycle events are published to, as kombu takes it (redis://..., amqp://...); empty:
    none."""
    publish_queue: str = "penstock.events"
    """Queue at that broker; created if necessary."""
    source: str = "/penstock"
    """The CloudEvents `source`, which names this deployment."""
    results: bool = False
    """Whether events of completed jobs include the result: then every reader of the queue can read the answers."""
    take_url: str = ""
    """URL of the broker from which jobs are consumed; empty: none."""
    take_queue: str = "penstock.jobs"
    """Invalid messages go to the queue of this name with the suffix `.rejected`."""
    take_tenant: str = "local"
    """The tenant of these jobs, whatever a message says."""
    take_priority: Priority = Priority.STANDARD
    """The highest lane that they may use."""
    take_ahead: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 32
    """Messages prefetched by one process."""

    def __post_init__(self) -> None:
        check_tenant("take_tenant", self.take_tenant)


log = logging.getLogger(__name__)

Box: TypeAlias = Literal["broker", "webhooks"]

LEASES_HELD = 2
"""Events that a consumer took and did not acknowledge within so many leases are given to another."""


@dataclass(frozen=True, slots=True)
class Event:
    """One lifecycle event, at `at_ms` of Redis time. `type` is such as job.started or batch.completed. A response's
    event has its job as the subject, and a type such as response.completed."""

    subject: str
    """Id of the job or batch."""
    tenant: str
    type: str
    at_ms: int
    partition: int
    entry: str
    """Id of its entry in the outbox."""
    recipients: str = ""
    """The letters of the job's record (see Job.events)."""
    webhook: str = ""
    """The webhook that its request names, as the job's record holds it; "": none."""

    @property
    def id(self) -> str:
        """Derived from subject and type, which are unique: a job starts once and ends once."""
        return "evt_" + hashlib.sha256(f"{self.subject}:{self.type}".encode()).hexdigest()[:32]


class EventSubscriptions:
    """Recipients of each tenant's events, as the letters that records hold (see Job.events)."""

    def __init__(self, events: EventSettings, webhooks: Mapping[str, WebhookSettings]) -> None:
        self._broker = "b" if events.publish_url else ""
        self._rows = webhooks
        self._webhooks = {(row.tenant, each.partition(".")[0]) for row in webhooks.values() for each in row.events}

    def of(self, tenant: str, kind: Literal["job", "response", "batch"]) -> str:
        """Recipients for a job whose client does not wait for the answer, for a response in the background, or for a
        batch, whose lines have no events of their own. Webhooks get a response's end as `response.*`, the broker as a
        job's."""
        letters = "wr" if kind == "response" else "w"
        return self._broker + (letters if (tenant, kind) in self._webhooks else "")

    def webhook(self, tenant: str, named: str) -> str:
        """Return the webhook that a request of the tenant names in `queue.webhook`, as records hold it: the name of an
        endpoint, after the URL and a line break if the request names a URL. Raises ValueError, whose text never has
        the URL."""
        own = {name: row for name, row in self._rows.items() if row.tenant == tenant}
        if named in own:
            return named
        for name, row in own.items():
            if named == row.url:
                return name
            if allows_url(row, named):
                return f"{named}\n{name}"
        if "://" in named:
            raise ValueError("is a URL that this server does not allow. Its operator may add it to `urls` of a webhook "
                             "of your tenant, in [webhooks.NAME]")  # fmt: skip
        known = f"Yours are {', '.join(own)}" if own else "There is none; the server's operator adds [webhooks.NAME]"
        raise ValueError(f"names no webhook of your tenant. {known}")


def with_webhook(letters: str, *, response: bool) -> str:
    """Add to the recipients of a job the webhook that its request names."""
    if "w" in letters:
        return letters + "h"
    return letters + ("wro" if response else "wo")


class Outbox:
    """Outbox of one kind of recipient. Stateless; every method raises Unavailable."""

    def __init__(self, client: RedisClient, box: Box) -> None:
        self._client, self._box = client, box

    async def collect(self, consumer: str, most: int) -> list[Event]:
        """Take up to `most` events of each partition that no other consumer has taken, the oldest first."""
        idle_ms = LEASES_HELD * self._client.settings.lease_ms
        args = (self._box, consumer, most, idle_ms)
        answers = await self._client.calls([("collect", partition, args) for partition in self._client.partitions])
        events = []
        for partition, answer in zip(self._client.partitions, answers, strict=True):
            for entry, *words in answer:
                try:
                    subject, tenant, kind, recipients, webhook = (word.decode() for word in words)
                except UnicodeDecodeError as error:
                    log.error("an event cannot be read and is dropped: %s", error)
                    await self._client.call("posted", partition, self._box, entry)
                else:
                    at_ms = int(entry.split(b"-")[0])
                    events.append(Event(subject, tenant, kind, at_ms, partition, entry.decode(), recipients, webhook))
        return events

    async def posted(self, events: Iterable[Event]) -> None:
        """Acknowledge events that were delivered."""
        entries: dict[int, list[str]] = {}
        for event in events:
            entries.setdefault(event.partition, []).append(event.entry)
        await self._client.calls([("posted", partition, (self._box, *each)) for partition, each in entries.items()])


def endpoints_for(event: Event, webhooks: Mapping[str, WebhookSettings]) -> Sequence[str]:
    """The webhooks that receive the event: those that subscribe to it, and the one that its request names, even if
    that is configured no more (its message waits for it)."""
    rows = {} if "o" in event.recipients else webhooks
    found = [name for name, row in rows.items() if row.tenant == event.tenant and event.type in row.events]
    row = webhooks.get(event.webhook.rpartition("\n")[2])
    if row is not None and row.tenant != event.tenant:
        log.error("an event is not sent to the webhook of another tenant", extra={"subject": event.subject})
    elif event.webhook and event.webhook not in found:
        found.append(event.webhook)
    return found


RETENTION_S = 86_400


class Redeliveries(ClientUser):
    """Counts how often a broker has redelivered a message without an outcome. Every method raises Unavailable."""

    async def begin(self, queue: str, message_id: str) -> int:
        """Count a redelivered message; returns how often it was redelivered without an outcome, this time included."""
        partition, key = self._counter_of(queue, message_id)
        commands = [("INCRBY", partition, (key, 1)), ("EXPIRE", partition, (key, RETENTION_S))]
        return int((await self._client.calls(commands))[0])

    async def settle(self, queue: str, message_id: str) -> None:
        """Delete the counter of a message that was accepted, rejected or postponed."""
        await self._client.call("DEL", *self._counter_of(queue, message_id))

    def _counter_of(self, queue: str, message_id: str) -> tuple[int, str]:
        digest = hashlib.sha256(joined(queue, message_id).encode(errors="surrogatepass"))
        partition = digest.digest()[0] % self._client.settings.partitions
        return partition, partition_key(partition, "redelivery", digest.hexdigest())


State: TypeAlias = Literal["pending", "delivered", "failed"]


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """A message that this process has taken to deliver now."""

    id: str
    attempt: int
    tries: int
    """Attempts of this round, including this one: a replay begins a new round."""
    age_ms: int
    """Time since the round began."""
    now_ms: int
    event: str
    type: str
    subject: str
    at_ms: int
    data: str = ""
    """The JSON object that the message says of its subject; "": its id alone."""
    url: str = ""
    """Where the request wants it to go; "": to the URL of the endpoint."""


@dataclass(frozen=True, slots=True)
class WebhookMessage:
    """A webhook message as stored. Times are Redis milliseconds, 0 for "not yet" or "never"."""

    id: str
    event: str
    type: str
    subject: str
    tenant: str
    endpoint: str
    state: State
    problem: str
    url: str
    """See DeliveryAttempt."""
    at_ms: int
    attempts: int
    tried_ms: int
    due_ms: int
    status: int
    """The HTTP status of the last answer; 0: there was none."""


TEXTS = ("event", "type", "subject", "tenant", "endpoint", "state", "problem", "url")
NUMBERS = ("at", "attempt", "tried", "due", "status")
"""Of a message's record, in the order of WebhookMessage."""


class Webhooks(ClientUser):
    """Webhook messages in the store. Every method raises Unavailable.

    A process takes a message for one attempt under a lease; if the process is lost, the message is due again after the
    lease. Nothing here knows HTTP, secrets or when to give up.
    """

    async def dispatch(self, event: Event, endpoints: Sequence[str], data: str = "") -> None:
        """Create a message with this data for each endpoint (of a request's own one with its URL, as in Event.webhook),
        and remove the event from the outbox."""
        args: list[str | int] = [event.entry, event.id, event.type, event.subject, event.tenant, event.at_ms]
        args += [2000 * self._client.settings.retention_s, data]
        for endpoint in endpoints:
            args += [message_id(event.partition, event.id, endpoint), endpoint]
        await self._client.call("dispatch", event.partition, *args)

    async def outgoing(self, endpoint: str, limit: int, lease_ms: int) -> list[DeliveryAttempt]:
        """Take up to `limit` messages of each partition that are due, for the lease."""
        args = (endpoint, limit, lease_ms)
        answers = await self._client.calls([("outgoing", partition, args) for partition in self._client.partitions])
        attempts = []
        for now, *messages in answers:
            for message in messages:
                try:
                    attempts.append(_attempt(now, message))
                except (ValueError, TypeError, AttributeError) as error:
                    await self._give_up(message[0].decode(errors="replace"), message[1], str(error))
        return attempts

    async def _give_up(self, message: str, attempt: int, problem: str) -> None:
        """End a message whose record is malformed, so that it is not due again and again."""
        log.error("a webhook message cannot be read and is given up: %s", problem, extra={"message_id": message})
        if self._is_ours(message):
            reason = "its record cannot be read"
            args = (message, attempt, "failed", 0, reason, 0, self._client.settings.retention_s)
            await self._client.call("settle", self._partition(message), *args)

    async def settle(self, taken: DeliveryAttempt, state: State, status: int, problem: str, wait_ms: int = 0) -> bool:
        """Record the outcome; `pending` schedules a retry after `wait_ms`. False: another attempt has begun since."""
        args = (taken.id, taken.attempt, state, status, problem[:500], wait_ms, self._client.settings.retention_s)
        return bool(await self._client.call("settle", self._partition(taken.id), *args))

    async def recent(self, limit: int) -> list[WebhookMessage]:
        """List messages of all tenants, newest first."""
        found: list[tuple[str, int]] = []
        for partition in self._client.partitions:
            found += await page(self._client, partition, partition_key(partition, "hooks"), None, limit)
        newest = sorted(found, key=lambda item: (item[1], item[0]), reverse=True)[:limit]
        names = [name for name, _ in newest if self._is_ours(name)]
        return [message for message in await self._messages(names) if message is not None]

    async def get(self, message: str) -> WebhookMessage:
        """Read one message. Raises UnknownMessage."""
        (found,) = await self._messages([message])
        if found is None:
            raise UnknownMessage(message)
        return found

    async def redeliver(self, message: str) -> None:
        """Schedule a message for redelivery under the same id. Raises UnknownMessage."""
        if not await self._client.call("redeliver", self._partition(message), message):
            raise UnknownMessage(message)

    async def _messages(self, names: Sequence[str]) -> list[WebhookMessage | None]:
        keys = [(partition := self._partition(name), partition_key(partition, "hook", name)) for name in names]
        calls: list[Call] = [("HMGET", partition, (key, *TEXTS, *NUMBERS)) for partition, key in keys]
        found = await self._client.calls(calls)
        return [_message(name, values) for name, values in zip(names, found, strict=True)]

    def _is_ours(self, message: str) -> bool:
        return partition_of(message, "msg_") in self._client.partitions

    def _partition(self, message: str) -> int:
        return self._client.partition_of(message, "msg_", UnknownMessage)


def _attempt(now: int, message: Sequence[Any]) -> DeliveryAttempt:
    """Raises TypeError, ValueError, AttributeError for a malformed record."""
    name, attempt, before, began, event, kind, subject, at, data, url = message
    return DeliveryAttempt(
        name.decode(), attempt, attempt - before, now - began, now, event.decode(), kind.decode(), subject.decode(), at,
        data.decode(), url.decode(),
    )  # fmt: skip


def _message(name: str, values: Sequence[bytes | None]) -> WebhookMessage | None:
    """Decode a message; None if there is none. Malformed numbers become 0."""
    texts = [(value or b"").decode(errors="replace") for value in values]
    if not texts[TEXTS.index("state")]:
        return None
    read: list[Any] = [*texts[: len(TEXTS)], *map(whole, texts[len(TEXTS) :])]
    return WebhookMessage(name, *read)
