-- Ends of jobs, and what follows from them: turns of conversations, events, kept logs.

-- Conversations: one turn at a time, what they count as, and how long they are kept.

-- The most time (s) for which a conversation waits for the end of its turn, which may begin in a month. The end of the turn's job shortens it.
local MAX_TURN_S = 62 * 86400

-- Count a conversation's bytes as requests of its tenant until it expires, and no more where `size` says that they are
-- counted. Returns what its record notes as its size: 'bytes:span end'.
local function count_conversation(tenant, size, bytes, keep)
  local was, span = string.match(size or '', '^(%d+):(%d+)$')
  if integer_text(was) and integer_text(span) and tonumber(span) > now_ms() / 1000 then
    buffer_sum('usage', tenant, span, -was)
  end
  local ends = usage_span_end(keep)
  if bytes > 0 then buffer_sum('usage', tenant, ends, bytes) end
  return bytes .. ':' .. ends
end

-- Refuse that a conversation grows by these bytes beyond its tenant's quota of request bytes or its share of the store.
-- Returns: nil | {'quota', ...}
local function no_room(tenant, keep, bytes, most, share)
  local kept = most and tenant_usage(tenant, keep).requests
  if most and kept + bytes > most then return {'quota', 'requests', kept} end
  if not share then return nil end
  local used, reserved = shared_bytes(tenant, keep)
  return used + bytes > share and {'quota', 'share', reserved} or nil
end

local function conversation_bytes(size)
  return tonumber(integer_text(string.match(size or '', '^(%d+):')) or 0)
end

-- Give a conversation its turn: no other one may begin until this job has ended and its items were added.
local function begin_turn(conversation, id)
  redis.call('HSET', conversation_key(conversation), 'turn', id)
  redis.call('EXPIRE', conversation_key(conversation), MAX_TURN_S)
end

-- Let a conversation be kept for as long as the job of its turn, which has ended. The job's items are added by whoever
-- uses the conversation next, from the job's record. Does nothing if the conversation is gone or malformed.
local function end_turn(conversation, id, keep)
  if (conversation or '') == '' then return end
  local key = conversation_key(conversation)
  local s = redis.pcall('HMGET', key, 'turn', 'tenant', 'size')
  if s.err or s[1] ~= id or not s[2] then return end
  redis.call('HSET', key, 'size', count_conversation(s[2], s[3], conversation_bytes(s[3]), keep))
  redis.call('EXPIRE', key, keep)
end

-- Events of jobs for brokers and webhooks, until they are delivered.

-- Undelivered events are dropped after a week, so that they do not fill the store of a deployment without an offline
-- process.
local OUTBOX_RETENTION_S = 7 * 86400

local function append_to_outbox(box, id, tenant, what, ...)
  local oldest = string.format('%d-0', now_ms() - 1000 * OUTBOX_RETENTION_S)
  redis.call('XADD', box, 'MINID', '~', oldest, '*', 'id', id, 'tenant', tenant, 'type', what, ...)
  redis.call('EXPIRE', box, OUTBOX_RETENTION_S)
end

local function delete_event(box, entry)
  redis.call('XACK', box, GROUP, entry)
  redis.call('XDEL', box, entry)
end

-- Append a lifecycle event to the outboxes that the job's record names: b the broker, w webhooks (final events only).
-- The entry carries the webhook that the request names (h, o), because the record may be deleted before it is read.
-- `what` is the event type, such as job.completed.
local function emit_event(for_whom, id, tenant, what, final)
  if string.find(for_whom, 'b', 1, true) then append_to_outbox(outbox_key('broker'), id, tenant, what) end
  if not final or not string.find(for_whom, 'w', 1, true) then return end
  if string.find(for_whom, 'r', 1, true) then what = string.gsub(what, '^job', 'response') end
  local webhook = string.find(for_whom, '[ho]') and redis.call('HGET', job_key(id), 'webhook') or ''
  append_to_outbox(outbox_key('webhooks'), id, tenant, what, 'for', for_whom, 'webhook', webhook)
end

-- Schedule the next attempt of a webhook message. Its record and its endpoint's queue expire after 31 days, longer than
-- attempts can go on; `settle` shortens that. The expiry also removes messages of endpoints that are not configured now.
local WEBHOOK_RETENTION_S = 31 * 86400

