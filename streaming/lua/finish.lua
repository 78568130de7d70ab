#!lua flags=allow-oom
-- Ends a job: writes its terminal record and acknowledges its lane entry; only the worker that holds it may.
-- ARGV: worker, id, run, state, record, the same without its rows, '1' if readers are sent the record and not that,
--       reason for a dead letter | '', tokens that the job has generated, tokens of its prompt, once for each choice (0:
--       not known)
-- Returns: 'fenced' | 0 (ended already, or not this run's, or its record is malformed: then it has failed) | 1
local NUMBERS = {created = 16, claimed = 17, started = 18, deadline = 19, keep = 7, epoch = 20, attempt = 11}

-- Raise if a reader could not decode the numbers or the runs of a record: it would then report another end than this one.
local function check_readable(s)
  for name, i in pairs(NUMBERS) do
    if s[i] and s[i] ~= '' and not parse_number(s[i]) then error('invalid ' .. name, 0) end
  end
  local rest = string.gsub(s[15] or '', '[^:;]+:%d+:%d+;', '')
  if rest ~= '' then error('invalid runs', 0) end
end

local worker, id, run, state, record, summary = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local whole, dead = ARGV[7] == '1', ARGV[8]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'run', 'lane', 'entry', 'reply', 'keep', 'events', 'idem', 'owed',
    'attempt', 'tenant', 'size', 'order', 'runs', 'created', 'claimed', 'started', 'deadline', 'epoch', 'conversation')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local model, priority = require_lane_entry(s[4], s[5])
  check_readable(s)
  local now = now_ms()
  redis.call('HSET', job, 'state', state, 'record', record, 'summary', summary, 'done', now)
  count_ended_job(s[12], s[13], retention_s(s[7]), now, #record + #summary)
  ack_and_delete(s[4], s[5])
  add_reserved_bytes(model, priority, s[10], -1)
  charge_rest(model, priority, s[12] or '', s[14], tonumber(ARGV[9]), tonumber(ARGV[10]))
  if s[11] ~= '1' then release_logs(id, s[15]) end
  buffer_write(buffered_releases, worker, id)
  redis.call('EXPIRE', job, retention_s(s[7]))
  if is_idem_key(s[9]) then redis.call('EXPIRE', s[9], retention_s(s[7])) end
  if s[21] then end_turn(s[21], id, retention_s(s[7]), now) end
  publish(s[6], whole and record or summary)
  if s[8] then emit_event(s[8], id, s[12] or '', 'job.' .. state, true) end
  if dead ~= '' then dead_letter('job', id, 'reason', dead) end
  return 1
end) or 0
