"""Error bodies: the words, the status and the parameter of an error in any server's form. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_WORDS = 500
"""Characters of a server's own error message that are passed on."""
MAX_PARAM = 128
HIDDEN = "***"
KEY_REFUSED = (401, 402)
"""403 is about the request, as of a moderated one."""
MIN_STATUS, MAX_STATUS = 100, 599


def error_of(decoded: Any) -> tuple[str, int, str | None] | None:
    """The words, the status (0: not given) and the parameter of an error in any server's form; None if it is none."""
    if not isinstance(decoded, Mapping):
        return None
    inner = decoded.get("error")
    if isinstance(inner, str):  # TGI, Ollama
        return _words(inner, decoded.get("error_type")), 0, None
    if isinstance(inner, Mapping):
        return _fields(inner)
    if decoded.get("object") == "error" or "message" in decoded or "detail" in decoded:  # SGLang, trtllm-serve, FastAPI
        return _fields(decoded)
    return None


def name_of(decoded: Any) -> str:
    """The name that an error has as its code, as at OpenAI; "" if it has none."""
    inner = decoded.get("error") if isinstance(decoded, Mapping) else None
    code = inner.get("code") if isinstance(inner, Mapping) else None
    return code if isinstance(code, str) else ""


def _fields(error: Mapping[str, Any]) -> tuple[str, int, str | None]:
    said = error.get("message", error.get("detail", ""))
    code, param = error.get("code"), error.get("param")
    return _words(said, error.get("type")), _status(code), plain(param) if isinstance(param, str) else None


def plain(text: str) -> str:
    """Words in one line, without control characters: they end in terminals and logs."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def without(secrets: Iterable[str], text: str) -> str:
    """A server's words without the keys that it was sent. They are cut only after this, which leaves no half of one."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN) if secret else text
    return text


def _status(code: Any) -> int:
    """The HTTP status that an error's code names; 0: none."""
    if isinstance(code, str) and len(code) == len(str(MAX_STATUS)) and code.isascii() and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and MIN_STATUS <= code <= MAX_STATUS else 0


def _words(said: Any, kind: Any) -> str:
    text = said if isinstance(said, str) and said else str(kind or "an error without words")
    return plain(text)