local function schedule_webhook(id, endpoint, due)
  redis.call('HSET', hook_key(id), 'due', due)
  redis.call('EXPIRE', hook_key(id), WEBHOOK_RETENTION_S)
  redis.call('ZADD', hook_due_key(endpoint), due, id)
  redis.call('EXPIRE', hook_due_key(endpoint), WEBHOOK_RETENTION_S)
end

-- A dead worker's log is kept while an unfinished job has tokens in it: retain_log registers such jobs, release_logs
-- removes one that has ended. After the last one the log expires within a minute, so that current readers can finish; so
-- does the job's own parked log, which a run of frame 0 names.
local LOG_GRACE_S = 60

local function retain_log(worker, ids, keep)
  if #ids > 0 then
    redis.call('SADD', heirs_key(worker), unpack(ids))
    redis.call('EXPIRE', heirs_key(worker), keep)
  end
end

local function expire_log(worker, keep)
  redis.call('EXPIRE', log_key(worker), redis.call('EXISTS', heirs_key(worker)) == 1 and keep or LOG_GRACE_S)
end

local function release_logs(id, runs)
  redis.call('EXPIRE', parked_key(id), LOG_GRACE_S)
  for worker in string.gmatch(runs or '', '([^:;]+):[^;]*;') do
    if redis.call('SREM', heirs_key(worker), id) == 1 and redis.call('EXISTS', heirs_key(worker)) == 0
      and redis.call('HGET', worker_key(worker), 'state') ~= 'live' then
      redis.call('EXPIRE', log_key(worker), LOG_GRACE_S)
    end
  end
end

-- Ends of workers, and ends of jobs and of attempts that a script decides about.

-- Note in which state a worker has ended: nobody wakes it any more, and another one may run suspects. Returns its name and
-- the time of its last frame, each false if it is not known.
local function end_worker(worker, state)
  local known = redis.call('HMGET', worker_key(worker), 'model', 'name', 'at')
  local model = known[1]
  redis.call('HSET', worker_key(worker), 'state', state)
  redis.call('EXPIRE', worker_key(worker), 3600)
  for _, key in ipairs(model and {idle_key(model), yielding_key(model), prefetching_key(model)} or {}) do
    redis.call('ZREM', key, worker) -- before its jobs are put back: they must wake a worker that lives
  end
  if model and redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
  return known[2], known[3]
end

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

-- Fields of a record that the end of its job needs, in the order in which the functions below have them.
local END_FIELDS = {'state', 'lane', 'entry', 'reply', 'worker', 'keep', 'events', 'idem', 'owed', 'runs', 'tenant', 'size',
  'conversation', 'shared', 'hold', 'media'}

-- Raise if a reader could not decode the numbers or the runs of an ending job's record: it would then report another end
-- than this one. `s`: END_FIELDS, the run, and NUMBERS.
local NUMBERS = {'attempt', 'created', 'claimed', 'started', 'deadline', 'epoch'}

local function check_readable(s)
  for i = 18, 23 do
    if s[i] and s[i] ~= '' and not parse_number(s[i]) then error('invalid ' .. NUMBERS[i - 17], 0) end
  end
  if s[6] and s[6] ~= '' and not parse_number(s[6]) then error('invalid keep', 0) end
  local rest = string.gsub(s[10] or '', '[^:;]+:%d+:%d+;', '')
  if rest ~= '' then error('invalid runs', 0) end
end

-- Let go of what an ending job holds: its entry, its reservation, its worker's claim, its turn. Its record is kept for a
-- while. `s`: END_FIELDS; the caller has checked its lane and entry (no entry: nil), all other fields may be malformed.
-- `model`, `priority`: of the lane, nil if that is malformed. `result`: bytes of its result. `prompt`, `generated`: its tokens,
-- nil until `salvage` knows them. Malformed reserved bytes stay reserved until `reap` deletes the lane's sum with its last job.
local function let_go(job, id, s, model, priority, result, prompt, generated)
  local keep, reserved = retention_s(s[6]), integer_text(s[9])
  if s[3] then buffer_write('entries', s[2], s[3]) end
  if model and reserved then buffer_sum('reservations', model, s[3] == HELD and 'held' or priority, -reserved) end
  if s[14] and s[11] and reserved then buffer_sum('tenant_owed', tenant_owed_key(), s[11], -reserved) end
  count_ended_job(s[11], s[12], keep, result)
  if (s[5] or '') ~= '' then buffer_write('releases', s[5], id) end
  redis.call('EXPIRE', job, keep)
  if is_idem_key(s[8]) then redis.call('EXPIRE', s[8], keep) end
  if s[13] then end_turn(s[13], id, keep) end
  if s[15] then settle_limits(id, s[15], true, prompt, generated) end
  -- A failed job may be replayed, and a stored response may be continued.
  if s[16] then
    local needed = s[16] == 'keep' or redis.call('HGET', job, 'state') == 'failed'
    redis.call('EXPIRE', media_key(id), needed and keep or 0)
  end
