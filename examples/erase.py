"""erase.py REDIS_URL TENANT [JOB_ID...]: the jobs that have ended, with their webhook messages; without ids, all of the
tenant's, and its conversations."""

import sys
import time

import redis

url, tenant, *only = sys.argv[1:]
server = redis.Redis.from_url(url, decode_responses=True)
only = {name.removeprefix("resp_") for name in only}  # a response is a job


def chosen(name):
    return not only or name.removeprefix("resp_") in only


erased = 0
for jobs in server.scan_iter(f"penstock:*:jobs:{tenant}"):
    for job_id in filter(chosen, server.zrange(jobs, 0, -1)):
        record = jobs.removesuffix(f"jobs:{tenant}") + f"job:{job_id}"
        if server.hget(record, "state") in ("completed", "failed", "cancelled", "expired"):
            erased += server.delete(record)
for message in server.scan_iter("penstock:*:hook:*"):
    owner, subject = server.hmget(message, "tenant", "subject")
    if owner == tenant and chosen(subject):
        erased += server.delete(message)
for conversation in () if only else server.scan_iter("penstock:*:conversation:*"):
    if server.hget(conversation, "tenant") == tenant:
        erased += server.delete(conversation)
while server.info("persistence")["aof_rewrite_in_progress"]:
    time.sleep(0.1)  # a rewrite that began earlier may still keep what was erased
server.bgrewriteaof()
print(erased, "erased")
