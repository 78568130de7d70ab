"""Planted bugs of what the queue promises a client: its lane, its wait, and when to come back."""

from __future__ import annotations

from bench.planted.bug import Bug, Edit

TRTLLM = "tests/workers/engines/trtllm/test_engine.py::test_"

PROMISES = (
    Bug(
        "the engine does not hear the lane",
        "Inside the engine, a line of a batch goes before a chat that came a moment later.",
        (Edit("workers/attempt.py", "ENGINE_PRIORITY[self.job.priority]", "NEUTRAL_PRIORITY"),),
        ("tests/workers/test_attempt.py::test_every_text_of_a_job_has_the_priority_of_its_lane",),
    ),
    Bug(
        "a resumed line goes before every chat",
        "After the loss of a worker, its batch work holds up the chats of another inside the engine.",
        (Edit("workers/engines/trtllm/engine.py", "RESUMED_AHEAD = 0.1", "RESUMED_AHEAD = 0.5"),),
        (TRTLLM + "lanes_keep_their_order_inside_the_engine",),
    ),
)
