"""The control loop on a simulated clock: a day in half a minute, decided by the scheduler's own code."""
