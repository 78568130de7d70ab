-- A worker hands a job back unfinished (it is draining): not counted as an attempt. ARGV: worker, id
-- Returns: 'fenced' | 0 (not this worker's) | 1
local worker, id = ARGV[1], ARGV[2]
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'cancel', 'alone')
if s[1] ~= 'in_progress' or s[2] ~= worker then return 0 end
local now = now_ms()
if s[3] then
  end_job(id, 'cancelled', 'cancelled', now)
else
  redis.call('HINCRBY', job_key(id), 'attempt', -1)
  requeue(id, now, s[4] == '1')
end
return 1
