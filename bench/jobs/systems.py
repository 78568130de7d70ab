"""Which systems are compared, at which settings. Those of the guests were tried out: other pools, numbers of processes
and polling intervals gave less.
"""

from __future__ import annotations

from bench.environments import Environment
from bench.jobs.system import Guest, JobsSystem, PenstockJobs

CHAT, STREAM, JOBS = "penstock", "penstock-stream", "penstock-jobs"

CELERY = Environment(
    name="celery",
    packages=("celery==5.7.0", "redis[hiredis]==8.1.0", "gevent==26.9.0", "packaging==26.3"),
)
ARQ = Environment(name="arq", packages=("arq==0.28.0", "redis[hiredis]==5.3.1", "uvloop==0.23.0"))
TASKIQ = Environment(
    name="taskiq",
    packages=("taskiq==0.13.0", "taskiq-redis==1.2.4", "redis[hiredis]==8.1.0", "uvloop==0.23.0"),
)
TASKIQ_OPTIONS = ("--workers", "1", "--max-async-tasks", "256", "--log-level", "WARNING")


def systems(cores: int) -> list[JobsSystem]:
    """All of them; those that can use several processes get one per core."""
    return [
        PenstockJobs(CHAT, f"Penstock, a chat answered in one piece, {cores} API processes, 1 worker", "chat", cores),
        PenstockJobs(STREAM, f"Penstock, a chat streamed, {cores} API processes, 1 worker", "stream", cores),
        PenstockJobs(JOBS, f"Penstock, POST /v1/jobs and GET ?wait, {cores} API processes, 1 worker", "jobs", cores),
        _celery("celery-prefork", f"Celery, {cores} prefork processes", "prefork", cores),
        _celery("celery-threads", "Celery, 8 threads", "threads", 8),
        Guest(
            "arq",
            f"arq, {cores} workers of 256 jobs; results polled for every 200 ms",
            ARQ,
            ("-m", "bench.jobs.guests.arq_worker", "{url}"),
            "bench.jobs.guests.arq_client",
            workers=cores,
            environ={"BENCH_POLL_S": "0.2"},
        ),
        Guest(
            "taskiq",
            "taskiq on a Redis list, 1 worker process of 256 tasks; results polled for every 50 ms",
            TASKIQ,
            ("-m", "taskiq", "worker", "bench.jobs.guests.taskiq_app:broker", *TASKIQ_OPTIONS),
            "bench.jobs.guests.taskiq_client",
            environ={"BENCH_POLL_S": "0.05"},
        ),
    ]


def _celery(name: str, title: str, pool: str, concurrency: int) -> Guest:
    options = ("--pool", pool, "--concurrency", str(concurrency), "--loglevel", "WARNING")
    lean = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    words = ("-m", "celery", "-A", "bench.jobs.guests.celery_app", "worker", *options, *lean)
    return Guest(name, f"{title}, 64 callers", CELERY, words, "bench.jobs.guests.celery_client", most_callers=64)
