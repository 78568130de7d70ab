#!lua flags=allow-oom
-- A worker hands a job back unfinished (it is draining): not counted as a loss.
-- ARGV: worker, id, run, seconds to keep the worker's log for the job, at most
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
local s = redis.pcall('HMGET', job_key(id), 'state', 'worker', 'run', 'cancel', 'alone')
if s.err or s[1] ~= 'in_progress' or s[2] ~= worker then
  redis.call('SREM', claims_key(worker), id) -- it is nobody's, or another's: this worker need not be asked for it again
  return 0
end
if s[3] ~= run then return 0 end
local now = now_ms()
if s[4] then
  end_job(id, 'cancelled', 'cancelled', now)
else
  requeue(id, now, s[5] == '1')
  inherit(worker, {id}, ARGV[4])
end
return 1
