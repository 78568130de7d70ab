"""Parts of a message's content: texts and refusals; images, audio and files are refused, with what to send instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from api.openai.fields import StrictBody, refusal

_IMAGES = "images are not supported here: describe the image"
_FILES = "files are not supported here: send the file's text"
_AUDIO = "audio is not supported here: send its transcript"
_VIDEOS = "videos are not supported here: describe the video"

OTHER_PARTS = {
    "image_url": _IMAGES,
    "image": _IMAGES,
    "input_image": _IMAGES,
    "file": _FILES,
    "input_file": _FILES,
    "input_audio": _AUDIO,
    "audio": _AUDIO,
    "audio_url": _AUDIO,
    "video_url": _VIDEOS,
    "video": _VIDEOS,
}
"""Kinds of other APIs, and of this one's newer models, with the begin of the remedy."""


def refuse_others(kind: Any, text_kind: str) -> Any:
    """Return the `type` of a part. Raises the field's refusal for a kind that no engine here takes.

    Args:
        text_kind: the kind of part that holds the text instead.
    """
    if isinstance(kind, str) and kind in OTHER_PARTS:
        raise refusal(f"is {kind!r}, but {OTHER_PARTS[kind]} in a part of type {text_kind!r}")
    return kind


class TextPart(StrictBody):
    """One part of a message's content."""

    PASSED = True
    TEXT_KIND: ClassVar[str] = "text"

    type: Literal["text", "input_text", "output_text", "refusal"] = Field(
        description="Images, files, audio and videos are refused."
    )
    text: str | None = Field(
        None,
        validate_default=True,
        description="Parts are joined without anything between them. Required, except in a part of type `refusal`.",
    )
    refusal: str | None = Field(None, description="The text of a part of type `refusal`.")

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: Any) -> Any:
        return refuse_others(kind, cls.TEXT_KIND)

    @field_validator("text")
    @classmethod
    def _has_text(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None and info.data.get("type", "refusal") != "refusal":
            raise refusal("is required")
        return text

    @property
    def ignored(self) -> list[str]:
        other = "text" if self.type == "refusal" else "refusal"
        return [other] if getattr(self, other) else []

    @property
    def words(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


def words_of(content: str | Sequence[TextPart] | None) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join([part.words for part in content or ()])
