#!lua flags=allow-oom
-- The job an idempotency key leads to, for a request that finds no room: `put` would refuse it before it looks, or be
-- refused itself. ARGV: tenant, digest of tenant and idempotency key, body digest, '1' if the request waits
-- Returns: {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (both as of `put`) | {'free'}
local tenant, idem, digest, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local epoch = 0
if not waits then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end
return job_of_key(idem_key(idem), tenant, digest, not waits, epoch) or {'free'}
