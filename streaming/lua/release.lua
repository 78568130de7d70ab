#!lua flags=allow-oom
-- Requeues a job that a draining worker hands back unfinished; it does not count as a lost worker.
-- ARGV: worker, id, run, the most seconds to keep the worker's log for the job
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record is malformed: then it has
--          failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'cancel', 'alone')
  local now = now_ms()
  if s[1] == 'queued' and redis.call('SISMEMBER', claims_key(worker), id) == 1 then
    requeue(id, now, false, worker) -- the claim was interrupted before it changed the record
    return 1
  end
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  close_attempt(id, s[4] and 'cancelled' or 'handed_back', now)
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
  else
    requeue(id, now, s[5] == '1', worker)
  end
  retain_log(worker, {id}, ARGV[4])
  return 1
end) or 0
