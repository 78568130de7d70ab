"""What-if: the GPUs that a load needs now, and with twice the load, longer answers, other devices or fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost import Limit, knee_of
from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.frontier import FrontierPoint, modelled
from planner.load import Precision, RequestLengths
from planner.roofline import RooflineInput


@dataclass(frozen=True, slots=True)
class WhatIfInput:
    """A model on devices under a rate of requests."""

    base: RooflineInput
    lengths: RequestLengths
    rate: float
    """Requests a second."""
    efficiency: float


@dataclass(frozen=True, slots=True)
class WhatIfCase:
    """One change and what it does. `point` is None where the model does not fit, and `why` says so."""

    name: str
    given: WhatIfInput
    point: FrontierPoint | None
    limit: Limit | None
    why: str = ""

    @property
    def gpus(self) -> int | None:
        """GPUs for the rate, each at its knee."""
        if self.point is None:
            return None
        return self.given.base.tp * math.ceil(self.given.rate / self.point.requests_s)


def changes(given: WhatIfInput, others: Sequence[Accelerator]) -> Iterator[tuple[str, WhatIfInput]]:
    """Every change, by name; the first is none."""
    base, bits = given.base, given.base.precision

    def with_bits(**changed: float) -> WhatIfInput:
        return replace(given, base=replace(base, precision=replace(bits, **changed)))

    yield "as it is", given
    yield "twice the load", replace(given, rate=2 * given.rate)
    longer = RequestLengths(given.lengths.prompt, 2 * given.lengths.answer)
    if longer.whole <= base.model.context:
        yield "answers twice as long", replace(given, lengths=longer)
    quantised: list[tuple[str, Callable[[], WhatIfInput], bool]] = [
        ("weights of 8 bits", lambda: with_bits(w=8.0), bits.w > 8),
        ("weights and activations of 8 bits", lambda: with_bits(w=8.0, a=8.0), bits.w > 8 and bits.a > 8),
        ("weights of 4 bits", lambda: with_bits(w=4.0), bits.w > 4),
        ("KV cache of 8 bits", lambda: with_bits(kv=8.0), bits.kv > 8),
    ]
    yield from ((name, change()) for name, change, applies in quantised if applies)
    yield from ((f"on {other.name}", replace(given, base=replace(base, device=other))) for other in others)


def what_if(given: WhatIfInput, others: Sequence[Accelerator]) -> list[WhatIfCase]:
    """All cases, the first as it is. Raises PlanError if that one does not fit."""
    if given.rate <= 0:
        raise PlanError(f"--rate {given.rate:g}: requests a second are above 0, such as --rate 4")
    given.lengths.check(given.base.model)
    return [_case(name, changed, must=number == 0) for number, (name, changed) in enumerate(changes(given, others))]


def _case(name: str, given: WhatIfInput, *, must: bool) -> WhatIfCase:
    try:
        point, limit = knee_of(modelled(given.base, given.lengths, given.efficiency))
    except PlanError as error:
        if must:
            raise
        return WhatIfCase(name, given, None, None, str(error))
    return WhatIfCase(name, given, point, limit)


def what_if_advice(cases: Sequence[WhatIfCase]) -> str:
    """What helps most, and what the doubled load takes."""
    now, doubled = cases[0], cases[1]
    same = [each for each in cases[2:] if each.point and not each.name.startswith(("answers", "on "))]
    helps = max(same, key=lambda each: each.point.tokens_s if each.point else 0.0, default=None)
    said = f"The load takes {now.gpus} {now.given.base.device.name}, twice the load {doubled.gpus}"
    if helps is not None and helps.point and now.point and helps.point.tokens_s > 1.05 * now.point.tokens_s:
        times = helps.point.tokens_s / now.point.tokens_s
        said += f". {helps.name.capitalize()} would help most: {times:.2f} x the tokens of a GPU"
    elif now.limit == "knee":
        said += ". Fewer bits help little, for throughput ends at its knee and not at the memory"
    return said + "."


def bits_apart(bits: Precision) -> str:
    """The bits as a table shows them: weights/activations/cache."""
    return f"{bits.w:g}/{bits.a:g}/{bits.kv:g}"
