"""Attention of new tokens, each to itself and all tokens before it in its sequence.

The kernels read from the device where each token stands, so that one captured graph serves every length. Few tokens
would leave most of the GPU idle: what each of them sees is split between programs and joined (as in flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64
PROGRAMS = 1056
"""At least so many run at once, where there are enough tokens: 8 for each of 132 multiprocessors."""


@triton.jit
def _keep(qkv, keys, values, slots, places, stride, capacity, heads, head: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, head)
    source = ((row // heads) * 3 * heads + row % heads) * head + width
    cache = tl.load(slots + row // heads) * heads + row % heads
    target = (cache * capacity + tl.load(places + (row // heads) * stride)) * head + width
    tl.store(keys + target, tl.load(qkv + source + heads * head))
    tl.store(values + target, tl.load(qkv + source + 2 * heads * head))


@triton.jit
def _part(
    qkv,
    keys,
    values,
    totals,
    bests,
    weights,
    slots,
    places,
    stride,
    scale,
    capacity,
    heads,
    span,
    head: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    width = tl.arange(0, head)
    cache = tl.load(slots + row // heads) * heads + row % heads
    filled = tl.load(places + (row // heads) * stride) + 1
    asked = tl.load(qkv + ((row // heads) * 3 * heads + row % heads) * head + width).to(tl.float32) * scale
    best = tl.full((), -1e30, tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((head,), tl.float32)
    first = tl.program_id(1) * span
    last = tl.minimum(filled, first + span)
    for begin in range(first, last, block):
        seen = begin + tl.arange(0, block)
        known = seen < last
        at = (cache * capacity + seen)[:, None] * head + width[None, :]
        key = tl.load(keys + at, mask=known[:, None], other=0.0).to(tl.float32)
        value = tl.load(values + at, mask=known[:, None], other=0.0).to(tl.float32)
        score = tl.where(known, tl.sum(key * asked[None, :], 1), -1e30)
        top = tl.maximum(best, tl.max(score, 0))
        share = tl.where(known, tl.exp(score - top), 0.0)
        faded = tl.exp(best - top)
        total = total * faded + tl.sum(share[:, None] * value, 0)
        weight = weight * faded + tl.sum(share, 0)
        best = top
    tl.store(totals + part * head + width, total)
    tl.store(bests + part, best)
    tl.store(weights + part, weight)


@triton.jit
def _join(totals, bests, weights, out, parts, head: tl.constexpr, room: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width, each = tl.arange(0, head), tl.arange(0, room)
    known = each < parts
    best = tl.load(bests + row * parts + each, mask=known, other=-1e30)
    faded = tl.where(known, tl.exp(best - tl.max(best, 0)), 0.0)
    weight = tl.sum(faded * tl.load(weights + row * parts + each, mask=known, other=0.0), 0)
    at = (row * parts + each)[:, None] * head + width[None, :]
    total = tl.sum(faded[:, None] * tl.load(totals + at, mask=known[:, None], other=0.0), 0)
    tl.store(out + row * head + width, (total / weight).to(out.dtype.element_ty))


def attend(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Stores the new keys and values, and returns what each new token sees: rows x heads * head.

    `qkv`: rows x 3 * heads * head, query, key and value of a new token each; `keys`, `values`: slots x heads x capacity
    x head, contiguous; `slots`, `places`: rows, where each new token stands. Tokens of one slot may come together.
    """
    rows = qkv.shape[0]
    _, heads, capacity, head = keys.shape
    each, stride = rows * heads, places.stride(0)
    parts = min(-(-PROGRAMS // each), -(-capacity // BLOCK))
    span = -(-capacity // (parts * BLOCK)) * BLOCK
    out = torch.empty((rows, heads * head), dtype=qkv.dtype, device=qkv.device)
    totals = torch.empty((each, parts, head), dtype=torch.float32, device=qkv.device)
    bests, weights = (torch.empty((each, parts), dtype=torch.float32, device=qkv.device) for _ in range(2))
    _keep[(each,)](qkv, keys, values, slots, places, stride, capacity, heads, head=head, num_warps=1)
    _part[(each, parts)](
        qkv, keys, values, totals, bests, weights, slots, places, stride, head**-0.5, capacity, heads, span, head=head,
        block=BLOCK,
    )  # fmt: skip
    _join[(each,)](totals, bests, weights, out, parts, head=head, room=triton.next_power_of_2(parts), num_warps=1)
    return out
