#!lua flags=allow-oom
-- Appends one engine step to the worker's durable log, then publishes its frames. Idempotent by the frame's number.
-- ARGV: worker, frame number, lease in ms (0: not renewed), oldest frame still needed, '1' if earlier frames may be
--       missing, then pairs of reply address ('-' for none), frame
-- Returns: 'fenced' | 0 (this frame is already in the log) | 1 | -1 (frames before this one are missing: the store has
--          lost data, and nothing was written)
local worker, number, lease, oldest, forced = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5] == '1'
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame')
if mine[1] ~= 'live' then return 'fenced' end
local now = now_ms()
if lease > 0 then redis.call('ZADD', leases_key(), now + lease, worker) end
local last = tonumber(mine[2])
if number <= last then return 0 end
if number > last + 1 and not forced then return -1 end
redis.call('XADD', log_key(worker), 'MINID', '~', oldest, number .. '-0', unpack(ARGV, 6))
redis.call('HSET', worker_key(worker), 'frame', number, 'at', now)
for i = 6, #ARGV, 2 do
  if ARGV[i] ~= '-' then redis.call('PUBLISH', ARGV[i], ARGV[i + 1]) end
end
return 1
