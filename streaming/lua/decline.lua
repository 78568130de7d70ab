#!lua flags=allow-oom
-- A worker puts a job back that only a newer version can read. The claim is undone, and the job goes to the end of its
-- lane: jobs behind it that this worker can read come first then. ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
local job = job_key(id)
local s = redis.pcall('HMGET', job, 'state', 'worker', 'run', 'cancel', 'lane', 'entry', 'runs', 'queue_deadline',
  'deadline', 'alone', 'attempt')
if s.err or s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= run then return 0 end
local now = now_ms()
if s[4] then
  end_job(id, 'cancelled', 'cancelled', now)
  return 1
end
drop_entry(s[5], s[6])
gather(let_go, worker, id)
local model, priority = string.match(s[5], '^' .. P .. '%a+:(.+):(%a+)$')
local lane, before = lane_key(model, priority), s[11] - 1
if s[10] == '1' then
  lane = suspects_key(model, priority)
  if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
end
local entry = redis.call('XADD', lane, '*', 'job', id)
redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '', 'attempt', before,
  'runs', (string.gsub(s[7], '[^;]*;$', '')))
if before == 0 then redis.call('HDEL', job, 'attempt', 'runs', 'claimed') end
local expires = math.min(before == 0 and tonumber(s[8]) or math.huge, tonumber(s[9]) or math.huge)
if expires < math.huge then redis.call('ZADD', timers_key(), expires, id) end
wake(model, now)
return 1
