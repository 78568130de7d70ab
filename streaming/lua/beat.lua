#!lua flags=allow-oom
-- Heartbeat of a worker: renews its lease. ARGV: worker, lease in ms
-- Returns: 'fenced' | {id, run, who cancelled it | ''}... of every job that this worker holds by the store's records:
-- the message of a cancel, or the answer of a claim, may have been lost
local worker, lease = ARGV[1], tonumber(ARGV[2])
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
redis.call('ZADD', leases_key(), now_ms() + lease, worker)
local model = redis.call('HGET', worker_key(worker), 'model')
if model and redis.call('GET', alone_key(model)) == worker then redis.call('PEXPIRE', alone_key(model), 3 * lease) end
local held = {}
for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do
  local s = redis.pcall('HMGET', job_key(id), 'run', 'cancel')
  held[#held + 1] = {id, tonumber(integer_text(s[1])) or 0, s[2] or ''}
end
return held
