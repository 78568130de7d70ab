"""Callers of Celery: greenlets, which it serves better than threads."""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import sys  # noqa: E402 - after the patching

from bench.jobs.callers import ANSWER, CallerPlan, threads  # noqa: E402
from bench.jobs.peers.celery_app import token  # noqa: E402


def ask() -> None:
    """One job."""
    answer = token.delay("say one word").get(timeout=60)
    if answer != ANSWER:
        raise ValueError(answer)


if __name__ == "__main__":
    threads(CallerPlan.of(sys.argv[1:]), ask)
