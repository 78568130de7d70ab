#!lua flags=allow-oom
-- Removes an address without a subscriber from the jobs that publish to it. A process that subscribes there again sends
-- `follow` again. ARGV: worker, address, ids
-- Returns: 'fenced' | how many of the jobs are this worker's
local worker, address, removed = ARGV[1], ARGV[2], 0
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
    removed = removed + 1
  end
end
return removed
