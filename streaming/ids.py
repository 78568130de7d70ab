"""Ids of jobs, files, batches, messages, processes and deployments: makes and reads them, and checks tenant names."""

from __future__ import annotations

import hashlib
import os
import re
import secrets

ID = re.compile(r"(job_|conv_|file-|batch_|msg_)([0-9a-f]{2})[0-9a-f]{30}")
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}")


def new_job_id(partition: int) -> str:
    """128 bits: the partition in the first byte, so that the id alone leads to its keys; the rest is random."""
    return f"job_{partition:02x}{os.urandom(15).hex()}"


def partition_of(name: str, start: str = "job_") -> int | None:
    """The partition that an id names, or None if it is none of ours with this start (a job's, unless one is given)."""
    found = ID.fullmatch(name)
    return int(found[2], 16) if found and found[1] == start else None


def joined(*names: str) -> str:
    """Join names, each after its length, so that different lists of names never give the same text."""
    return "".join(f"{len(name)}:{name}" for name in names)


def idempotency_digest(tenant: str, key: str, conversation: str = "") -> str:
    """Hash under which a tenant's idempotency key is stored (hexadecimal); each tenant, conversation and key has its
    own. `conversation`: whose turn the request is; "" for other requests."""
    names = (tenant, key, conversation) if conversation else (tenant, key)
    return hashlib.sha256(joined(*names).encode()).hexdigest()[:32]


def new_life() -> str:
    """Make a random id of one run of a process, because processes of two machines may have the same name."""
    return secrets.token_hex(8)


def new_deployment_id() -> str:
    """Make the id of a deployment, which its store and its folder of files hold."""
    return f"dep_{secrets.token_hex(16)}"


def tenant_partition(tenant: str, partitions: int) -> int:
    """The partition of all files and batches of a tenant, of its jobs with idempotency keys, and of those that limits
    count: each of these are counted, or found, together."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4]) % partitions


def new_file_id(partition: int) -> str:
    """Make a file id, in the form of a job id."""
    return f"file-{partition:02x}{secrets.token_hex(15)}"


def new_batch_id(partition: int, seed: str = "") -> str:
    """Make a batch id, in the form of a job id. The same seed gives the same id, so the seed must be secret."""
    rest = hashlib.sha256(seed.encode()).hexdigest()[:30] if seed else secrets.token_hex(15)
    return f"batch_{partition:02x}{rest}"


def line_job_id(batch_id: str, line: int, attempt: int, partitions: int, home: int | None = None) -> str:
    """The job id of an attempt at a line of a batch, in partition `home`, if one is given. It is always the same, so
    putting the job again changes nothing; only callers who know the batch's id can compute it."""
    digest = hashlib.sha256(f"{batch_id}:{line}:{attempt}".encode())
    return f"job_{digest.digest()[-1] % partitions if home is None else home:02x}{digest.hexdigest()[:30]}"


def replay_job_id(letter_id: str, job_id: str) -> str:
    """The id of the job that replays a dead letter, in the partition of `job_id`; the same for every replay."""
    return f"{job_id[:6]}{hashlib.sha256(f'{letter_id}:{job_id}'.encode()).hexdigest()[:30]}"


def new_conversation_id(partition: int) -> str:
    """Make a conversation id, in the form of a job id."""
    return f"conv_{partition:02x}{secrets.token_hex(15)}"


def message_id(partition: int, event_id: str, endpoint: str) -> str:
    """The id of the webhook message of an event for an endpoint; always the same, so no message is made twice."""
    return f"msg_{partition:02x}{hashlib.sha256(f'{event_id}:{endpoint}'.encode()).hexdigest()[:30]}"


def check_tenant(setting: str, name: str) -> None:
    """Check a tenant's name, which is part of Redis keys and of events. Raises ValueError."""
    if not TENANT_NAME.fullmatch(name):
        words = "begins with a letter or digit and has letters, digits and . _ @ / -, at most 128: rename it"
        raise ValueError(f"{setting} {name[:140]!r} cannot be a tenant's name, which {words}")


def full_name(model: str, adapter: str) -> str:
    """The name of a model's adapter in requests, answers and lists; `adapter` "": that of the model alone."""
    return f"{model}:{adapter}" if adapter else model
