"""Gate: decides from numbers alone whether an engine gets a text now, or whether the text waits.

It reads no clock, no store and no engine; the planner and the benchmarks use it as the workers do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import Literal, TypeAlias

SMOOTHING = 50
"""Values over which `Smoothed` takes the mean."""


class Smoothed:
    """Mean of the newest values."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def note(self, value: float) -> None:
        """Take one more value into account."""
        self._count = min(SMOOTHING, self._count + 1)
        self.value += (value - self.value) / self._count


GateReason: TypeAlias = Literal["", "slots", "kv", "ttft", "itl"]
"""Why a text waits. "": it is admitted; "slots": every slot is taken; "kv": the KV cache would overflow before the
texts have ended; "ttft", "itl": a chat would wait too long for its first token, or between two tokens."""


WINDOW = 200
"""Newest lengths that are kept of a lane, and of a tenant in it."""
UNKNOWN = 1 << 40
"""Stands for the length of an answer that has not been seen: longer than any limit."""
MIN_TENANT_LENGTHS = 50
"""A tenant with so many answers in a lane is predicted from its own."""
MAX_TENANTS = 64
"""Tenants with a history of their own, over all lanes; the one that has been silent for longest makes room."""


class LengthWindow:
    """The newest output lengths of one lane or tenant, in tokens."""

    __slots__ = ("_by_age", "_known", "_sorted")

    def __init__(self, unknown: int = 0) -> None:
        """`unknown`: answers of unknown length that count at first; each known length replaces one."""
        self._by_age = deque([UNKNOWN] * unknown)
        self._sorted = list(self._by_age)
        self._known = 0

    def __len__(self) -> int:
        """Number of known lengths."""
        return self._known

    def add(self, length: int) -> None:
        """Note the length of an answer that has ended."""
        if self._by_age and (self._by_age[0] == UNKNOWN or len(self._by_age) == WINDOW):
            gone = self._by_age.popleft()
            del self._sorted[bisect_left(self._sorted, gone)]
            self._known -= gone != UNKNOWN
        self._by_age.append(length)
        insort(self._sorted, length)
        self._known += 1

    def draws(self, generated: int, limit: int, count: int, random: Random) -> list[int]:
        """Draw `count` final lengths of a text that has `generated` tokens and may have `limit`.

        Of a text without tokens: lengths of the history. Else points between two neighbours of the lengths above
        `generated`, with `generated` itself as the lowest and `limit` as the highest.
        """
        lengths, number, finals = self._sorted, random.random, []
        size = len(lengths)
        if not generated and size:
            return [min(limit, lengths[int(number() * size)]) for _ in range(count)]
        start = bisect_right(lengths, generated) - 1
        places = size - start
        for _ in range(count):
            place = number() * places
            below = int(place)
            at = start + below
            low = lengths[at] if below else generated
            high = lengths[at + 1] if at + 1 < size else limit
            if high >= limit:
                high, low = limit, min(low, limit)
            final = int(low + (high - low) * (place - below))
            finals.append(final if final > generated else generated + 1)
        return finals


