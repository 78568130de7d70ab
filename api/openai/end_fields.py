"""Fields `ignore_eos` and `min_tokens`: load generators ask with them that a text goes on to its token limit."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from api.openai.errors import invalid_request
from api.openai.fields import StrictBody


class EndFields(StrictBody):
    """Two fields that say the same: that the model may not end the text before its limit."""

    ignore_eos: bool | None = Field(
        None, description="Go on to the token limit. Refused if the engine cannot, and with an output format or tools."
    )
    min_tokens: Annotated[int, Field(ge=0, le=1_048_576)] | None = Field(
        None, description="Must be 0, or the token limit: then it says the same as ignore_eos."
    )

    @property
    def to_the_limit(self) -> bool:
        return bool(self.ignore_eos or self.min_tokens)

    def check_end(self, limit: int | None, schema: dict[str, Any] | None) -> None:
        """Refuse an end that no engine here can give. Raises ApiError (400)."""
        if self.min_tokens and self.min_tokens != limit:
            raise invalid_request("min_tokens must be 0, or equal the token limit. Leave it out.", "min_tokens")
        if self.to_the_limit and schema is not None:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            message = f"{name} cannot be combined with a response_format, whose JSON has its own end."
            raise invalid_request(message, name)
