#!lua flags=allow-oom
-- Registers a worker and gives it its lease. ARGV: worker, model, lease in ms, its name in
-- `penstock ps`. Returns now.
local worker, model, lease, name = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] or ''
local now = now_ms()
redis.call('HSET', worker_key(worker), 'state', 'live', 'model', model, 'frame', 0, 'name', name)
redis.call('ZADD', leases_key(), now + lease, worker)
return now
