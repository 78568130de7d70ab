"""Settings that all processes of a deployment share: Redis, files, batches, quotas, webhooks, events and models."""

from __future__ import annotations

import base64
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec

from runtime.config import ConfigError, EngineName
from streaming.address import parse_address
from streaming.priority import Priority

Positive = Annotated[int, msgspec.Meta(ge=1)]

Durability: TypeAlias = Literal["D0", "D1", "D2", "D3"]

End: TypeAlias = Literal[
    "job.completed", "job.failed", "job.cancelled", "job.expired",
    "batch.completed", "batch.failed", "batch.cancelled", "batch.expired",
]  # fmt: skip
ENDS: tuple[End, ...] = get_args(End)

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}")
SHAPE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [redis]."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// or unix:// for one server, redis+sentinel://host:port,host:port/<service> for the primary
    that Sentinels name, redis+cluster://host:port,host:port for a cluster."""
    durability: Durability = "D1"
    """The loss that accepted jobs survive. D0: none; D1: of the Redis process; D2: a power cut; D3: of the Redis host,
    because every answer waits until a replica has the write."""
    partitions: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Hash slots over which the work is spread. All processes of a deployment must use the same number."""
    lease_ms: Annotated[int, msgspec.Meta(ge=200)] = 5_000
    """A worker without a heartbeat for longer loses its jobs to others."""
    max_attempts: Positive = 3
    """After so many lost workers a job is given up instead of retried."""
    lane_limit: Positive = 10_000
    """The most jobs waiting in one lane of one partition; more are refused with 429."""
    retention_s: Positive = 86_400
    """How long results are kept after their job's end, and idempotency keys with them."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """For one command; a command that exceeds it marks Redis as unavailable. At D3 half of it is for the replica."""

    def __post_init__(self) -> None:
        parse_address(self.url)


class FilesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [files]."""

    dir: Path = Path(".penstock/files")
    """The files folder. API and offline processes need the same folder, on shared storage if they run on several
    machines; `penstock up` keeps it in its data folder."""
    size_limit: Annotated[int, msgspec.Meta(ge=1024)] = 200 * 1024 * 1024
    """The most bytes of one uploaded file."""
    retention_s: Annotated[int, msgspec.Meta(ge=60)] = 30 * 86_400
    """How long files, and batches that have ended, are kept by default."""
    quarantine_s: Annotated[int, msgspec.Meta(ge=86_400)] = 90 * 86_400
    """How long files without a record in the store are kept in the folder `quarantine` before they are deleted."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [batch]."""

    max_lines: Positive = 50_000
    """The most lines of one batch."""
    window: Positive = 1024
    """The most lines of one batch that are in the queue at the same time; the others wait in the file."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    """How often a line is retried after an engine error."""
    enqueued_tokens: Positive | None = None
    """The most tokens of one tenant's unfinished batches together: for each choice of a line (n times prompts) its
    prompt, at about four characters a token, and max_tokens, or without it the engine's default. A key may have its own
    (`batch_tokens` in its [keys] row). None: no limit."""


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section [quotas], and `quotas` of a row of [keys.<name>]: what one tenant may keep. None: no limit."""

    jobs: Positive | None = None
    """Jobs that wait, run or are kept, each for [redis] retention_s from its acceptance."""
    job_bytes: Positive | None = None
    """Bytes of their requests."""
    result_bytes: Positive | None = None
    """Bytes of their results. At the limit new jobs are refused; an accepted job keeps its result."""
    file_bytes: Positive | None = None
    """Bytes of files, outputs of batches among them. Each counts as at least 4,096 bytes, and until the last batch that
    reads it has ended. At the limit uploads and batches are refused; an accepted batch keeps its output."""

    def over(self, others: QuotaSettings) -> QuotaSettings:
        """These quotas, with those of `others` for each that is not set."""
        own = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(others, **own)

    @property
    def bounds_jobs(self) -> bool:
        """Whether any quota limits jobs."""
        return any(limit is not None for limit in (self.jobs, self.job_bytes, self.result_bytes))


UNLIMITED = QuotaSettings()


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [webhooks.<name>]: an endpoint that receives the final events of one tenant's jobs and batches."""

    url: str
    secret: str
    """whsec_ and 24 to 64 random bytes in base64; the receiver needs the same."""
    tenant: str = "local"
    """The tenant; `local` is every caller of a server without keys."""
    events: tuple[End, ...] = ENDS
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
        check_endpoint(self)


