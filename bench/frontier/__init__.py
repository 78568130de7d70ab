"""Frontier of real servers on this machine, and how well the simulator predicts the loads that it was not fitted to."""