class LengthHistory:
    """Output lengths of one model, by lane, and by tenant where enough are known."""

    def __init__(self) -> None:
        self._lanes = defaultdict[str, LengthWindow](lambda: LengthWindow(WINDOW // 2))
        self._tenants: OrderedDict[tuple[str, str], LengthWindow] = OrderedDict()

    def add(self, lane: str, tenant: str, length: int) -> None:
        """Note an answer that has ended by itself or at its limit."""
        self._lanes[lane].add(length)
        self._tenants.setdefault((lane, tenant), LengthWindow()).add(length)
        self._tenants.move_to_end((lane, tenant))
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def window(self, lane: str, tenant: str = "") -> LengthWindow:
        """What a tenant's texts in a lane are drawn from; without a tenant, the lane's."""
        mine = self._tenants.get((lane, tenant))
        return mine if mine is not None and len(mine) >= MIN_TENANT_LENGTHS else self._lanes[lane]


Holding: TypeAlias = tuple[int, int]
"""(tokens that a text will still generate, tokens that it holds now: its prompt and what it has generated)."""

MAX_WORLDS = 5


def worlds(texts: int) -> int:
    """In how many drawn futures the peak is computed: fewer for many texts, whose errors cancel out."""
    return min(MAX_WORLDS, 200 // max(1, texts) + 1)


def future_peak(texts: Iterable[Holding]) -> int:
    """The most tokens of KV cache that these texts will hold at one time; 0 without texts."""
    peak = held = 0
    for number, (remaining, tokens) in enumerate(sorted(texts, reverse=True), 1):
        held += tokens
        peak = max(peak, remaining * number + held)
    return peak


MIN_RESERVE, MAX_RESERVE = 0.05, 0.20
STEP = 0.02
WINDOW_TEXTS = 200
"""Ended texts after which evictions are judged anew."""
MAX_EVICTED = 0.02
"""Evictions per ended text that raise the reserve."""


class Reserve:
    """The share of KV cache that an engine keeps free. It rises at once when predictions were too low, and falls after
    each quiet window."""

    def __init__(self) -> None:
        self.share = MIN_RESERVE
        """Of the KV cache; from 0.05 to 0.20."""
        self._ended = self._evicted = 0
        self._seen = 0

    def note(self, ended: int, evicted: int) -> None:
        """Judge the engine's evictions.

        Args:
            ended: texts that have ended since the last call.
            evicted: texts that the engine has evicted or paused since it started. Less than before: it has restarted.
        """
        self._ended += ended
        self._evicted += evicted - self._seen if evicted >= self._seen else evicted
        self._seen = evicted
        if self._evicted > MAX_EVICTED * max(self._ended, WINDOW_TEXTS):
            self.share = min(MAX_RESERVE, self.share + STEP)
        elif self._ended >= WINDOW_TEXTS:
            self.share = max(MIN_RESERVE, self.share - STEP)
        else:
            return
        self._ended = self._evicted = 0


FORGETTING = 0.998
"""Weight of an observation relative to the next one: the last 500 or so count."""
MIN_OBSERVATIONS = 20
"""Before so many observations nothing is predicted."""
OUTLIER = 4.0
"""Residuals beyond so many times the usual one pull the fit no further than one of this size."""
MAX_COVARIANCE = 1e6
"""Bound of the covariance: without new information it would grow for ever."""


class RecursiveFit:
    """Linear fit with forgetting, updated by one observation at a time; robust to outliers, in constant memory.

    It predicts `sum(coefficient * feature)`. Features should be about 1, so that all coefficients are learned equally
    fast.
    """

    def __init__(self, size: int) -> None:
        self._weights = [0.0] * size
        self._covariance = [[1e3 * (row == column) for column in range(size)] for row in range(size)]
        self._usual = 0.0
        """Usual size of a residual."""
        self.count = 0
        """Observations so far."""

    def predict(self, features: Sequence[float]) -> float:
        """The fitted value, not below 0; 0 before there are enough observations."""
        return max(0.0, _product(self._weights, features)) if self.count >= MIN_OBSERVATIONS else 0.0

    def observe(self, features: Sequence[float], value: float) -> None:
        """Fit one more observation."""
        residual = value - _product(self._weights, features)
        if self.count >= MIN_OBSERVATIONS:
            bound = OUTLIER * self._usual
            residual = max(-bound, min(bound, residual))
        self.count += 1
        self._usual += (abs(residual) - self._usual) / min(self.count, 100)
        spread = [_product(row, features) for row in self._covariance]
        scale = FORGETTING + _product(spread, features)
        self._weights = [weight + residual * each / scale for weight, each in zip(self._weights, spread, strict=True)]
        for row, own in zip(self._covariance, spread, strict=True):
            for column, other in enumerate(spread):
                row[column] = (row[column] - own * other / scale) / FORGETTING
        largest = max(self._covariance[place][place] for place in range(len(spread)))
        if largest > MAX_COVARIANCE:
            self._covariance = [[each * MAX_COVARIANCE / largest for each in row] for row in self._covariance]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])


class LatencyPredictor:
    """Predicts TTFT and TPOT of one engine."""

    TEXTS, HELD, PROMPT = 64.0, 16_384.0, 1024.0
    """Texts, tokens held and prompt tokens are divided by these."""

    def __init__(self) -> None:
        self._step, self._first = RecursiveFit(3), RecursiveFit(3)

    def note_step(self, texts: int, held: int, seconds: float) -> None:
        """Learn from a step of `texts` texts that hold `held` tokens."""
        self._step.observe(self._load(texts, held), seconds)

    def note_first(self, prompt: int, seconds: float) -> None:
        """Learn from the time between a text's hand-over to the engine and its first token."""
        self._first.observe(self._size(prompt), seconds)

    def tpot_s(self, texts: int, held: int) -> float:
        """Seconds between two tokens of a text; 0: not known yet."""
        return self._step.predict(self._load(texts, held))

    def ttft_s(self, prompts: Iterable[int]) -> float:
        """Seconds until the last of these prompts, which the engine begins at once, has its first token; 0: not known
        yet."""
        return sum([self._first.predict(self._size(prompt)) for prompt in prompts])

    def _load(self, texts: int, held: int) -> tuple[float, float, float]:
        return 1.0, texts / self.TEXTS, held / self.HELD

    def _size(self, prompt: int) -> tuple[float, float, float]:
        size = prompt / self.PROMPT
        return 1.0, size, size * size


REDRAWN = 48
"""Texts that a decision draws again."""


class HeldText:
    """One text in the engine, or about to be. All numbers are tokens."""

    __slots__ = ("finals", "generated", "is_alone", "limit", "lowest", "prompt", "window")

    def __init__(self, prompt: int, limit: int, window: LengthWindow, random: Random, generated: int = 0) -> None:
        self.prompt = prompt
        self.limit = limit
        """The most that it may generate, with what earlier attempts generated."""
        self.window = window
        """What its final length is drawn from."""
        self.generated = generated
        """Also by earlier attempts."""
        self.is_alone = False
        """Whether the engine computes its prompt beside no other."""
        self.draw(MAX_WORLDS, random)

    def draw(self, count: int, random: Random) -> None:
        """Draw its final length in so many worlds."""
        self.finals = self.window.draws(self.generated, self.limit, count, random)
        self.lowest = min(self.finals)


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What an engine can hold."""

    slots: int
    tokens: int = 0
    """Of its KV cache; 0: only the slots limit it."""
    taken: int = 0
    """Tokens that no text may use: pinned prefixes, reserved memory."""
    reserve: float = 0.0
    """Share of the tokens that is left free."""
    evicts: bool = True
    """Whether the engine takes texts that may not fit, and evicts some when they do not. If not, it keeps each text's
    whole limit free before it begins, and so does the gate."""

    @property
    def room(self) -> int:
        """Tokens that the texts may use."""
        return int(self.tokens * (1 - self.reserve)) - self.taken


def wait_reason(text: HeldText, held: Sequence[HeldText], capacity: KvCapacity) -> GateReason:
    """Why the engine does not take one more text now; "" if it does. An engine that holds nothing takes any text:
    nothing that it could wait for would make room."""
    if len(held) >= capacity.slots:
        return "slots"
    return "kv" if capacity.tokens and held and peak([*held, text], capacity) > capacity.room else ""


def never_fits(text: HeldText, capacity: KvCapacity) -> bool:
    """Whether the engine cannot run the text even alone: its cache does not hold what the text holds now, or, if the
    engine never evicts, what it may hold at most."""
    tokens = text.prompt + (text.generated if capacity.evicts else text.limit)
    return 0 < capacity.tokens < tokens + capacity.taken


def peak(held: Sequence[HeldText], capacity: KvCapacity) -> int:
    """Tokens that the texts will hold at most; of an engine that never evicts, what it keeps free for them."""
    if not capacity.evicts:
        return sum([each.prompt + each.limit for each in held])
    futures = (
        [(each.finals[world] - (now := each.generated), each.prompt + now) for each in held]
        for world in range(worlds(len(held)))
    )
    return max(map(future_peak, futures))


class Gate:
    """The gate of one engine: the texts that it holds, the history of its model, and the reserve."""

    def __init__(self, history: LengthHistory, random: Random) -> None:
        self.history, self._random = history, random
        self.reserve = Reserve()
        self.held: dict[str, HeldText] = {}
        """By the engine's request id."""
        self._turn = 0

    def text(self, lane: str, tenant: str, prompt: int, limit: int, generated: int = 0) -> HeldText:
        """A text with its draws, for `wait_reason`; `limit` counts what earlier attempts `generated`."""
        return HeldText(prompt, limit, self.history.window(lane, tenant), self._random, generated)

    def wait_reason(self, text: HeldText, capacity: KvCapacity) -> GateReason:
        """Why the text waits; "" if the engine takes it now. One that never fits does not wait, for the engine refuses
        it: others would wait behind it for nothing."""
        if never_fits(text, capacity):
            return ""
        text.draw(MAX_WORLDS, self._random)
        return wait_reason(text, self._redrawn(), capacity)

    def fitting(self, texts: Iterable[HeldText], capacity: KvCapacity, without: Collection[str] = ()) -> int:
        """How many of these texts the engine would take, one after the other up to the first that it would not, if it
        no longer ran the requests `without`."""
        self._redrawn()
        held = [text for request_id, text in self.held.items() if request_id not in without]
        count = worlds(len(held))  # fewer texts are drawn in more worlds
        for text in held:
            if len(text.finals) < count:
                text.draw(count, self._random)
        before = len(held)
        for text in texts:
            text.draw(MAX_WORLDS, self._random)
            if wait_reason(text, held, capacity):
                break
            held.append(text)
        return len(held) - before

    def peak(self, capacity: KvCapacity) -> int:
        """Tokens that the texts are predicted to hold at most."""
        return peak(self._redrawn(), capacity) if self.held else 0

    def _redrawn(self) -> list[HeldText]:
        """The texts that it holds, with draws above what they have generated, in as many worlds as one more needs."""
        held = list(self.held.values())
        count, start = worlds(len(held)), self._turn % max(1, len(held))
        self._turn = start + REDRAWN
        for text in islice(chain(held[start:], held[:start]), REDRAWN):
            text.draw(count, self._random)
        for text in held:
            if text.lowest <= text.generated < text.limit or len(text.finals) < count:
                text.draw(count, self._random)
        return held


SAMPLE_INTERVAL_S = 0.1
"""How often the duration of a step is noted for the predictor."""


class Colocation:
    """The latencies of one engine, and the targets that chats keep."""

    def __init__(self, ttft_ms: float | None = None, itl_ms: float | None = None) -> None:
        """Milliseconds that chats may wait for their first token, and between two tokens; None: no target."""
        self._max_ttft_ms, self._max_itl_ms = ttft_ms, itl_ms
        self._predictor = LatencyPredictor()
        self._chat = Smoothed()
        """Tokens of the prompts of chats."""
        self._sampled_at = 0.0
        self._began_at: float | None = None
        """When the step began that is being timed."""

    def note_chat(self, prompt: int) -> None:
        """A chat with so many tokens of prompt was claimed."""
        self._chat.note(prompt)

    def begin(self, text: HeldText, held: Collection[HeldText]) -> None:
        """The engine gets a text beside those that it holds."""
        computed = [each for each in held if not each.generated]
        text.is_alone = not computed
        for each in computed:
            each.is_alone = False
        self._began_at = None

    def is_due(self, now: float) -> bool:
        """Whether `note_step` is to be called for a step that has ended now."""
        return self._began_at is not None or now - self._sampled_at >= SAMPLE_INTERVAL_S

    def note_step(self, texts: int, held: Collection[HeldText], now: float) -> None:
        """Learn from a step that gave a token to `texts` texts and ended `now`, if it computed no prompt; or else time
        the next one. `held`: what the engine holds now."""
        self._sampled_at = now
        began_at, self._began_at = self._began_at, None
        if began_at is not None:
            self._predictor.note_step(texts, tokens_of(held), now - began_at)
        elif held and all(each.generated for each in held):
            self._began_at = now

    def note_first(self, text: HeldText, prompt: int, seconds: float) -> None:
        """Learn how long the first token of a text took, with so many tokens of prompt to compute."""
        if text.is_alone:
            self._predictor.note_first(prompt, seconds)

    def wait_reason(self, prompt: int, held: Collection[HeldText], offline: int) -> GateReason:
        """Why a text of lane batch may not begin beside those that the engine holds; "" if it may.

        Otherwise a target that cannot be met would keep the lane waiting for ever: so an idle engine takes one, and so
        does an engine that runs none of the lane and misses the target without it. Nothing waits for a latency that is
        not known yet.

        Args:
            prompt: tokens of the text in question.
            offline: how many of the others are of lane batch.
        """
        if not held:
            return ""
        texts, tokens, predictor = len(held), tokens_of(held), self._predictor
        prefills = [*(each.prompt for each in held if not each.generated), round(self._chat.value)]
        itl_s = predictor.tpot_s(texts, tokens), predictor.tpot_s(texts + 1, tokens + prompt)
        ttft_s = predictor.ttft_s(prefills), predictor.ttft_s([*prefills, prompt])
        limits: tuple[tuple[GateReason, float | None, tuple[float, float]], ...]
        limits = ("itl", self._max_itl_ms, itl_s), ("ttft", self._max_ttft_ms, ttft_s)
        for reason, target_ms, (without_s, beside_s) in limits:
            if target_ms is not None and 1000 * beside_s > target_ms and (offline or 1000 * without_s <= target_ms):
                return reason
        return ""


def tokens_of(held: Collection[HeldText]) -> int:
    """Tokens that the texts hold in the KV cache."""
    return sum([each.prompt + each.generated for each in held])
