-- Send a job's tokens to one more address from now on; what came before is in the log. ARGV: id, address
-- Returns: the job's state, or 'unknown'
local id, address = ARGV[1], ARGV[2]
local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'reply')
if not s[1] then return 'unknown' end
if (s[1] == 'queued' or s[1] == 'in_progress') and not string.find(',' .. s[3] .. ',', ',' .. address .. ',', 1, true) then
  redis.call('HSET', job_key(id), 'reply', s[3] == '' and address or (s[3] .. ',' .. address))
  if s[1] == 'in_progress' then tell_worker(s[2], {'a', id, address}) end
end
return s[1]
