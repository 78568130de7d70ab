#!lua flags=allow-oom
-- Cancels a job: ends a queued one, and marks a running one and notifies its worker.
-- ARGV: id, '1' to leave it alone if it runs, who cancels it (streaming/jobs/job.py), and if it is cancelled only because
--       the last client of an API process disconnected: the address of that process. Then the job is kept if other
--       processes follow it or a client knows its id (pinned); else its idempotency key is freed, so that the next request
--       with that key computes anew. The field `cancel` names who cancelled the job first.
-- Returns: the state it was found in, 'unknown' or 'kept'. A queued job has ended on return; a running one will. A job
--          whose record is malformed has failed.
local id, waiting_only, by, left = ARGV[1], ARGV[2] == '1', ARGV[3], ARGV[4]
return run_or_fail(id, nil, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'reply', 'pinned', 'idem', 'lane', 'entry',
    'cancel')
  if not s[1] then return 'unknown' end
  if not STATES[s[1]] then error('invalid state', 0) end
  if s[1] == 'queued' then require_lane_entry(s[6], s[7]) end
  if s[1] == 'in_progress' and not s[2] then error('invalid worker', 0) end
  if left and (s[1] == 'queued' or s[1] == 'in_progress') then
    local others = without_address(s[3], left)
    redis.call('HSET', job_key(id), 'reply', others)
    if others ~= '' or s[4] == '1' then return 'kept' end
    redis.call('HSET', job_key(id), 'abandoned', 1)
    redis.call('HDEL', job_key(id), 'idem')
    free_idempotency_key(s[5], id)
  end
  if s[1] == 'queued' then
    redis.call('HSET', job_key(id), 'cancel', by)
    end_job(id, 'cancelled', 'cancelled', now_ms())
  elseif s[1] == 'in_progress' and not waiting_only then
    local first = string.match(s[8] or '', '^%l[%l_]*$') or by -- an older version wrote '1', and did not say who
    redis.call('HSET', job_key(id), 'cancel', first)
    notify_worker(s[2], {'c', id, first})
  end
  return s[1]
end) or 'failed'
