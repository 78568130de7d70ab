"""A decoder whose sequences stand at different places: a step computes rows, each a token of one slot at one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from bench.gpu.attention import attend
from planner.facts.model import ModelShape

WARM_UPS = 2


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


def layer_norm(state: torch.Tensor) -> torch.Tensor:
    """Without weights: they are random here and cost nothing that counts."""
    return functional.layer_norm(state, state.shape[-1:])


class SlottedDecoder:
    """`length`: most tokens of a slot. The slot behind the last one is that of rows which belong to no text."""

    def __init__(
        self,
        shape: ModelShape,
        slots: int,
        length: int,
        *,
        device: str = "cuda",
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.slots, self.length, self.device = shape, slots, length, device
        make = drawn_weights(seed, dtype, device)
        self.layers = [Layer(shape, slots + 1, length, make) for _ in range(shape.layers)]
        self.embedding, self.positions = make(shape.vocab, shape.hidden), make(shape.positions, shape.hidden)
        self._attend = attend if device == "cuda" else attend_plainly

    def logits(self, tokens: torch.Tensor, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Of the token behind each row, rows x vocabulary. Rows of one slot may come together, in any order."""
        state = self.embedding[tokens] + self.positions[places]
        for layer in self.layers:
            seen = self._attend(layer_norm(state) @ layer.qkv, layer.keys, layer.values, slots, places)
            state = torch.addmm(state, seen, layer.out)
            state = torch.addmm(state, torch.relu(layer_norm(state) @ layer.up), layer.down)
        return layer_norm(state) @ self.embedding.T


def attend_plainly(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """As `bench.gpu.attention.attend`, without a kernel of its own: for a CPU, and to hold that kernel against."""
    _, heads, _, head = keys.shape
    query, key, value = qkv.view(-1, 3, heads, head).unbind(1)
    keys[slots, :, places], values[slots, :, places] = key, value
    filled = int(places.max()) + 1
    scores = torch.einsum("rhd,rhld->rhl", query.float() * head**-0.5, keys[slots, :, :filled].float())
    is_later = torch.arange(filled, device=qkv.device) > places[:, None]
    shares = scores.masked_fill(is_later[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhl,rhld->rhd", shares, values[slots, :, :filled].float()).flatten(1).to(qkv.dtype)


class SlotSteps:
    """Greedy steps of a decoder. On a GPU, a step is the captured graph of the least count of rows that holds it; rows
    that are missing are computed for nobody. With one count alone, a token depends on nothing but the tokens before it:
    every matrix product has the same shape, whatever else is in the batch.

    A token is the best one plus its place: with random weights, the best one alone is mostly the one before it again,
    and a text of one word would not show what was lost or came twice."""

    def __init__(self, decoder: SlottedDecoder, counts: Sequence[int]) -> None:
        self._sizes = [_StepSize(decoder, count) for count in sorted(counts)]

    def run(self, tokens: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> list[int]:
        """The token behind each row."""
        size = next(each for each in self._sizes if each.count >= len(tokens))
        return size.run(tokens, slots, places)[: len(tokens)]


class _StepSize:
    """Steps of one count of rows."""

    def __init__(self, decoder: SlottedDecoder, count: int) -> None:
        self.count, self._decoder = count, decoder
        on_gpu = decoder.device == "cuda"
        self._said = torch.zeros((3, count), dtype=torch.int64, pin_memory=on_gpu)
        self._words = self._said.numpy()
        self._given = torch.zeros((3, count), dtype=torch.int64, device=decoder.device)
        self._given[1] = decoder.slots
        self._made = torch.zeros(count, dtype=torch.int64, device=decoder.device)
        self._heard = torch.zeros(count, dtype=torch.int64, pin_memory=on_gpu)
        self._graph = self._captured() if on_gpu else None

    def run(self, tokens: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> list[int]:
        words, filled = self._words, len(tokens)
        words[0, :filled], words[1, :filled], words[2, :filled] = tokens, slots, places
        words[0, filled:], words[1, filled:], words[2, filled:] = 0, self._decoder.slots, 0
        self._given.copy_(self._said, non_blocking=True)
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        self._heard.copy_(self._made, non_blocking=True)
        if self._graph is not None:
            torch.cuda.current_stream().synchronize()
        found: list[int] = self._heard.tolist()
        return found

    def _step(self) -> None:
        tokens, slots, places = self._given.unbind(0)
        best = self._decoder.logits(tokens, slots, places).argmax(-1)
        self._made.copy_((best + places) % self._decoder.shape.vocab)

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            self._step()
        return captured


def pass_over(shape: ModelShape, tokens: torch.Tensor, device: str) -> torch.Tensor:
    """The logits after the last of these tokens, by one pass over all of them in float32 with the same weights."""
    make, count = drawn_weights(0, torch.float32, device), len(tokens)
    layers = [Layer(shape, 1, count, make) for _ in range(shape.layers)]
    embedding, positions = make(shape.vocab, shape.hidden), make(shape.positions, shape.hidden)
    state = embedding[tokens] + positions[:count]
    for layer in layers:
        parts = (layer_norm(state) @ layer.qkv).view(count, 3, shape.heads, shape.head_dim)
        query, key, value = parts.permute(1, 2, 0, 3).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + seen.transpose(0, 1).reshape(count, -1) @ layer.out
        state = state + torch.relu(layer_norm(state) @ layer.up) @ layer.down
    return layer_norm(state)[-1] @ embedding.T


def wrong_by(shape: ModelShape, device: str = "cuda") -> float:
    """How far the logits of texts at different places are from those of one pass over each text in float32, at the end
    of their prompts, which come together, and in eight steps after: norm of the difference over the norm."""
    dice = torch.Generator().manual_seed(1)
    lengths = {2: 100, 0: 37, 3: 5}
    texts = {slot: torch.randint(shape.vocab, (length,), generator=dice) for slot, length in lengths.items()}
    quick = SlottedDecoder(shape, 4, 128, device=device)
    rows = [(int(token), slot, place) for slot, text in texts.items() for place, token in enumerate(text)]
    worst = 0.0
    for _ in range(9):
        given = torch.tensor([*rows, (0, quick.slots, 0)], device=device).T.contiguous()
        found = quick.logits(*given.unbind(0)).float()
        ends = {slot: at for at, (_, slot, _) in enumerate(rows)}
        rows = []
        for slot, at in ends.items():
            wanted = pass_over(shape, texts[slot].to(device), device)
            worst = max(worst, float((found[at] - wanted).norm() / wanted.norm()))
            rows.append((int(found[at].argmax()), slot, len(texts[slot])))
            texts[slot] = torch.cat([texts[slot], torch.tensor([rows[-1][0]])])
    return worst
