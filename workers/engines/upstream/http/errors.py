"""Error bodies: the words, the status and the parameter of an error in any server's form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_WORDS = 500
"""Characters of a server's own error message that are passed on."""
KEY_REFUSED = (401, 402)
"""403 is about the request, as of a moderated one."""


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


def _fields(error: Mapping[str, Any]) -> tuple[str, int, str | None]:
    said = error.get("message", error.get("detail", ""))
    code, param = error.get("code"), error.get("param")
    number = int(code) if isinstance(code, int | str) and str(code).isdigit() else 0
    return _words(said, error.get("type")), number, param if isinstance(param, str) else None


def _words(said: Any, kind: Any) -> str:
    text = said if isinstance(said, str) and said else str(kind or "an error without words")
    return " ".join(text.split())[:MAX_WORDS]
