#!lua flags=allow-oom
-- Requeues a job that a worker hands back unfinished, because it drains or needs the job's place; it does not count as a
-- lost worker. What the job's runs have generated moves from the workers' logs into the job's parked log.
-- ARGV: worker, id, run, the most seconds to keep the worker's log for the job if nothing is parked, outcome of the
--       attempt ('handed_back' | 'preempted'), frame...: all that the job's runs have generated; none: nothing, or the
--       worker does not know the job
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record is malformed: then it has
--          failed) | 1
local worker, id, run, keep, outcome = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'cancel', 'alone', 'runs')
  local now = now_ms()
  if s[1] == 'queued' and redis.call('SISMEMBER', claims_key(worker), id) == 1 then
    requeue(id, now, false, worker) -- the claim was interrupted before it changed the record
    return 1
  end
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  if #ARGV > 5 then
    if not string.find(s[6] or '', ':%d+:%d+;$') then error('invalid runs', 0) end
    redis.call('DEL', parked_key(id))
    for i = 6, #ARGV do redis.call('XADD', parked_key(id), i - 5 .. '-0', '-', ARGV[i]) end
    redis.call('HSET', job_key(id), 'runs', (string.gsub(s[6], ':%d+:(%d+;)$', ':0:%1')))
  else
    retain_log(worker, {id}, keep)
  end
  close_attempt(id, s[4] and 'cancelled' or outcome, now)
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
  else
    requeue(id, now, s[5] == '1', worker)
  end
  return 1
end) or 0
