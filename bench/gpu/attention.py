"""Attention of one new token to itself and all tokens before it.

The kernels read from the device how many there are, so that one captured graph serves every length. Few sequences would
leave most of the GPU idle: each one's tokens are split between programs and joined (as in flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64
PROGRAMS = 1056
"""At least so many run at once, where there are enough tokens: 8 for each of 132 multiprocessors."""


@triton.jit
def _keep(qkv, keys, values, place, capacity, heads, head: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, head)
    source = ((row // heads) * 3 * heads + row % heads) * head + width
    target = (row * capacity + tl.load(place)) * head + width
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
    place,
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
    filled = tl.load(place) + 1
    asked = tl.load(qkv + ((row // heads) * 3 * heads + row % heads) * head + width).to(tl.float32) * scale
    best = tl.full((), -1e30, tl.float32)
    weight = tl.zeros((), tl.float32)
    total = tl.zeros((head,), tl.float32)
    first = tl.program_id(1) * span
    last = tl.minimum(filled, first + span)
    for begin in range(first, last, block):
        places = begin + tl.arange(0, block)
        known = places < last
        at = (row * capacity + places)[:, None] * head + width[None, :]
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


def attend(qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Stores the new key and value, and returns what the new token sees: batch x heads * head.

    `qkv`: batch x 3 * heads * head, query, key and value of the new token; `keys`, `values`: batch x heads x capacity x
    head, contiguous; `place`: one number, where the new token stands.
    """
    batch, heads, capacity, head = keys.shape
    rows = batch * heads
    parts = min(-(-PROGRAMS // rows), -(-capacity // BLOCK))
    span = -(-capacity // (parts * BLOCK)) * BLOCK
    out = torch.empty((batch, heads * head), dtype=qkv.dtype, device=qkv.device)
    totals = torch.empty((rows, parts, head), dtype=torch.float32, device=qkv.device)
    bests, weights = (torch.empty((rows, parts), dtype=torch.float32, device=qkv.device) for _ in range(2))
    _keep[(rows,)](qkv, keys, values, place, capacity, heads, head=head, num_warps=1)
    _part[(rows, parts)](
        qkv, keys, values, totals, bests, weights, place, head**-0.5, capacity, heads, span, head=head, block=BLOCK
    )
    _join[(rows,)](totals, bests, weights, out, parts, head=head, room=triton.next_power_of_2(parts), num_warps=1)
    return out
