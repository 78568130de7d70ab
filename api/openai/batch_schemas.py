"""Request schemas of /v1/batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from api.openai.fields import Metadata, StrictBody

WINDOWS: Mapping[str, int | None] = {"15m": 15 * 60_000, "1h": 3_600_000, "24h": 24 * 3_600_000, "none": None}
"""Deadline of each completion window, in milliseconds from creation; None: no deadline."""

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
"""Bounds of a file's retention."""


class OutputExpiry(StrictBody):
    """When the output and error files expire."""

    anchor: Literal["created_at"] = Field(description="The files' creation.")
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S, description="From then on.")]


class BatchRequest(StrictBody):
    """The body of POST /v1/batches."""

    input_file_id: str = Field(description="A file of yours with purpose `batch`.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"] = Field(
        description="The `url` of every line."
    )
    completion_window: Literal["15m", "1h", "24h", "none"] | None = Field(
        default="24h", description="From creation to the last line; none: as long as it takes."
    )
    metadata: Metadata | None = Field(None, description="Your own labels; the batch shows them.")
    output_expires_after: OutputExpiry | None = Field(None, description="Null: [files] retention_s.")
