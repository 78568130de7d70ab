#!lua flags=allow-oom
-- Begin a claimed job anew, under a new epoch: what earlier runs logged of it cannot be continued. From here on the record
-- names this run alone, so nobody reads their deltas any more; cursors of the old epoch are answered with a reset.
-- ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this run's, or its record cannot be read: then it has failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return or_malformed(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
  if not holds(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local mine = string.match(s[4], '([^;]+;)$')
  if not mine then error('its runs are none', 0) end
  if mine ~= s[4] then
    redis.call('HINCRBY', job_key(id), 'epoch', 1) -- first, for it fails if that is no number
    disown(id, string.sub(s[4], 1, -#mine - 1))
    redis.call('HSET', job_key(id), 'runs', mine)
  end
  return 1
end) or 0
