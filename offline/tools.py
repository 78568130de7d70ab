"""What the parts of an offline process share: its store, its folder of files, its settings and its telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from api.openai.content import InputRules
from api.openai.media import MediaReader
from streaming.batches.file_store import BatchSettings, FileStore
from streaming.fleet.aliases import NO_ALIASES, Aliases
from streaming.fleet.settings import ModelSettings
from streaming.jobs.settings import NO_LIMITS, Limits
from streaming.redis.client import RedisClient
from streaming.store.monitor import Headroom, StoreMonitor
from telemetry.metrics import Metrics
from telemetry.tracing import NO_TRACING, Tracing


@dataclass(frozen=True, slots=True)
class OfflineTools:
    """What all parts of an offline process share. Made once per process."""

    store_client: RedisClient
    headroom: Headroom
    store: StoreMonitor
    file_store: FileStore
    metrics: Metrics
    models: Mapping[str, ModelSettings]
    batch: BatchSettings
    max_choices: int
    """Most choices of one request: its `n` times its prompts."""
    keep_s: int
    """Retention of output files and of a batch's record."""
    turn_s: float = 60.0
    save_interval_s: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    """By tenant, see TenantSettings."""
    limits: Limits = NO_LIMITS
    aliases: Aliases = NO_ALIASES
    content: InputRules | None = None
    media: MediaReader | None = None
    """Takes the media of lines and messages; None: there are none."""
    tracing: Tracing = NO_TRACING
