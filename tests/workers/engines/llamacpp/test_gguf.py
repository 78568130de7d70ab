"""Reading model files, whole and damaged, and rewriting their weights."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workers.engines.llamacpp import gguf

U32, F32_VALUE, STRING, ARRAY = 4, 6, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def model(tensors: list[tuple[str, tuple[int, ...], int, bytes]], alignment: int = 32) -> bytes:
    """A small but complete file."""
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("general.alignment", U32, struct.pack("<I", alignment)),
        pair("general.file_type", U32, struct.pack("<I", 3)),
        pair("llama.context_length", U32, struct.pack("<I", 512)),
        pair("llama.scale", F32_VALUE, struct.pack("<f", 0.5)),
        pair("tokenizer.ggml.tokens", ARRAY, strings("<s>", "</s>", "é")),
        pair("tokenizer.ggml.bos_token_id", U32, struct.pack("<I", 0)),
        pair("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 1)),
        pair("tokenizer.chat_template", STRING, text("{{ messages }}")),
        pair("odd", ARRAY, struct.pack("<IQ", U32, 2) + bytes(8)),
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    data = b""
    for name, shape, kind, stored in tensors:
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += stored + bytes(-len(stored) % alignment)
    return header + bytes(-len(header) % alignment) + data


def q4_1(scale: float, least: float, steps: list[int]) -> bytes:
    low, high = steps[:16], steps[16:]
    return struct.pack("<ee", scale, least) + bytes(a | b << 4 for a, b in zip(low, high, strict=True))


def q8_0(scale: float, steps: list[int]) -> bytes:
    return struct.pack("<e32b", scale, *steps)


STEPS4 = [number % 16 for number in range(32)]
STEPS8 = list(range(-16, 16))
NORM = np.arange(8, dtype="<f4")


def mixed() -> bytes:
    return model(
        [
            ("embedding", (32, 2), gguf.Q8_0, q8_0(0.5, STEPS8) + q8_0(2.0, STEPS8)),
            ("norm", (8,), gguf.F32, NORM.tobytes()),
            ("weight", (32, 1), gguf.Q4_1, q4_1(0.25, -1.0, STEPS4)),
        ]
    )


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def values(path: Path, name: str) -> NDArray[Any]:
    tensor = next(tensor for tensor in gguf.read(path).tensors if tensor.name == name)
    stored = path.read_bytes()[tensor.offset : tensor.offset + (tensor.nbytes or 0)]
    return np.frombuffer(stored, {gguf.F32: "<f4", gguf.F16: "<f2"}[tensor.kind])


def test_the_header_is_read(tmp_path: Path) -> None:
    """Metadata, special tokens and the tensor table."""
    found = gguf.read(written(tmp_path, mixed()))
    assert (found.own("context_length"), found.vocabulary, found.chat_template) == (512, 3, "{{ messages }}")
    assert (found.special_token("bos"), found.special_token("eos")) == ((0, "<s>"), (1, "</s>"))
    assert found.special_token("padding") is None
    assert found.metadata["llama.scale"] == 0.5
    assert [(tensor.name, tensor.shape, tensor.nbytes) for tensor in found.tensors] == [
        ("embedding", (32, 2), 68),
        ("norm", (8,), 32),
        ("weight", (32, 1), 20),
    ]


@pytest.mark.parametrize("alignment", [32, 64])
def test_quantised_weights_become_half_precision(tmp_path: Path, alignment: int) -> None:
    """Each number is what its block says, other tensors and the metadata stay, the file type is told."""
    tensors = [("norm", (8,), gguf.F32, NORM.tobytes()), ("weight", (32, 1), gguf.Q4_1, q4_1(0.25, -1.0, STEPS4))]
    tensors.append(("embedding", (32, 2), gguf.Q8_0, q8_0(0.5, STEPS8) + q8_0(2.0, STEPS8)))
    source, target = gguf.read(written(tmp_path, model(tensors, alignment))), tmp_path / "half.gguf"
    done = []
    gguf.to_f16(source, target, lambda at, of: done.append((at, of)))
    found = gguf.read(target)
    assert found.metadata | {"general.file_type": 3} == source.metadata
    assert found.metadata["general.file_type"] == gguf.FILE_TYPE_F16
    assert [tensor.offset % alignment for tensor in found.tensors] == [0, 0, 0]
    assert values(target, "norm").tolist() == NORM.tolist()
    assert values(target, "weight").tolist() == [step * 0.25 - 1.0 for step in STEPS4]
    assert values(target, "embedding").tolist() == [step * scale for scale in (0.5, 2.0) for step in STEPS8]
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_a_kind_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    """It can still be read and served."""
    source = gguf.read(written(tmp_path, model([("weight", (256,), 12, bytes(144))])))
    with pytest.raises(gguf.GgufError, match=r"kind 12 cannot be converted.*Serve the file as it is"):
        gguf.to_f16(source, tmp_path / "half.gguf", lambda _at, _of: None)


@pytest.mark.parametrize(("data", "cause"), [
    (b"", "it is empty"),
    (b"PK\x03\x04" + bytes(64), "does not begin with GGUF"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "format version 1"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "tensors"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "does not fit"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("key", 77, b""), "unknown value kind 77"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("key", 9, struct.pack("<IQ", 0, 1 << 63)), "too long"),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("key", 9, struct.pack("<IQ", 9, 1) * 5000),
        "an array of arrays",
    ),
])  # fmt: skip
def test_what_is_not_a_model_file_is_named(tmp_path: Path, data: bytes, cause: str) -> None:
    """The error says the file, the cause and the next step."""
    path = written(tmp_path, data)
    with pytest.raises(gguf.GgufError, match=cause) as caught:
        gguf.read(path)
    assert str(path) in str(caught.value)
    assert "Delete it and get it again" in str(caught.value)


@settings(max_examples=60)
@given(st.data())
def test_a_cut_or_garbled_file_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """However it is damaged, reading ends with GgufError or with a sound header."""
    whole = bytearray(mixed())
    length = data.draw(st.integers(0, len(whole)))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = written(tmp_path_factory.mktemp("garbled"), bytes(whole[:length]))
    try:
        found = gguf.read(path)
    except gguf.GgufError:
        return
    assert all(tensor.offset + (tensor.nbytes or 0) <= length for tensor in found.tensors)


def test_a_file_cut_in_its_weights_is_incomplete(tmp_path: Path) -> None:
    """A download that broke off is found before llama.cpp is given the file."""
    with pytest.raises(gguf.GgufError, match="before the weights of weight"):
        gguf.read(written(tmp_path, mixed()[:-32]))
