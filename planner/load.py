"""Input of a plan: a model on a device, the lengths of prompts and answers, and the precision and cache reads."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from planner.facts.catalogue import Accelerator, ModelShape, PlanError

MIN_BITS, MAX_BITS = 1.0, 32.0
"""Of a weight, an activation or an entry of the cache: any width between them (Tilus; FlexQ: 6)."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Tokens of a typical request: of all, or the means of a mix."""

    prompt: int = 512
    answer: int = 256
    mix: tuple[tuple[int, int], ...] = ()
    """Prompts and answers of single requests; (): all are alike."""

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.answer < 1:
            raise PlanError(
                f"a request of {self.prompt} + {self.answer} tokens: both lengths are whole numbers from 1, "
                "such as --in 512 --out 256"
            )

    @property
    def mean(self) -> float:
        """Tokens that a request holds in the cache on average while it runs: L + G / 2."""
        return self.prompt + self.answer / 2

    @property
    def whole(self) -> int:
        """Tokens that it holds at its end."""
        return self.prompt + self.answer

    @property
    def longest(self) -> int:
        """Tokens that the longest request holds at its end."""
        return max(map(sum, self.mix), default=self.whole)

    @property
    def longest_prompt(self) -> int:
        return max((prompt for prompt, _ in self.mix), default=self.prompt)

    def sample(self, count: int, random: Random) -> list[tuple[int, int]]:
        """Prompts and answers of `count` requests. Those of a mix are spread evenly over it, by their whole length, and
        then shuffled: so few requests stand for the mix better than independent draws would."""
        if not self.mix:
            return [(self.prompt, self.answer)] * count
        ordered = sorted(self.mix, key=sum)
        drawn = [ordered[int((place + 0.5) * len(ordered) / count)] for place in range(count)]
        random.shuffle(drawn)
        return drawn

    def check(self, model: ModelShape) -> None:
        """Raises PlanError if the model's context does not hold every request."""
        over = sum(sum(each) > model.context for each in self.mix)
        if over:
            raise PlanError(
                f"{over} of the {len(self.mix)} requests are longer than the {model.context} tokens of "
                f"{model.name}'s context, the longest has {self.longest}: leave them out of the file"
            )
        if self.whole > model.context:
            raise PlanError(
                f"{self.prompt} + {self.answer} tokens are more than the {model.context} of {model.name}'s context: "
                "give less with --in or --out"
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of weights, of activations and of the KV cache; 16 for all if nothing else is said."""

    w: float = 16
    a: float = 16
    kv: float = 16

    def __post_init__(self) -> None:
        for flag, bits in (("--w-bits", self.w), ("--a-bits", self.a), ("--kv-bits", self.kv)):
            if not MIN_BITS <= bits <= MAX_BITS:
                raise PlanError(f"{flag} {bits:g}: {MIN_BITS:g} to {MAX_BITS:g} bits can be planned with")

    @classmethod
    def stored(cls, model: ModelShape, w: float | None = None, a: float = 16, kv: float = 16) -> Precision:
        """With the weights as the model's file has them, unless `w` says otherwise."""
        return cls(model.stored_bits if w is None else w, a, kv)


@dataclass(frozen=True, slots=True)
class KvReads:
    """Which part of the cache a decode step reads (LServe): all of it, unless pages are capped or heads stream.

    A streaming head reads its sink and its window alone; the other heads read the most relevant pages, up to a budget.
    """

    budget: int = 0
    """Tokens of the pages that a head reads at most; 0: all."""
    streaming: float = 0.0
    """Share of the heads that stream."""
    window: int = 256
    """Tokens of sink and window of a streaming head."""

    def __post_init__(self) -> None:
        if not 0 <= self.streaming <= 1 or self.budget < 0 or self.window < 1:
            raise PlanError(
                f"cache reads of {self.budget} tokens, {self.streaming:g} of the heads streaming over {self.window}: "
                "give --kv-budget from 0, --streaming-heads from 0 to 1, --stream-window from 1"
            )

    def tokens(self, context: float) -> float:
        """Tokens that are read of `context`: min(ctx, pages * page) * (1 - s) + min(ctx, window) * s."""
        dense = min(context, self.budget) if self.budget else context
        return dense * (1 - self.streaming) + min(context, self.window) * self.streaming


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """What a request must keep: seconds to its first token, and seconds for each token after it. DistServe's, unless
    others are given."""

    ttft_s: float = 0.200
    tpot_s: float = 0.100
    share: float = 0.90
    """Of the requests that must keep both."""

    @property
    def words(self) -> str:
        """Both objectives, as advice names them."""
        return f"{1e3 * self.ttft_s:g} ms to the first token and {1e3 * self.tpot_s:g} ms for each further one"

    @classmethod
    def given(cls, ttft_ms: float, tpot_ms: float, share: float) -> LatencySlo:
        """Raises PlanError for objectives that are none."""
        if ttft_ms <= 0 or tpot_ms <= 0 or not 0 < share <= 1:
            raise PlanError(
                f"objectives of {ttft_ms:g} and {tpot_ms:g} ms for a share of {share:g}: --ttft-ms and --tpot-ms are "
                "above 0, --share is at most 1"
            )
        return cls(ttft_ms / 1e3, tpot_ms / 1e3, share)


MAX_GPUS = 1024
"""A search over them takes about ten seconds."""
MAX_BATCH = 256
"""Requests in one replica, unless a plan says otherwise (TensorRT-LLM's usual engines)."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What a plan is of: a model on a kind of device, and the load. Each plan reads the fields that it needs."""

    model: ModelShape
    device: Accelerator
    lengths: RequestLengths = RequestLengths()
    precision: Precision = Precision()
    tp: int = 1
    """Devices that share every layer."""
    reads: KvReads = KvReads()
    efficiency: float = 1.0
    """Share of the roofline that the engine reaches; a roofline itself is drawn without it."""
    rate: float | None = None
    """Requests a second, of all GPUs; None: only alone and with a backlog."""
    gpus: int = 1
    slo: LatencySlo = LatencySlo()
    max_batch: int = MAX_BATCH
    """Most requests in one replica."""

    def __post_init__(self) -> None:
        if self.tp < 1 or self.model.heads % self.tp:
            raise PlanError(f"--tp {self.tp}: it must divide the {self.model.heads} heads of {self.model.name}")
        if not 0 < self.efficiency <= 1:
            raise PlanError(f"--efficiency {self.efficiency:g}: a share of the roofline is more than 0 and at most 1")
        if not 1 <= self.gpus <= MAX_GPUS:
            raise PlanError(f"--gpus {self.gpus}: 1 to {MAX_GPUS:,} GPUs can be planned with")
        if self.max_batch < 1:
            raise PlanError(f"--max-batch {self.max_batch}: a replica runs at least 1 request")

    @property
    def checked_rate(self) -> float:
        """The rate, for a plan that needs one. Raises PlanError."""
        if self.rate is None or self.rate <= 0:
            given = "no --rate" if self.rate is None else f"--rate {self.rate:g}"
            raise PlanError(f"{given}: requests a second are above 0, such as --rate 4")
        return self.rate
