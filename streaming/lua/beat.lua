#!lua flags=allow-oom
-- Renew a lease. ARGV: worker, lease in ms
-- Returns: 'fenced' | {id, run, '1' if somebody cancelled it}... for every job this worker holds, as the server sees
-- it: a cancel's message, or a claim's answer, may have been lost
local worker, lease = ARGV[1], tonumber(ARGV[2])
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
redis.call('ZADD', leases_key(), now_ms() + lease, worker)
local model = redis.call('HGET', worker_key(worker), 'model')
if model and redis.call('GET', alone_key(model)) == worker then redis.call('PEXPIRE', alone_key(model), 3 * lease) end
local held = {}
for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do
  local s = redis.pcall('HMGET', job_key(id), 'run', 'cancel')
  held[#held + 1] = {id, tonumber(whole_number(s[1])) or 0, s[2] or ''}
end
return held
