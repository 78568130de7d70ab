"""Refused content parts: images, audio and files in chats and responses, each with what to send instead."""

from __future__ import annotations

from typing import Any

from api.openai.fields import refusal

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
