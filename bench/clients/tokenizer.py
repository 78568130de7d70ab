"""Tokenizer files for load generators that need some: each byte of a text is one token, so nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import write

PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that the byte-level encoding writes as themselves; each of the others has a character from 256 on."""


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    others = iter(range(256, 512))
    return [chr(byte if byte in PRINTABLE else next(others)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` of it."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def write_tokenizer(folder: Path) -> Path:
    """Write its files into a folder, which is returned."""
    write(folder / "tokenizer.json", tokenizer())
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096})
    return folder
