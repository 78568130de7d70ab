#!lua flags=allow-oom
-- Cancel a job wherever it stands. ARGV: id, '1' to leave it alone if it runs
-- Returns: the state it was found in, or 'unknown'. A waiting job has ended on return; a running one will.
local id, waiting_only = ARGV[1], ARGV[2] == '1'
local s = redis.call('HMGET', job_key(id), 'state', 'worker')
if not s[1] then return 'unknown' end
if s[1] == 'queued' then
  end_job(id, 'cancelled', 'cancelled', now_ms())
elseif s[1] == 'in_progress' and not waiting_only then
  redis.call('HSET', job_key(id), 'cancel', 1)
  tell_worker(s[2], {'c', id})
end
return s[1]
