#!lua flags=allow-oom
-- Removes the reply address of a lost API process from a worker's jobs, so that the worker stops publishing to it. A
-- process that subscribes to that address again calls `follow` again. ARGV: worker, address, ids
-- Returns: 'fenced' | number of these jobs that the worker still runs
local worker, address, removed = ARGV[1], ARGV[2], 0
if not is_live(worker) then return 'fenced' end
for i = 3, #ARGV do
  local job = job_key(ARGV[i])
  local s = redis.pcall('HMGET', job, 'state', 'worker', 'reply')
  if not s.err and s[1] == 'in_progress' and s[2] == worker then
    redis.call('HSET', job, 'reply', without_address(s[3], address))
    removed = removed + 1
  end
end
return removed
