"""A small LoRA adapter of a model file, for the embedded engine."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from workers.engines.llamacpp import gguf

RANK, ALIGNMENT, F32 = 4, 32, 0
TEXT, FLOAT = 8, 6


def write_lora(path: Path, model: Path, seed: int, scale: float = 0.5) -> Path:
    """Write an adapter that changes `attn_q` of all layers at random; returns its path."""
    tensors = {each.name: each.shape for each in gguf.read(model).tensors}
    random, data, table, count = np.random.default_rng(seed), bytearray(), bytearray(), 0
    for name, (width, height) in ((name, tensors[name]) for name in tensors if name.endswith("attn_q.weight")):
        for suffix, shape in (("lora_a", (width, RANK)), ("lora_b", (RANK, height))):
            values = (random.standard_normal(shape) * scale).astype("<f4")
            table += _text(f"{name}.{suffix}") + struct.pack("<IQQIQ", 2, *shape, F32, len(data))
            data += values.tobytes()
            data += bytes(-len(data) % ALIGNMENT)
            count += 1
    about = [("general.type", "adapter"), ("general.architecture", "llama"), ("adapter.type", "lora")]
    metadata = b"".join([_text(name) + struct.pack("<I", TEXT) + _text(value) for name, value in about])
    metadata += _text("adapter.lora.alpha") + struct.pack("<If", FLOAT, float(RANK))
    head = b"GGUF" + struct.pack("<IQQ", 3, count, len(about) + 1) + metadata + bytes(table)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + bytes(data))
    return path


def _text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()
