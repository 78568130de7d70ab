-- Ends of jobs and of attempts that a script decides about.

-- Note how the last attempt at a job ended: 'lost' with its worker, 'handed_back', 'preempted' or 'cancelled'. `finish`
-- does not call it: a reader takes the end of a job's last attempt from its record. Each entry of `past` is
-- 'name:worker:run:claimed:ended:outcome;', and the newest are kept.
local MAX_PAST_ATTEMPTS = 20

local function close_attempt(id, outcome, now, seen)
  local s = redis.call('HMGET', job_key(id), 'runs', 'name', 'claimed', 'past')
  local worker, run = string.match(s[1] or '', '([^:;]+):%d+:(%d+);$')
  if not worker then return end
  local entry = table.concat({s[2] or '', worker, run, s[3] or 0, now, outcome, seen or nil}, ':')
  local past = (s[4] or '') .. entry .. ';'
  local _, count = string.gsub(past, ';', ';')
  for _ = MAX_PAST_ATTEMPTS + 1, count do past = string.gsub(past, '^[^;]*;', '') end
  redis.call('HSET', job_key(id), 'past', past)
end

-- End a job that no worker will end: cancelled while queued, expired, or given up. If a worker had begun it, its tokens
-- are only in logs: these are kept until `salvage` has stored them. Raises if its record is malformed.
local function end_job(id, state, reason, now)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'reply', 'worker', 'keep', 'events', 'idem', 'owed', 'runs',
    'tenant', 'size', 'state', 'conversation')
  local model, priority, kind = require_lane_entry(s[1], s[2])
  redis.call('HSET', job, 'state', state, 'reason', reason, 'done', now)
  note_script_end(id)
  ack_and_delete(s[1], s[2])
  if kind == 'lane' and s[12] == 'queued' then leave_line(model, priority, s[10] or '', s[2], id) end
  add_reserved_bytes(model, priority, s[8], -1)
  count_ended_job(s[10], s[11], retention_s(s[5]), now, 0)
  if (s[9] or '') ~= '' then
    redis.call('ZADD', cut_key(), now, id)
    redis.call('EXPIRE', parked_key(id), retention_s(s[5]) + LOG_GRACE_S) -- `salvage` shortens it
  end
  if s[4] then buffer_write(buffered_releases, s[4], id) end
  redis.call('ZREM', timers_key(), id)
  redis.call('EXPIRE', job, retention_s(s[5]))
  if is_idem_key(s[7]) then redis.call('EXPIRE', s[7], retention_s(s[5])) end
  if s[13] then end_turn(s[13], id, retention_s(s[5]), now) end
  if s[6] then emit_event(s[6], id, s[10] or '', 'job.' .. state, true) end
  publish(s[3], cmsgpack.pack({'e', id}))
end

-- Requeue a claimed job: on its retry stream, which workers read before the lane, or on the suspects stream, whose jobs
-- run alone. Raises if its record is malformed.
local function requeue(id, now, suspect, worker)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'deadline', 'tenant', 'state')
  local model, priority, kind = require_lane_entry(s[1], s[2])
  local due = parse_number(s[3])
  if s[3] and not due then error('invalid deadline', 0) end
  ack_and_delete(s[1], s[2])
  if kind == 'lane' and s[5] == 'queued' then leave_line(model, priority, s[4] or '', s[2], id) end -- interrupted claim
  buffer_write(buffered_releases, worker, id)
  local lane = (suspect or kind == 'suspects') and suspects_key(model, priority) or retry_key(model, priority)
  local entry = redis.call('XADD', lane, '*', 'job', id)
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '')
  if due then redis.call('ZADD', timers_key(), due, id) end
  if not wake_worker(model, priority, now) then wake_scheduler(model) end
end
