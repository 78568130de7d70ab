"""Workers with the simulated engine, for every test of this folder."""

from __future__ import annotations

from sim_worker import recorder, shop, start

__all__ = ["recorder", "shop", "start"]
