#!lua flags=allow-oom
-- Records a checkpoint of a run: its deltas are complete from this frame of the log on, so that earlier frames can be
-- trimmed. ARGV: worker, id, run, frame
-- Returns: 'fenced' | 0 (not this run's, or the frame is not in the log) | 1
local worker, id, run, frame = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  if tonumber(redis.call('HGET', worker_key(worker), 'frame')) < tonumber(frame) then return 0 end
  local runs = string.gsub(s[4], ':%d+:%d+;$', ':' .. frame .. ':' .. run .. ';')
  redis.call('HSET', job_key(id), 'runs', runs)
  return 1
end) or 0
