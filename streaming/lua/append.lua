-- Write one engine step to the worker's log, then show it. Refused when the worker was fenced; harmless when repeated.
-- ARGV: worker, frame number, lease in ms, oldest frame still needed, then pairs of reply address ('-' for none), frame
-- Returns: 'fenced' | 0 (this frame is already in the log) | 1
local worker, number, lease, oldest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame')
if mine[1] ~= 'live' then return 'fenced' end
redis.call('ZADD', leases_key(), now_ms() + lease, worker)
if number <= tonumber(mine[2]) then return 0 end
redis.call('XADD', log_key(worker), 'MINID', '~', oldest, number .. '-0', unpack(ARGV, 5))
redis.call('HSET', worker_key(worker), 'frame', number)
for i = 5, #ARGV, 2 do
  if ARGV[i] ~= '-' then redis.call('PUBLISH', ARGV[i], ARGV[i + 1]) end
end
return 1
