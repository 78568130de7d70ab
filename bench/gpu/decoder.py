"""A decoder with random weights for a fixed batch: prefill, then one greedy token for every sequence a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from bench.gpu.attention import attend
from planner.facts.model import ModelShape

PREFILL_ROWS = 16
"""Sequences of one prefill pass: it bounds the memory of their activations."""


def drawn_weights(seed: int, dtype: torch.dtype, device: str) -> Callable[..., torch.Tensor]:
    """Draws matrices of given sizes: the same weights for a seed, whatever they are kept in."""
    dice = torch.Generator(device=device).manual_seed(seed)

    def make(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=dice, device=device).mul_(size[0] ** -0.5)
        return drawn.to(torch.bfloat16).to(dtype)

    return make


class Layer:
    """One block's weights, biases left out, and its keys and values: batch x heads x length x head."""

    def __init__(self, shape: ModelShape, batch: int, length: int, make: Callable[..., torch.Tensor]) -> None:
        hidden = shape.hidden
        self.qkv, self.out = make(hidden, 3 * hidden), make(hidden, hidden)
        self.up, self.down = make(hidden, 4 * hidden), make(4 * hidden, hidden)
        room = (batch, shape.heads, length, shape.head_dim)
        self.keys, self.values = (torch.zeros(room, dtype=self.qkv.dtype, device=self.qkv.device) for _ in range(2))


class Decoder:
    """`length`: most tokens of a sequence, prompt and answer. All sequences stand at the same place."""

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        length: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> None:
        self.shape, self.batch, self.length = shape, batch, length
        make = drawn_weights(seed, dtype, device)
        self.layers = [Layer(shape, batch, length, make) for _ in range(shape.layers)]
        self.embedding, self.positions = make(shape.vocab, shape.hidden), make(shape.positions, shape.hidden)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        """Where the next token goes."""
        self._slots = torch.arange(batch, device=device)

    def prefill(self, prompts: torch.Tensor) -> None:
        """`prompts`: batch x tokens. The next step then makes the second token of every answer."""
        for row in range(0, self.batch, PREFILL_ROWS):
            rows = slice(row, min(row + PREFILL_ROWS, self.batch))
            self.tokens[rows] = self._logits(self._read(prompts[rows], rows)[:, -1]).argmax(-1)
        self.place.fill_(prompts.shape[1])

    def step(self) -> torch.Tensor:
        """One token for each; returns the logits, batch x vocabulary."""
        state = self.embedding[self.tokens] + self.positions[self.place]
        places = self.place.expand(self.batch)
        for layer in self.layers:
            seen = attend(layer_norm(state) @ layer.qkv, layer.keys, layer.values, self._slots, places)
            state = torch.addmm(state, seen, layer.out)
            state = torch.addmm(state, torch.relu(layer_norm(state) @ layer.up), layer.down)
        logits = self._logits(state)
        self.tokens.copy_(logits.argmax(-1))
        self.place.add_(1)
        return logits

    def pass_over(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after the last of these, batch x vocabulary, from one pass over all of them."""
        return self._logits(self._read(tokens, slice(0, len(tokens)))[:, -1])

    def graph(self) -> Callable[[], None]:
        """The step as one captured graph: without the time that Python takes to start each kernel."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self.step()
        replay: Callable[[], None] = captured.replay
        return replay

    def _read(self, prompts: torch.Tensor, rows: slice) -> torch.Tensor:
        count, length = prompts.shape
        state = self.embedding[prompts] + self.positions[:length]
        for layer in self.layers:
            parts = (layer_norm(state) @ layer.qkv).view(count, length, 3, self.shape.heads, self.shape.head_dim)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
            layer.keys[rows, :, :length], layer.values[rows, :, :length] = key, value
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            state = state + seen.transpose(1, 2).reshape(count, length, -1) @ layer.out
            state = state + torch.relu(layer_norm(state) @ layer.up) @ layer.down
        return state

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        return layer_norm(state) @ self.embedding.T


def layer_norm(state: torch.Tensor) -> torch.Tensor:
    """Without weights: they are random here and cost nothing that counts."""
    return functional.layer_norm(state, state.shape[-1:])


def wrong_by(shape: ModelShape) -> float:
    """How far the logits of eight steps after a prefill are from those of one pass over the same tokens in float32:
    norm of the difference over the norm. bfloat16 gives 0.001 to 0.03."""
    dice = torch.Generator(device="cuda").manual_seed(1)
    tokens = torch.randint(shape.vocab, (3, 100), generator=dice, device="cuda")
    quick, exact = Decoder(shape, 3, 128), Decoder(shape, 3, 128, dtype=torch.float32)
    quick.prefill(tokens)
    worst = 0.0
    for _ in range(8):
        tokens = torch.cat([tokens, quick.tokens[:, None]], 1)
        found, wanted = quick.step().float(), exact.pass_over(tokens)
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst
