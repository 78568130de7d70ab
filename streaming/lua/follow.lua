-- Scripts of a job's reader and owner: where its tokens go, its cancel, the delivery of its answer.

#!lua name=follow flags=allow-oom roles=api
-- Subscribes one more API process to a job's tokens; it reads earlier tokens from the log. ARGV: id, address,
--       '1' if an idempotency key led to it, '1' if its own client waits there for an answer in one piece: listed twice,
--       the address gets the deltas, too
-- Returns: the job's state, 'unknown', or 'abandoned' (cancelled because its last client left; its key is free)
local id, address = ARGV[1], ARGV[2]
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'reply', 'abandoned')
if not s[1] then return 'unknown' end
if s[4] and ARGV[3] == '1' then return 'abandoned' end
local times = ARGV[4] == '1' and 2 or 1
for each in string.gmatch(s[3] or '', '[^,]+') do times = times - (each == address and 1 or 0) end
if (s[1] == 'queued' or s[1] == 'in_progress') and times > 0 then
  local more = string.rep(',' .. address, times)
  redis.call('HSET', job_key(id), 'reply', (s[3] or '') == '' and string.sub(more, 2) or (s[3] .. more))
  if s[1] == 'in_progress' then notify_worker(s[2], {'a', id, address}) end
end
return s[1]

#!lua name=cancel flags=allow-oom roles=api,offline promise
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

#!lua name=deliver flags=allow-oom roles=api
-- Records when answers were delivered to their clients, at most once per job; a job that is no longer kept is skipped.
-- ARGV: pairs of id, note
-- Returns: how many were new
local new, jobs = 0, {}
for i = 1, #ARGV, 2 do jobs[#jobs + 1] = job_key(ARGV[i]) end
local all = redis.call('EXISTS', unpack(jobs)) == #jobs
for i, job in ipairs(jobs) do
  if all or redis.call('EXISTS', job) == 1 then 
    local noted = redis.pcall('HSETNX', job, 'delivered', ARGV[2 * i])
    new = new + (type(noted) == 'number' and noted or 0) -- skip a key that is not a hash
  end
end
return new
