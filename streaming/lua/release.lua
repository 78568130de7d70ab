#!lua flags=allow-oom
-- A worker hands a job back unfinished (it is draining): not counted as a loss.
-- ARGV: worker, id, run, seconds to keep the worker's log for the job, at most
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record cannot be read: then it has
--          failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return or_malformed(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'cancel', 'alone')
  local now = now_ms()
  if s[1] == 'queued' and redis.call('SISMEMBER', claims_key(worker), id) == 1 then
    requeue(id, now, false, worker) -- the claim that gave it broke off
    return 1
  end
  if not holds(id, worker, run, s[1], s[2], s[3]) then return 0 end
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
  else
    requeue(id, now, s[5] == '1', worker)
    inherit(worker, {id}, ARGV[4])
  end
  return 1
end) or 0
