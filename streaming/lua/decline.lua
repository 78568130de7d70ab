#!lua flags=allow-oom
-- Puts a job back that only a newer version can read: undoes the claim and appends the job to its lane's end, so that
-- this worker claims the jobs behind it first. For this its tenant stays charged. A job with a limit keeps its latest
-- start. ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record is malformed: then it has
--          failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'run', 'cancel', 'lane', 'entry', 'runs', 'queue_deadline',
    'deadline', 'alone', 'attempt', 'tenant', 'order', 'created')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local now = now_ms()
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
    return 1
  end
  local model, priority = require_lane_entry(s[5], s[6])
  local before, runs = s[11] - 1, string.gsub(s[7], '[^;]*;$', '')
  local expires = math.min(before == 0 and parse_number(s[8]) or math.huge, parse_number(s[9]) or math.huge)
  ack_and_delete(s[5], s[6])
  buffer_write(buffered_releases, worker, id)
  local lane, alone = lane_key(model, priority), s[10] == '1'
  if alone then
    lane = suspects_key(model, priority)
    if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
  end
  local entry = redis.call('XADD', lane, '*', 'job', id)
  if not alone then rejoin_line(model, priority, s[12] or '', entry, id, s[14], s[13], true) end
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '', 'attempt', before, 'runs', runs)
  if before == 0 then redis.call('HDEL', job, 'attempt', 'runs', 'claimed') end
  if expires < math.huge then redis.call('ZADD', timers_key(), expires, id) end
  wake_worker(model, priority, now)
  return 1
end) or 0
