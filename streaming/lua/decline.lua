#!lua flags=allow-oom
-- A worker puts a job back that only a newer version can read. The claim is undone, and the job goes to the end of its
-- lane: jobs behind it that this worker can read come first then. ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record cannot be read: then it has
--          failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return or_malformed(id, worker, function()
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'run', 'cancel', 'lane', 'entry', 'runs', 'queue_deadline',
    'deadline', 'alone', 'attempt')
  if not holds(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local now = now_ms()
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
    return 1
  end
  local model, priority = checked_place(s[5], s[6])
  local before, runs = s[11] - 1, string.gsub(s[7], '[^;]*;$', '')
  local expires = math.min(before == 0 and number_of(s[8]) or math.huge, number_of(s[9]) or math.huge)
  drop_entry(s[5], s[6])
  gather(released, worker, id)
  local lane = lane_key(model, priority)
  if s[10] == '1' then
    lane = suspects_key(model, priority)
    if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
  end
  local entry = redis.call('XADD', lane, '*', 'job', id)
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '', 'attempt', before, 'runs', runs)
  if before == 0 then redis.call('HDEL', job, 'attempt', 'runs', 'claimed') end
  if expires < math.huge then redis.call('ZADD', timers_key(), expires, id) end
  wake(model, now)
  return 1
end) or 0
