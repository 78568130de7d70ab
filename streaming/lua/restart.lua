#!lua flags=allow-oom
-- Begin a claimed job anew, under a new epoch: what earlier runs logged of it cannot be continued. From here on the record
-- names this run alone, so nobody reads their deltas any more; cursors of the old epoch are answered with a reset.
-- ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this run's) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
if s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= run then return 0 end
local mine = string.match(s[4], '([^;]+;)$')
if mine ~= s[4] then
  disown(id, string.sub(s[4], 1, -#mine - 1))
  redis.call('HSET', job_key(id), 'runs', mine)
  redis.call('HINCRBY', job_key(id), 'epoch', 1)
end
return 1
