"""Ids of jobs, files, batches, messages, processes and deployments: how they are made, and what partition they name."""

from __future__ import annotations

import hashlib
import re
import secrets

KEPT_ID = re.compile(r"(?:file-|batch_|msg_)([0-9a-f]{2})[0-9a-f]{30}")
JOB_ID = re.compile(r"job_([0-9a-f]{2})[0-9a-f]{30}")


def new_job_id(partition: int) -> str:
    """128 bits nobody can guess but for the first byte, which is the partition: an id alone leads to its keys."""
    return f"job_{partition:02x}{secrets.token_hex(15)}"


def partition_of(job_id: str) -> int | None:
    """The partition an id names, or None if it is not an id of ours."""
    found = JOB_ID.fullmatch(job_id)
    return int(found[1], 16) if found else None


def joined(*names: str) -> str:
    """Several names as one, injectively: each stands behind its length, so different names never give the same text."""
    return "".join(f"{len(name)}:{name}" for name in names)


def idempotency_digest(tenant: str, key: str) -> str:
    """What a tenant's idempotency key is stored under (hexadecimal): no other tenant or key leads there."""
    return hashlib.sha256(joined(tenant, key).encode()).hexdigest()[:32]


def digest_partition(digest: str, partitions: int) -> int:
    """The partition of the job an idempotency key leads to: equal keys must meet in one place."""
    return int(digest[:8], 16) % partitions


def new_life() -> str:
    """Names one process from its start to its end. Two machines may run processes of the same name."""
    return secrets.token_hex(8)


def new_deployment_id() -> str:
    """Names one deployment: the store has it, and the folder of its files."""
    return f"dep_{secrets.token_hex(16)}"


def tenant_partition(tenant: str, partitions: int) -> int:
    """Where a tenant's files and batches are, all in one partition: they are listed and counted together."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4]) % partitions


def new_file_id(partition: int) -> str:
    """As a job's."""
    return f"file-{partition:02x}{secrets.token_hex(15)}"


def new_batch_id(partition: int, seed: str = "") -> str:
    """As a job's; the same for the same seed, which nobody but its owner may know."""
    rest = hashlib.sha256(seed.encode()).hexdigest()[:30] if seed else secrets.token_hex(15)
    return f"batch_{partition:02x}{rest}"


def line_job_id(batch_id: str, line: int, attempt: int, partitions: int) -> str:
    """The job of one line of a batch, the same whoever asks: to put it again changes nothing. Nobody who does not
    know the batch's id can guess it."""
    digest = hashlib.sha256(f"{batch_id}:{line}:{attempt}".encode())
    return f"job_{digest.digest()[-1] % partitions:02x}{digest.hexdigest()[:30]}"


def replay_job_id(letter_id: str, job_id: str) -> str:
    """The job that replaying a dead letter makes of `job_id`, in its partition: the same for every replay."""
    return f"{job_id[:6]}{hashlib.sha256(f'{letter_id}:{job_id}'.encode()).hexdigest()[:30]}"


def message_id(partition: int, event_id: str, endpoint: str) -> str:
    """A webhook message, the same whoever makes it: an event is made into one message for each endpoint."""
    return f"msg_{partition:02x}{hashlib.sha256(f'{event_id}:{endpoint}'.encode()).hexdigest()[:30]}"


def kept_partition(kept_id: str) -> int | None:
    """The partition the id of a file, a batch or a webhook message names, or None if it is none of these."""
    found = KEPT_ID.fullmatch(kept_id)
    return int(found[1], 16) if found else None
