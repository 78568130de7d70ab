#!lua flags=allow-oom
-- Subscribes one more API process to a job's tokens; it reads earlier tokens from the log. ARGV: id, address,
--       '1' if an idempotency key led to it
-- Returns: the job's state, 'unknown', or 'abandoned' (cancelled because its last client left; its key is free)
local id, address = ARGV[1], ARGV[2]
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'reply', 'abandoned')
if not s[1] then return 'unknown' end
if s[4] and ARGV[3] == '1' then return 'abandoned' end
if (s[1] == 'queued' or s[1] == 'in_progress') and not string.find(',' .. (s[3] or '') .. ',', ',' .. address .. ',', 1, true) then
  redis.call('HSET', job_key(id), 'reply', (s[3] or '') == '' and address or (s[3] .. ',' .. address))
  if s[1] == 'in_progress' then notify_worker(s[2], {'a', id, address}) end
end
return s[1]
