"""Attention of one new token to all tokens before it, as one kernel.

It reads from the device how many there are, so that one captured graph serves every length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 64


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query: Any,
    keys: Any,
    values: Any,
    out: Any,
    length: Any,
    scale: Any,
    capacity: Any,
    head: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, head)
    filled = tl.load(length) + 1
    asked = tl.load(query + row * head + width).to(tl.float32) * scale
    best = tl.full((), -float("inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((head,), tl.float32)
    for begin in range(0, filled, block):
        places = begin + tl.arange(0, block)
        known = places < filled
        at = (row * capacity + places)[:, None] * head + width[None, :]
        key = tl.load(keys + at, mask=known[:, None], other=0.0).to(tl.float32)
        score = tl.where(known, tl.sum(key * asked[None, :], 1), -float("inf"))
        top = tl.maximum(best, tl.max(score, 0))
        share = tl.exp(score - top)
        faded = tl.exp(best - top)
        value = tl.load(values + at, mask=known[:, None], other=0.0).to(tl.float32)
        total = total * faded + tl.sum(share[:, None] * value, 0)
        weight = weight * faded + tl.sum(share, 0)
        best = top
    tl.store(out + row * head + width, (total / weight).to(out.dtype.element_ty))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """`query`: batch x heads x head; `keys`, `values`: batch x heads x capacity x head, contiguous; `length`: one
    number, the place of the newest token. Returns batch x heads x head."""
    batch, heads, capacity, head = keys.shape
    out = torch.empty_like(query)
    _attend[(batch * heads,)](query, keys, values, out, length, head**-0.5, capacity, head=head, block=BLOCK)
    return out
