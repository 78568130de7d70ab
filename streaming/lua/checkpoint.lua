#!lua flags=allow-oom
-- A run's deltas stand in the log anew from this frame on: earlier frames are no longer read for it, and may be trimmed.
-- ARGV: worker, id, run, frame
-- Returns: 'fenced' | 0 (not this run's, or the frame is not in the log) | 1
local worker, id, run, frame = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not is_live(worker) then return 'fenced' end
local s = redis.pcall('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
if s.err or s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= run then return 0 end
if tonumber(redis.call('HGET', worker_key(worker), 'frame')) < tonumber(frame) then return 0 end
redis.call('HSET', job_key(id), 'runs', (string.gsub(s[4], ':%d+:%d+;$', ':' .. frame .. ':' .. run .. ';')))
return 1
