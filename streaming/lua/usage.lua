#!lua flags=allow-oom
-- Reads a tenant's usage of the store, and counts waiting and running jobs in a slice of its list, newest first.
-- ARGV: tenant, seconds that jobs are kept after their end, jobs to skip, most jobs looked at
-- Returns: {jobs kept, bytes of their requests, bytes of their results, files, bytes of files, jobs looked at,
--           waiting among them, running among them}
local tenant, keep, rank, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local page = most > 0 and redis.call('ZRANGE', jobs_key(tenant), rank, rank + most - 1, 'REV') or {}
local waiting, running = 0, 0
for _, id in ipairs(page) do
  local state = redis.pcall('HGET', job_key(id), 'state')
  if state == 'queued' then waiting = waiting + 1 end
  if state == 'in_progress' then running = running + 1 end
end
local kept = tenant_usage(tenant, keep)
return {kept.jobs, kept.requests, kept.results, redis.call('ZCARD', files_key(tenant)), stored_bytes(tenant), #page,
  waiting, running}
