#!lua flags=allow-oom
-- Nobody listens at this address any more: send it nothing more of these jobs. Whoever listens there after all follows
-- again. ARGV: worker, address, ids
-- Returns: 'fenced' | how many of them are this worker's
local worker, address, dropped = ARGV[1], ARGV[2], 0
if not is_live(worker) then return 'fenced' end
for i = 3, #ARGV do
  local job = job_key(ARGV[i])
  local s = redis.pcall('HMGET', job, 'state', 'worker', 'reply')
  if not s.err and s[1] == 'in_progress' and s[2] == worker then
    local kept = {}
    for each in string.gmatch(s[3] or '', '[^,]+') do
      if each ~= address then kept[#kept + 1] = each end
    end
    redis.call('HSET', job, 'reply', table.concat(kept, ','))
    dropped = dropped + 1
  end
end
return dropped
