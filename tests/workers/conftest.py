"""Workers with the simulated engine, for every test of this folder."""

from __future__ import annotations

from sim_worker import recorder, start

__all__ = ["recorder", "start"]
