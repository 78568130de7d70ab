#!lua flags=allow-oom
-- A worker takes its lease. ARGV: worker, model, lease in ms. Returns now.
local worker, model, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now = now_ms()
redis.call('HSET', worker_key(worker), 'state', 'live', 'model', model, 'frame', 0)
redis.call('ZADD', leases_key(), now + lease, worker)
return now
