"""Quota settings ([quotas]): what one tenant may keep in the store."""

from __future__ import annotations

import msgspec

from runtime.config import Positive


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
