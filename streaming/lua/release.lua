-- A worker hands a job back unfinished (it is draining): not counted as a loss. ARGV: worker, id, attempt
-- Returns: 'fenced' | 0 (not this worker's, or no longer in this attempt) | 1
local worker, id, attempt = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'attempt', 'cancel', 'alone')
if s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= attempt then return 0 end
local now = now_ms()
if s[4] then
  end_job(id, 'cancelled', 'cancelled', now)
else
  requeue(id, now, s[5] == '1')
end
return 1
