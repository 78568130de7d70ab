#!lua flags=allow-oom
-- Finds the job of an idempotency key without accepting a new one, for a request that admission refuses: `put` would
-- refuse it before it looks. ARGV: tenant, digest of tenant and idempotency key, body digest, '1' if the request waits
-- Returns: {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (both as of `put`) | {'free'}
local tenant, idem, digest, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local epoch = 0
if not waits then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end
return find_by_idempotency_key(idem_key(idem), tenant, digest, not waits, epoch) or {'free'}
