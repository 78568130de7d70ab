"""What an API process does beside its requests goes on, whatever happens to it once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from api import services
from api.services import Services
from penstock.engine import Capabilities, ModelCard
from streaming.errors import Unavailable


async def test_what_models_can_do_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that comes later is known then; while the store does not answer, what was known still is."""
    monkeypatch.setattr(services, "CARDS_INTERVAL_S", 0)
    card = ModelCard(name="m", engine="sim", context=10, max_output=10, capabilities=Capabilities(), created=1)
    known: list[dict[str, ModelCard]] = []
    answers = iter([{}, {"m": card}, Unavailable("down"), {"m": card, "n": card}])

    async def cards() -> dict[str, ModelCard]:
        known.append(each.cards)
        if isinstance(answer := next(answers), Unavailable):
            raise answer
        return answer

    each = SimpleNamespace(fleet=SimpleNamespace(cards=cards), metrics=Mock(), prepared=Mock(), cards={})
    following = asyncio.create_task(Services._refresh_cards(cast(Services, each)))
    while "n" not in each.cards:
        assert not following.done()
        await asyncio.sleep(0)
    following.cancel()
    assert known == [{}, {}, {"m": card}, {"m": card}]
