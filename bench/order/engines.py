"""Engines that are compared with the simulated one: one that never evicts, and vLLM's priority scheduler."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from planner.simulator.engine import AdmissionRule, ModelEngine, ModelText

RANK = attrgetter("rank")


class NoEvictEngine(ModelEngine):
    """Takes a text if it fits with its whole limit (TensorRT-LLM's GUARANTEED_NO_EVICT)."""

    def _fits(self, text: ModelText) -> bool:
        return sum(each.prompt + each.limit for each in (*self.running, text)) <= self.shape.kv_tokens


class RankedEngine(ModelEngine):
    """Orders its queue by lane, then by arrival, and evicts the last text in that order."""

    def submit(self, text: ModelText) -> None:
        insort(self.waiting, text, key=RANK)

    def _take(self) -> None:
        super()._take()
        self.running.sort(key=RANK)

    def _put_back(self, text: ModelText) -> None:
        self.submit(text)


class Everything(AdmissionRule):
    """Lets everything through at once."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        return True
