#!lua flags=allow-oom
-- Restarts a claimed job from its beginning under a new epoch, where the logged tokens cannot be continued. The record
-- then names this run alone, so readers ignore earlier deltas, and cursors of the old epoch get a reset.
-- ARGV: worker, id, run, the draft to keep: what earlier runs generated, which its readers have seen | ''
-- Returns: 'fenced' | 0 (not this run's, or its record is malformed: then it has failed) | 1
local worker, id, run, draft = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or ''
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local mine = string.match(s[4], '([^;]+;)$')
  if not mine then error('invalid runs', 0) end
  if mine ~= s[4] then
    -- First, because it fails if `epoch` is not a number.
    local epoch = redis.call('HINCRBY', job_key(id), 'epoch', 1)
    if draft ~= '' then redis.call('HSET', job_key(id), 'draft:' .. epoch, draft) end
    release_logs(id, string.sub(s[4], 1, -#mine - 1))
    redis.call('HSET', job_key(id), 'runs', mine)
  end
  return 1
end) or 0