end

-- Count what a job has used for its tenant, model and key and the day (UTC) of its end, `done` in its record. The script that
-- notes the end of a job calls this once; `salvage` adds the tokens of one that a script has ended.
local function count_usage(tenant, model, caller, done, requests, prompt, completion, cached)
  local key = usage_key(math.floor(done / DAY_MS), tenant, model .. ' ' .. (caller or ''))
  local sums = round.used and round.used[key]
  if sums then
    sums[1], sums[2], sums[3], sums[4] = sums[1] + requests, sums[2] + prompt, sums[3] + completion, sums[4] + cached
  else
    cache('used')[key], round.buffered = {requests, prompt, completion, cached}, true
  end
end

-- Note the end of a job that no worker ends, before let_go, and tell those who wait for it. The process whose sweep takes
-- its id from `script_ends` writes the record of the request.
local MAX_SCRIPT_ENDS = 10000
local SCRIPT_ENDS_EXPIRY_S = 86400

local function close_job(id, s, state, reason, now)
  redis.call('HSET', job_key(id), 'state', state, 'reason', reason, 'done', now)
  redis.call('RPUSH', script_ends_key(), id)
  redis.call('LTRIM', script_ends_key(), -MAX_SCRIPT_ENDS, -1)
  redis.call('EXPIRE', script_ends_key(), SCRIPT_ENDS_EXPIRY_S)
  redis.call('ZREM', timers_key(), id)
  if s[7] then emit_event(s[7], id, s[11] or '', 'job.' .. state, true) end
  count_usage(s[11] or '', parse_lane(s[2]) or '', redis.call('HGET', job_key(id), 'caller'), now, 1, 0, 0, 0)
  publish(s[4], cmsgpack.pack({'e', id}))
end

-- End a job that no worker will end: cancelled while queued, expired, or given up. If a worker had begun it, its tokens
-- are only in logs: these are kept until `salvage` has stored them. Raises if its record is malformed. A waiting job leaves
-- its place last: if the server refuses a write before, whoever claims next drops it there, with its entry.
local function end_job(id, state, reason, now)
  local job = job_key(id)
  local s = redis.call('HMGET', job, unpack(END_FIELDS))
  local model, priority = require_lane_entry(s[2], s[3])
  local has_begun = (s[10] or '') ~= ''
  if has_begun then
    redis.call('ZADD', cut_key(), now, id)
    redis.call('EXPIRE', parked_key(id), retention_s(s[6]) + LOG_GRACE_S) -- `salvage` shortens it
  end
  close_job(id, s, state, reason, now)
  let_go(job, id, s, model, priority, 0, not has_begun and 0 or nil, 0)
  if s[1] == 'queued' and s[3] == HELD then
    unschedule(id, s[11] or '', s[6])
  elseif s[1] == 'queued' then
    redis.call('XDEL', s[2], s[3])
    leave_lane(model, priority, s[11] or '', s[3], id)
  end
end

-- Requeue a claimed job: to its lane's jobs to retry, which workers claim before new ones, or to the suspects, which run
-- alone. It leaves its worker's claims last: what the server has refused before is repeated from them. Raises if its record
-- is malformed.
local function requeue(id, now, suspect, worker)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'deadline', 'tenant', 'state', 'queue')
  local model, priority = require_lane_entry(s[1], s[2])
  local due = parse_number(s[3])
  if s[3] and not due then error('invalid deadline', 0) end
  if s[5] == 'queued' then leave_lane(model, priority, s[4] or '', s[2], id) end -- interrupted claim
  local queue = (suspect or s[6] == 'suspects') and 'suspects' or 'retry'
  redis.call('ZADD', requeued_key(queue, model, priority), now, to_member(s[2]) .. ':' .. id)
  redis.call('HSET', job, 'state', 'queued', 'queue', queue, 'worker', '')
  if due then redis.call('ZADD', timers_key(), due, id) end
  buffer_write('releases', worker, id)
  if not wake_worker(model, priority, now) then wake_scheduler(model) end
end