def check_endpoint(endpoint: WebhookSettings) -> None:
    """Validate an endpoint. Raises ValueError, whose text never has the secret."""
    check_tenant("tenant", endpoint.tenant)
    url = urlsplit(endpoint.url)
    if url.scheme not in ("https", "http") or not url.hostname or url.username is not None:
        raise ValueError("url must be https://host/path, without a user")
    if url.scheme == "http" and not endpoint.allow_http:
        raise ValueError("url must begin with https:// (allow_http = true lifts that)")
    assert url.port is None or url.port > 0  # reading it raises ValueError for what is no port
    for network in endpoint.networks:
        ipaddress.ip_network(network)
    signing_key(endpoint.secret)


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


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resource limits of one worker process that `penstock up` starts. 0: no limit."""

    cpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Processors it may run on."""
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Data memory; mapped files do not count."""
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0


class ShapeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of [models.<name>.shapes.<shape>]: settings of one of the model's pools. Those it leaves out are the
    model's."""

    upto: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Concurrent jobs from which on the next shape is better; the last shape has none."""
    curve: tuple[tuple[float, float], ...] = ()
    """[concurrent jobs, tokens a second] as measured for this pool at its largest, by rising jobs; `upto` is computed
    from it if every shape has one."""
    min_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Kept also while another shape takes the jobs."""
    max_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    resources: Resources | None = None
    options: dict[str, Any] = {}
    """Override the model's options."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One row of [models.<name>]: a served model, with its own lanes and workers."""

    engine: EngineName
    min_workers: Annotated[int, msgspec.Meta(ge=0)] = 1
    max_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """None: the same as min_workers."""
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Of one worker, in any unit."""
    budget_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """The most that all workers of this model may cost together; it overrides min_workers. None: no limit."""
    resources: Resources = Resources()
    """Limits of each of its worker processes: `resources.cpus`, `.memory_mib`, `.nice`."""
    options: dict[str, Any] = {}
    """Override the engine's own section for this model, e.g. `options.path` for a GGUF file."""
    shapes: dict[str, ShapeSettings] = {}
    """Pools of different shape for this model, in the order of the load they are for. None: one pool."""

    def __post_init__(self) -> None:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers {self.max_workers} is less than min_workers {self.min_workers}")
        if self.shapes:
            check_shapes(self)

    @property
    def most_workers(self) -> int:
        return self.min_workers if self.max_workers is None else self.max_workers

    @property
    def pools(self) -> dict[str, ModelSettings]:
        """The settings of each of its pools by shape; the only pool of a model without shapes is under ""."""
        return {name: self.shaped(shape) for name, shape in self.shapes.items()} or {"": self}

    @property
    def least_wanted(self) -> int:
        """The fewest workers that an override may set, whichever shape takes the jobs."""
        return min(pool.min_workers for pool in self.pools.values())

    @property
    def most_wanted(self) -> int:
        """The most workers that an override may set."""
        return max(pool.most_workers for pool in self.pools.values())

    def shaped(self, shape: ShapeSettings) -> ModelSettings:
        """The settings of one pool, as of a model without shapes. Raises ValueError."""
        differs = {name: getattr(shape, name) for name in ("min_workers", "max_workers", "cost_per_hour", "resources")}
        given = {name: value for name, value in differs.items() if value is not None}
        return msgspec.structs.replace(self, **given, options={**self.options, **shape.options}, shapes={})


def check_shapes(model: ModelSettings) -> None:
    """Validate a model's shapes. Raises ValueError, which names the shape."""
    shapes = model.shapes
    if len(shapes) < 2:
        raise ValueError("shapes: one shape alone is no choice; name two or more, or put its settings into the model")
    for name, shape in shapes.items():
        if not SHAPE_NAME.fullmatch(name):
            raise ValueError(f"shapes.{name}: a shape's name has small letters, digits and dashes, at most 32")
        try:
            model.shaped(shape)
        except ValueError as error:
            raise ValueError(f"shapes.{name}: {error}") from None
    for name, pool in model.pools.items():
        if not pool.most_workers and model.most_wanted:
            raise ValueError(f"shapes.{name}: max_workers is 0, and jobs meant for it would wait for ever")
        if pool.budget_per_hour is not None and pool.cost_per_hour > pool.budget_per_hour:
            raise ValueError(f"shapes.{name}: budget_per_hour does not pay for one worker of it")
    if any(shape.curve for shape in shapes.values()):
        _check_curves(shapes)
    else:
        _check_thresholds(shapes)


def _check_curves(shapes: dict[str, ShapeSettings]) -> None:
    for name, shape in shapes.items():
        jobs = [jobs for jobs, _ in shape.curve]
        if not jobs:
            raise ValueError(f"shapes.{name}: curve is missing; give every shape one, or none")
        if shape.upto is not None:
            raise ValueError(f"shapes.{name}: upto is read from the curves; give one or the other")
        if jobs != sorted(set(jobs)) or jobs[0] <= 0:
            raise ValueError(f"shapes.{name}: curve must be [jobs at once, tokens a second] by rising jobs above 0")


def _check_thresholds(shapes: dict[str, ShapeSettings]) -> None:
    *first, (last_name, last) = shapes.items()
    if last.upto is not None:
        raise ValueError(f"shapes.{last_name}: the last shape has no upto, it takes what the others do not")
    below = 0.0
    for name, shape in first:
        if shape.upto is None:
            raise ValueError(f"shapes.{name}: upto is missing, the jobs at once from which on the next shape is better")
        if shape.upto <= below:
            raise ValueError(f"shapes.{name}: upto {shape.upto:g} is not more than that of the shape before it")
        below = shape.upto


def check_model_names(models: dict[str, ModelSettings]) -> None:
    """Check model names, which are part of Redis keys and URLs. Raises ValueError."""
    for name in models:
        if not MODEL_NAME.fullmatch(name):
            raise ValueError(f"models.{name}: a model name has letters, digits and . _ : / -, at most 128")


def check_tenant(setting: str, name: str) -> None:
    """Check a tenant's name, which is part of Redis keys and of events. Raises ValueError."""
    if not TENANT_NAME.fullmatch(name):
        words = "begins with a letter or digit and has letters, digits and . _ @ / -, at most 128: rename it"
        raise ValueError(f"{setting} {name[:140]!r} cannot be a tenant's name, which {words}")


def served_models(configured: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    """The models of a deployment; a simulated one if none is configured, so that each role runs alone.

    Raises ConfigError.
    """
    try:
        check_model_names(configured)
    except ValueError as error:
        raise ConfigError("models", str(error)) from None
    return configured or {"sim": ModelSettings(engine="sim")}
