-- Renew a lease. ARGV: worker, lease in ms
-- Returns: 'fenced' | ids of this worker's jobs that somebody cancelled (the message may have been lost)
local worker, lease = ARGV[1], tonumber(ARGV[2])
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
redis.call('ZADD', leases_key(), now_ms() + lease, worker)
local cancelled = {}
for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do
  if redis.call('HGET', job_key(id), 'cancel') then cancelled[#cancelled + 1] = id end
end
return cancelled
