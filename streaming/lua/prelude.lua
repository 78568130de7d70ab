-- Shared functions of the Lua scripts: streaming/redis/scripts.py puts those that a script uses in front of its text.
-- Time is Redis server time in milliseconds, never a client's clock; it does not advance while a script runs. One
-- EVALSHA runs a batch of calls, and each Redis command has a fixed cost, so the tables below cache what an earlier
-- call has read.
local CLOCK = nil
local function exact_ms()
  CLOCK = CLOCK or redis.call('TIME')
  return CLOCK[1] * 1000 + CLOCK[2] / 1000
end

local function now_ms()
  return math.floor(exact_ms())
end

local function is_past(when, now)
  return when and when ~= '' and tonumber(when) <= now
end

-- Buffered writes: the calls of a batch add to these tables, and flush_writes sends one command per key, after the last
-- call or when a list reaches 1,000 values. Stream entries to acknowledge by lane; jobs to remove from a worker's claims;
-- scores and ids for a tenant's job list; changes of reserved bytes by model and priority; changes of a tenant's usage.
local buffered_acks, buffered_releases, buffered_listings, buffered_reservations, buffered_usage = {}, {}, {}, {}, {}
local listing_keep_s = 86400 -- `put` sets it to the time for which jobs are listed
local function flush_writes()
  for lane, entries in pairs(buffered_acks) do
    redis.call('XACK', lane, GROUP, unpack(entries))
    redis.call('XDEL', lane, unpack(entries))
  end
  for worker, ids in pairs(buffered_releases) do redis.call('SREM', claims_key(worker), unpack(ids)) end
  for tenant, words in pairs(buffered_listings) do
    redis.call('ZADD', jobs_key(tenant), unpack(words))
    if now_ms() % 8 == 0 then -- trimming in one of eight flushes is enough
      redis.call('ZREMRANGEBYSCORE', jobs_key(tenant), '-inf', now_ms() - 1000 * listing_keep_s)
    end
    redis.call('EXPIRE', jobs_key(tenant), listing_keep_s)
  end
  for place, amounts in pairs(buffered_reservations) do
    local sum = 0
    for _, bytes in ipairs(amounts) do sum = sum + bytes end
    redis.call('HINCRBY', owed_key(), place, sum)
  end
  for tenant, fields in pairs(buffered_usage) do
    local key, now, last, new = kept_key(tenant), math.floor(now_ms() / 1000), 0, false
    local added = {}
    for i = 1, #fields, 2 do added[fields[i]] = (added[fields[i]] or 0) + fields[i + 1] end
    for field, bytes in pairs(added) do
      local sum = redis.call('HINCRBY', key, field, bytes)
      if sum == bytes then new = true end
      if sum <= 0 then redis.call('HDEL', key, field) end
      last = math.max(last, tonumber(string.match(field, '%d+')))
    end
    if new then -- once per new span: delete the counts of spans that are over
      for _, field in ipairs(redis.call('HKEYS', key)) do
        if tonumber(string.match(field, '%d+') or 0) <= now then redis.call('HDEL', key, field) end
      end
      if last - now > redis.call('TTL', key) then redis.call('EXPIRE', key, last - now) end
    end
  end
  buffered_acks, buffered_releases, buffered_listings, buffered_reservations, buffered_usage = {}, {}, {}, {}, {}
end

local function buffer_write(lists, key, word, second)
  local words = lists[key] or {}
  lists[key] = words
  words[#words + 1] = word
  words[#words + 1] = second
  if #words >= 1000 then flush_writes() end
end

-- Parse a number of a record, nil if it is malformed: integer_text returns a non-negative integer as its text,
-- parse_number any number from 0 to 1e18 (never inf or nan).
local function integer_text(text)
  return #(text or '') < 16 and string.match(text or '', '^%d+$') or nil
end

local function parse_number(text)
  local number = tonumber(text or nil)
  return number and number >= 0 and number < 1e18 and number or nil
end

-- Parse the key of a lane, a retry stream or a suspects stream. Returns its model, priority and kind, or nil.
local function parse_lane(lane)
  if string.sub(lane or '', 1, #P) ~= P then return nil end
  local kind, model, priority = string.match(lane, '^(%a+):(.+):(%a+)$', #P + 1)
  if kind ~= 'lane' and kind ~= 'retry' and kind ~= 'suspects' then return nil end
  for _, known in ipairs(PRIORITIES) do
    if priority == known then return model, priority, kind end
  end
end

local function is_entry(entry)
  local ms, number = string.match(entry or '', '^(%d+)%-(%d+)$')
  return ms and #ms < 20 and #number < 20
end

-- Check the lane and the entry of a job's record, before anything is written. Returns as parse_lane; raises if invalid.
local function require_lane_entry(lane, entry)
  local model, priority, kind = parse_lane(lane)
  if not model then error('invalid lane', 0) end
  if not is_entry(entry) then error('invalid entry', 0) end
  return model, priority, kind
end

-- Add (sign 1) or subtract (-1) the bytes reserved for an accepted job, summed by model and priority, which the names of
-- its lane, retry and suspects streams share. Malformed bytes are ignored: `reap` deletes a lane's sum with its last job.
local function add_reserved_bytes(model, priority, bytes, sign)
  if integer_text(bytes) then buffer_write(buffered_reservations, model .. ':' .. priority, sign * bytes) end
end

-- The bytes reserved for all unfinished jobs, cached: a call that reserves more adds them to reserved_total.
local reserved_total = nil
local function total_reserved_bytes()
  if not reserved_total then
    reserved_total = 0
    for _, bytes in ipairs(redis.call('HVALS', owed_key())) do reserved_total = reserved_total + math.max(0, bytes) end
  end
  return reserved_total
end

-- The end (s) of the time span in which a tenant's bytes are counted until their record has expired. A span is 1/24 of
-- the retention time. Counts lapse with their span and need no decrement, so none outlives its job, whatever crashes.
local function usage_span_end(keep, now)
  local span = math.ceil(keep / 24)
  return (math.floor((now / 1000 + keep) / span) + 1) * span
end

-- Move an ended job's request bytes to the span in which its record expires, and add its result bytes. `size` is what
-- `put` noted: 'request bytes:span end', or '' for a batch line, which is not counted.
local function count_ended_job(tenant, size, keep, now, result)
  local bytes, was = string.match(size or '', '^(%d+):(%d+)$')
  if not integer_text(bytes) or not integer_text(was) or not tenant then return end
  local ends = usage_span_end(tonumber(keep) or 3600, now)
  if tonumber(was) ~= ends then
    if tonumber(was) > now / 1000 then buffer_write(buffered_usage, tenant, was, -bytes) end
    buffer_write(buffered_usage, tenant, tostring(ends), tonumber(bytes))
  end
  if result > 0 then buffer_write(buffered_usage, tenant, 'r' .. ends, result) end
end

-- A tenant's usage, {jobs, requests (bytes), results (bytes)}, cached: a call that adds to it updates the cache.
local usage_by_tenant = {}
local function tenant_usage(tenant, keep)
  local sums = usage_by_tenant[tenant]
  if sums then return sums end
  flush_writes()
  local now = now_ms()
  sums = {jobs = redis.call('ZCOUNT', jobs_key(tenant), now - 1000 * keep, '+inf'), requests = 0, results = 0}
  local fields = redis.call('HGETALL', kept_key(tenant))
  for i = 1, #fields, 2 do
    local kind, ends = string.match(fields[i], '^(r?)(%d+)$')
    if ends and tonumber(ends) > now / 1000 then
      local what = kind == 'r' and 'results' or 'requests'
      sums[what] = sums[what] + fields[i + 1]
    end
  end
  usage_by_tenant[tenant] = sums
  return sums
end

-- Publish a message to every API process that has a reader of this job. `reply`: addresses joined by commas.
local function publish(reply, message)
  for address in string.gmatch(reply or '', '[^,]+') do
    redis.call('PUBLISH', address, message)
  end
end

local function notify_worker(worker, message)
  redis.call('PUBLISH', CHANNEL .. 'worker:' .. worker, cmsgpack.pack(message))
end

-- Wake the worker of this model that most recently reported room: for the highest lane also one that would make room by
-- preemption. Entries older than 2 s may be of dead workers. Returns whether one was found.
local YIELDING_EXPIRY_S = 10
local exhausted = {}
local function wake_freshest(key, now)
  for _ = 1, exhausted[key] and 0 or 4 do
    local freshest = redis.call('ZPOPMAX', key)
    if #freshest == 0 then
      exhausted[key] = true
      return false
    end
    if tonumber(freshest[2]) > now - 2000 then
      notify_worker(freshest[1], {'w'})
      return true
    end
  end
  return false
end

local function wake_worker(model, priority, now)
  return wake_freshest(idle_key(model), now) or priority == PRIORITIES[1] and wake_freshest(yielding_key(model), now)
end

-- Fencing check: whether the worker still has its lease. Cached: no call of a batch changes it.
local live_workers = {}
local function is_live(worker)
  if live_workers[worker] == nil then live_workers[worker] = redis.call('HGET', worker_key(worker), 'state') == 'live' end
  return live_workers[worker]
end

-- The number of undelivered entries of a retry or suspects stream. (A lane's waiting jobs are counted by its index.)
local function count_undelivered(stream)
  local length = redis.call('XLEN', stream)
  local pending = length > 0 and redis.pcall('XPENDING', stream, GROUP)
  return length - (pending and pending[1] or 0)
end

-- --- the index of a lane: its waiting jobs in their order (streaming/order.py) ---------------------------------------

-- A member of the index is the entry of a job, padded so that members with equal scores sort by arrival.
local function pad(digits, width)
  return string.rep('0', width - #digits) .. digits
end

local function to_member(entry)
  local ms, number = string.match(entry, '^(%d+)%-(%d+)$')
  return pad(ms, 15) .. '-' .. pad(number, 10)
end

local function to_entry(member)
  local ms, number = string.match(member, '^0*(%d+)%-0*(%d+)$')
  return ms .. '-' .. number
end

local function tenant_line(model, priority, tenant)
  return line_key(#model, model, priority, tenant)
end

-- Counters of tenants without waiting jobs are forgotten an hour after a lane's last claim.
local SERVED_RETENTION_S = 3600
local function note_served(model, priority, ...)
  redis.call('ZADD', served_key(model, priority), ...)
  redis.call('EXPIRE', served_key(model, priority), SERVED_RETENTION_S)
end

-- Add a waiting job to the index of its lane. A tenant that had none starts at the lane's virtual time at least.
local function join_line(model, priority, tenant, entry, patience)
  local member, arrived = to_member(entry), tonumber(string.match(entry, '^%d+'))
  redis.call('ZADD', arrivals_key(model, priority), arrived, member)
  redis.call('ZADD', tenant_line(model, priority, tenant), arrived + patience, member)
  local tenants, served = tenants_key(model, priority), served_key(model, priority)
  if redis.call('ZSCORE', tenants, tenant) then return end
  local least, known = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES'), redis.call('ZMSCORE', served, '', tenant)
  local lift = math.max(tonumber(known[1] or 0), tonumber(least[2] or 0))
  redis.call('ZADD', tenants, math.max(tonumber(known[2] or 0), lift), tenant)
  redis.call('HSET', lifts_key(model, priority), tenant, lift)
  if known[2] then redis.call('ZREM', served, tenant) end
  if not least[1] then redis.call('HDEL', credit_key(model), priority) end -- the lane was empty: its credit begins anew
end

-- Move a tenant whose last waiting job has left the lane to those served, unless the virtual time has passed it.
local function retire_tenant(model, priority, tenant, counter)
  redis.call('ZREM', tenants_key(model, priority), tenant)
  redis.call('HDEL', lifts_key(model, priority), tenant)
  local time = redis.call('ZSCORE', served_key(model, priority), '')
  if time and counter > tonumber(time) then note_served(model, priority, counter, tenant) end
end

-- Remove a job from the index of its lane without charging its tenant. Does nothing if the job is not in it.
local function leave_line(model, priority, tenant, entry)
  local member, line = to_member(entry), tenant_line(model, priority, tenant)
  redis.call('ZREM', arrivals_key(model, priority), member)
  if redis.call('ZREM', line, member) == 1 and redis.call('EXISTS', line) == 0 then
    local counter = redis.call('ZSCORE', tenants_key(model, priority), tenant)
    retire_tenant(model, priority, tenant, tonumber(counter or 0))
  end
end

-- What a job costs, by its record: {units of its prompt, tokens of its output, weight of its tenant, patience in ms}.
-- A malformed text counts as one unit.
local function parse_order(text)
  local prompt, output, weight, patience = string.match(text or '', '^(%d+):(%d+):(%d+%.?%d*):(%d+)$')
  prompt, output, weight = parse_number(prompt), parse_number(output), parse_number(weight)
  if not (prompt and output and weight and weight > 0 and parse_number(patience)) then return {1, 0, 1, 0} end
  return {prompt, output, weight, tonumber(patience)}
end

local function units_of(prompt, output)
  return math.max(1, prompt + OUTPUT_UNITS * output)
end

-- What a job adds to the counter of its tenant.
local function charge_of(order, output)
  return math.ceil(COUNTER_SCALE * units_of(order[1], output) / order[3])
end

-- Charge a job's tenant for what the job has generated; its claim has charged the prompt alone.
local function correct_counter(model, priority, tenant, order, generated)
  local change = charge_of(order, generated) - charge_of(order, 0)
  if change == 0 then return end
  local counter = redis.call('ZSCORE', tenants_key(model, priority), tenant)
  if counter then
    local lift = tonumber(redis.call('HGET', lifts_key(model, priority), tenant) or 0)
    redis.call('ZADD', tenants_key(model, priority), math.max(counter + change, lift), tenant)
    return
  end
  local known = redis.call('ZMSCORE', served_key(model, priority), '', tenant)
  if not known[1] then return end
  counter = (known[2] or known[1]) + change
  if counter > tonumber(known[1]) then
    note_served(model, priority, counter, tenant)
  elseif known[2] then
    redis.call('ZREM', served_key(model, priority), tenant)
  end
end

-- The number of requeued jobs of a lane that wait. Their streams exist only since a job of the lane was requeued.
local function count_requeued(model, priority)
  local retry, suspects = retry_key(model, priority), suspects_key(model, priority)
  if redis.call('EXISTS', retry, suspects) == 0 then return 0 end
  return count_undelivered(retry) + count_undelivered(suspects)
end

-- The number of waiting jobs of a lane, with those requeued.
local function count_waiting(model, priority)
  return redis.call('ZCARD', arrivals_key(model, priority)) + count_requeued(model, priority)
end

-- The place of a new job in a lane of `waiting` ones (streaming/jobs/places.py says how it is estimated).
-- Returns: {jobs before it of higher lanes, requeued ones, of its tenant, of other tenants, units of work that its tenant
--           got more than the one that got least}
local function count_before(model, priority, tenant, entry, waiting)
  local higher, requeued = 0, count_requeued(model, priority)
  for _, lane in ipairs(PRIORITIES) do
    if lane == priority then break end
    higher = higher + count_waiting(model, lane)
  end
  if waiting == 1 then return {higher, requeued, 0, 0, 0} end
  local line, tenants = tenant_line(model, priority, tenant), tenants_key(model, priority)
  local place = redis.call('ZRANK', line, to_member(entry)) or 0
  local others = math.max(0, waiting - redis.call('ZCARD', line))
  if others == 0 then return {higher, requeued, place, 0, 0} end
  local least = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
  others = math.min(others, (redis.call('ZCARD', tenants) - 1) * place + (redis.call('ZRANK', tenants, tenant) or 0))
  local ahead = (redis.call('ZSCORE', tenants, tenant) or least[2]) - least[2]
  return {higher, requeued, place, others, math.floor(ahead / COUNTER_SCALE)}
end

-- Wake the scheduler before its next tick: a job waits and no worker is idle.
local function wake_scheduler(model)
  redis.call('PUBLISH', CHANNEL .. 'scheduler:wake', model)
end

-- Whether a live worker reads this model's lanes: a worker that leaves or whose lease lapses is removed from the groups.
local function has_consumer(model)
  for _, priority in ipairs(PRIORITIES) do
    local groups = redis.pcall('XINFO', 'GROUPS', lane_key(model, priority))
    for _, group in ipairs(groups.err and {} or groups) do
      for i = 1, #group, 2 do
        if group[i] == 'consumers' and group[i + 1] > 0 then return true end
      end
    end
  end
  return false
end

-- Every stream of a model that workers read, in the order in which they read them.
local function model_streams(model)
  local lanes = {}
  for _, priority in ipairs(PRIORITIES) do
    for _, lane in ipairs({suspects_key(model, priority), retry_key(model, priority), lane_key(model, priority)}) do
      lanes[#lanes + 1] = lane
    end
  end
  return lanes
end

-- Delete a worker from the consumer groups, except where it has pending entries: those would be lost.
local function delete_consumer(model, worker)
  for _, lane in ipairs(model_streams(model)) do
    local pending = redis.pcall('XPENDING', lane, GROUP, '-', '+', 1, worker)
    if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker) end
  end
end

-- Append a dead letter. Only operators read these, so the stream may be trimmed by length.
local function dead_letter(...)
  redis.call('XADD', dead_key(), 'MAXLEN', '~', 10000, '*', ...)
end

local function ack_and_delete(lane, entry)
  if string.sub(lane or '', 1, #P) == P and is_entry(entry) then buffer_write(buffered_acks, lane, entry) end
end

-- Append a lifecycle event to the outboxes that the job's record names: b the broker, w webhooks (final events only).
-- `what` is the event type, such as job.completed. Undelivered events are dropped after a week, so that they do not fill
-- the store of a deployment without an offline process.
local OUTBOX_RETENTION_S = 7 * 86400
local function append_to_outbox(box, id, tenant, what)
  local oldest = string.format('%d-0', now_ms() - 1000 * OUTBOX_RETENTION_S)
  redis.call('XADD', box, 'MINID', '~', oldest, '*', 'id', id, 'tenant', tenant, 'type', what)
  redis.call('EXPIRE', box, OUTBOX_RETENTION_S)
end

local function emit_event(for_whom, id, tenant, what, final)
  if string.find(for_whom, 'b', 1, true) then append_to_outbox(outbox_key('broker'), id, tenant, what) end
  if not final or not string.find(for_whom, 'w', 1, true) then return end
  if string.find(for_whom, 'r', 1, true) then what = string.gsub(what, '^job', 'response') end
  append_to_outbox(outbox_key('webhooks'), id, tenant, what)
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

-- The time (s) for which the record of an ended job is kept; an hour if the record's own is malformed.
local function retention_s(keep)
  return integer_text(keep) or 3600
end

-- Whether a field of a record is an idempotency key, which expires with its job. Any other key must not be touched.
local function is_idem_key(key)
  local start = idem_key('')
  return string.sub(key or '', 1, #start) == start
end

-- Note how the last attempt at a job ended: 'lost' with its worker, 'handed_back', 'preempted' or
-- 'cancelled'. `finish` needs not: a
-- reader takes the end of a job's last attempt from its record. Each entry of `past` is
-- 'name:worker:run:claimed:ended:outcome;', and the newest are kept.
local MAX_PAST_ATTEMPTS = 20
local function close_attempt(id, outcome, now)
  local s = redis.call('HMGET', job_key(id), 'runs', 'name', 'claimed', 'past')
  local worker, run = string.match(s[1] or '', '([^:;]+):%d+:(%d+);$')
  if not worker then return end
  local entry = table.concat({s[2] or '', worker, run, s[3] or 0, now, outcome}, ':')
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
    'tenant', 'size', 'state')
  local model, priority, kind = require_lane_entry(s[1], s[2])
  redis.call('HSET', job, 'state', state, 'reason', reason, 'done', now)
  ack_and_delete(s[1], s[2])
  if kind == 'lane' and s[12] == 'queued' then leave_line(model, priority, s[10] or '', s[2]) end
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
  if kind == 'lane' and s[5] == 'queued' then leave_line(model, priority, s[4] or '', s[2]) end -- an interrupted claim
  buffer_write(buffered_releases, worker, id)
  local lane = (suspect or kind == 'suspects') and suspects_key(model, priority) or retry_key(model, priority)
  local entry = redis.call('XADD', lane, '*', 'job', id)
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '')
  if due then redis.call('ZADD', timers_key(), due, id) end
  if not wake_worker(model, priority, now) then wake_scheduler(model) end
end

-- The bytes that a file counts against its tenant's quota: its size, and at least 4,096, so that the quota also bounds
-- the number of files.
local MIN_FILE_COST = 4096
local function file_cost(bytes)
  bytes = parse_number(bytes) or 0
  return math.max(MIN_FILE_COST, bytes < 1e15 and math.ceil(bytes) or 0)
end

-- The same by the file's record; the minimum if that is malformed.
local function record_file_cost(record)
  local read, file = pcall(cmsgpack.unpack, record or '')
  return file_cost(read and type(file) == 'table' and file.size)
end

-- Set a file's cost (nil removes it) in a hash that also holds the total of all costs, so that reading needs no sum.
local function set_file_cost(key, id, cost)
  local before = redis.call('HGET', key, id)
  if cost then redis.call('HSET', key, id, cost) end
  if before and not cost then redis.call('HDEL', key, id) end
  if cost or before then redis.call('HINCRBY', key, 'total', (cost or 0) - (before or 0)) end
  if not cost and redis.call('HLEN', key) == 1 then redis.call('DEL', key) end
end

-- Schedule or cancel the deletion of a file or a batch. The entry names the tenant, since the record may be lost.
local function schedule_deletion(id, tenant, when)
  redis.call('ZADD', expiring_key(), when, id .. ':' .. tenant)
end

local function cancel_deletion(id, tenant)
  redis.call('ZREM', expiring_key(), id .. ':' .. tenant)
end

-- Save a file's record, list it, count its cost and schedule its deletion.
local function save_file(id, tenant, record, now, expires)
  redis.call('SET', file_key(id), record)
  redis.call('ZADD', files_key(tenant), now, id)
  set_file_cost(sizes_key(tenant), id, record_file_cost(record))
  schedule_deletion(id, tenant, expires)
end

local FINAL = {failed = true, completed = true, expired = true, cancelled = true}

-- Whether an unfinished batch has this file as its input. Removes batches that have ended or are lost from its readers.
local function is_file_in_use(id)
  local batch = redis.call('SRANDMEMBER', readers_key(id))
  while batch do
    local status = redis.call('HGET', batch_key(batch), 'status')
    if status and not FINAL[status] then return true end
    redis.call('SREM', readers_key(id), batch)
    batch = redis.call('SRANDMEMBER', readers_key(id))
  end
  return false
end

-- Keep counting a deleted file that an unfinished batch still reads (the batch has its own hard link to the bytes).
-- Checked again after a day, in case the batch's record is lost.
local HELD_FILE_CHECK_MS = 86400000
local function retain_file_cost(id, tenant, cost)
  set_file_cost(held_key(tenant), id, cost)
  schedule_deletion(id, tenant, now_ms() + HELD_FILE_CHECK_MS)
end

-- Stop counting a file whose record is deleted, unless an unfinished batch still reads it.
local function release_file_cost(id, tenant)
  if redis.call('EXISTS', file_key(id)) == 1 then return end
  if is_file_in_use(id) then
    local cost = redis.call('HGET', held_key(tenant), id) or redis.call('HGET', sizes_key(tenant), id)
    retain_file_cost(id, tenant, cost or MIN_FILE_COST)
  else
    set_file_cost(held_key(tenant), id, nil)
    cancel_deletion(id, tenant)
  end
  set_file_cost(sizes_key(tenant), id, nil)
  redis.call('ZREM', files_key(tenant), id)
end

-- The bytes that count against a tenant's file quota: of its files, and of deleted files that its batches still read.
-- Costs are recomputed from the records where their number differs from that of the files.
local function stored_bytes(tenant)
  local sizes, files = sizes_key(tenant), redis.call('ZCARD', files_key(tenant))
  if redis.call('HLEN', sizes) ~= (files > 0 and files + 1 or 0) then
    redis.call('DEL', sizes)
    for _, id in ipairs(redis.call('ZRANGE', files_key(tenant), 0, -1)) do
      set_file_cost(sizes, id, record_file_cost(redis.call('GET', file_key(id))))
    end
  end
  return math.max(0, (redis.call('HGET', sizes, 'total') or 0) + (redis.call('HGET', held_key(tenant), 'total') or 0))
end

-- Delete an idempotency key, if it is one and still points to this job.
local function free_idempotency_key(key, id)
  if not is_idem_key(key) then return end
  local known = redis.pcall('GET', key)
  if type(known) == 'string' and string.sub(known, 1, 36) == id then redis.call('DEL', key) end
end

-- The pending entries of a worker as {job id: {lane, entry}}, cached. Read only where a job's record is malformed.
local pending_by_worker = {}
local function pending_entries(worker)
  if pending_by_worker[worker] then return pending_by_worker[worker] end
  local found, model = {}, redis.call('HGET', worker_key(worker), 'model')
  pending_by_worker[worker] = found
  for _, lane in ipairs(model and model_streams(model) or {}) do
    local from, pending = '-', {}
    repeat
      pending = redis.pcall('XPENDING', lane, GROUP, from, '+', 1000, worker) -- an error reply has length 0
      for _, item in ipairs(pending) do
        local entry = redis.call('XRANGE', lane, item[1], item[1])[1]
        if entry then found[entry[2][2]] = {lane, item[1]} end
        from = '(' .. item[1]
      end
    until #pending < 1000
  end
  return found
end

-- Fail a job whose record is malformed. Only its id is trusted; every field that is valid is still used to clean up.
-- `worker`, `lane` and `entry`, where the caller knows them, override the record's. The job becomes a dead letter, and
-- its idempotency key is freed, so that a repeated request is computed anew. Returns 1, or 0 if it had ended or is gone.
local function fail_malformed(id, reason, now, worker, lane, entry)
  local job = job_key(id)
  local s = redis.pcall('HMGET', job, 'state', 'lane', 'entry', 'worker', 'keep', 'events', 'tenant', 'reply', 'idem',
    'owed', 'runs', 'size')
  if s.err then
    redis.call('DEL', job) -- not a hash
    redis.call('EXPIRE', parked_key(id), LOG_GRACE_S)
    s = {'?'}
  end
  if worker then buffer_write(buffered_releases, worker, id) end
  if not s[1] or s[1] == 'completed' or s[1] == 'failed' or s[1] == 'cancelled' or s[1] == 'expired' then return 0 end
  lane, entry = lane or s[2], entry or s[3]
  if not pcall(require_lane_entry, lane, entry) then
    local place = pending_entries(worker or s[4] or '')[id] or {}
    lane, entry = place[1], place[2]
  end
  redis.call('HSET', job, 'state', 'failed', 'reason', 'malformed', 'done', now)
  redis.call('HSETNX', job, 'body', '')
  ack_and_delete(lane, entry)
  local model, priority, kind = parse_lane(lane or s[2])
  if model then add_reserved_bytes(model, priority, s[10], -1) end
  if kind == 'lane' and is_entry(entry) then leave_line(model, priority, s[7] or '', entry) end
  count_ended_job(s[7], s[12], retention_s(s[5]), now, 0)
  pcall(release_logs, id, s[11])
  free_idempotency_key(s[9], id)
  if (s[4] or '') ~= '' then buffer_write(buffered_releases, s[4], id) end
  redis.call('ZREM', timers_key(), id)
  redis.call('EXPIRE', job, retention_s(s[5]))
  if s[6] and s[7] then emit_event(s[6], id, s[7], 'job.failed', true) end
  dead_letter('job', id, 'reason', 'unreadable: ' .. reason)
  publish(s[8], cmsgpack.pack({'e', id}))
  return 1
end

-- Find the job of an idempotency key. The key is free if its job is gone or malformed; a malformed job fails here. `pin`:
-- the client gets the job's id instead of waiting, so a disconnect of another client must not cancel the job.
-- Returns: nil | {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (with another body)
local STATES = {queued = true, in_progress = true, completed = true, failed = true, cancelled = true, expired = true}
local function find_by_idempotency_key(key, tenant, digest, pin, epoch)
  local known = redis.pcall('GET', key)
  if type(known) ~= 'string' then return nil end
  local found = string.sub(known, 1, 36)
  local s = redis.pcall('HMGET', job_key(found), 'tenant', 'state', 'created', 'attempt')
  if not s.err and not s[1] then return nil end
  if not s.err and (s[1] ~= tenant or string.sub(known, 38) ~= digest) then return {'reused'} end
  local created, attempt = string.match(s[3] or '', '^%d+'), string.match(s[4] or '0', '^%d+$')
  if s.err or not STATES[s[2]] or not tonumber(s[3]) or not created or not attempt then
    fail_malformed(found, s.err or 'invalid state, created or attempt', now_ms())
    return nil
  end
  if pin then redis.call('HSET', job_key(found), 'pinned', 1) end
  return {'joined', found, s[2], tonumber(created), tonumber(attempt), epoch}
end

-- Classify an error: returns its text if the job's record caused it, nil if the server refused the command whatever the
-- record holds (recognised by the reply's code, or by these words). An unknown error counts as the record's: then one
-- job fails and becomes a dead letter, and no other job is blocked by it.
local function record_fault(problem)
  local refusals = {
    OOM = true, MISCONF = true, READONLY = true, NOREPLICAS = true, LOADING = true, MASTERDOWN = true, NOSCRIPT = true,
    UNBLOCKED = true, NOAUTH = true, WRONGPASS = true, NOPERM = true, CLUSTERDOWN = true, MOVED = true, ASK = true,
    TRYAGAIN = true
  }
  local words = {'ACL failure', 'executing the script', 'nknown Redis command', 'nknown command', 'non local key',
    'cript killed', 'not enough memory'}
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  if refusals[string.match(text, '^%-?(%u+)') or ''] then return nil end
  for _, refusal in ipairs(words) do
    if string.find(text, refusal, 1, true) then return nil end
  end
  return text
end

-- Run step(id, worker) for one job; `worker` holds it, if any does. If its record is malformed, only that job fails.
-- Returns: the result of `step`, or nil if the job has failed
local function run_or_fail(id, worker, step)
  local ran, answer = pcall(step, id, worker)
  if ran then return answer end
  local why = record_fault(answer)
  if not why then error(answer, 0) end
  fail_malformed(id, why, now_ms(), worker)
  return nil
end

-- Make the index of a lane agree with its stream, which is the record of what was accepted: drop the index of an empty
-- stream, add waiting jobs that it lacks, and remove entries that are no job's. Reads the stream only if their numbers
-- differ, and at most the first 10,000 entries.
local function repair_line(model, priority, now)
  local lane, arrivals = lane_key(model, priority), arrivals_key(model, priority)
  local length, indexed = redis.call('XLEN', lane), redis.call('ZCARD', arrivals)
  if length == 0 then
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_key(model, priority), 0, -1)) do
      redis.call('DEL', tenant_line(model, priority, tenant))
    end
    redis.call('DEL', arrivals, tenants_key(model, priority), lifts_key(model, priority))
    return
  end
  if count_undelivered(lane) <= indexed then return end
  local from = '-'
  for _ = 1, 10 do
    local entries = redis.call('XRANGE', lane, from, '+', 'COUNT', 1000)
    if #entries == 0 then return end
    local members = {}
    for i, item in ipairs(entries) do members[i] = to_member(item[1]) end
    for i, score in ipairs(redis.call('ZMSCORE', arrivals, unpack(members))) do
      local entry, fields = entries[i][1], entries[i][2]
      local pending = not score and redis.pcall('XPENDING', lane, GROUP, entry, entry, 1)
      if pending and (pending.err or #pending == 0) then
        if fields[1] ~= 'job' or fields[3] then
          dead_letter('lane', lane, 'entry', entry, 'reason', 'not a lane entry of Penstock')
          ack_and_delete(lane, entry)
        else
          run_or_fail(fields[2], nil, function(id)
            local s = redis.call('HMGET', job_key(id), 'state', 'lane', 'entry', 'tenant', 'order')
            if s[1] ~= 'queued' or s[2] ~= lane or s[3] ~= entry then return ack_and_delete(lane, entry) end
            join_line(model, priority, s[4] or '', entry, parse_order(s[5])[4])
          end)
        end
      end
    end
    from = '(' .. entries[#entries][1]
  end
end

-- Fencing check: whether this worker holds the job under this run, by the job's record. If the job has ended or another
-- worker holds it, it is removed from this worker's claims. Raises if the record is inconsistent: an invalid state or
-- run, or a worker that has not claimed the job.
local function holds_job(id, worker, run, state, owner, number)
  if state == 'in_progress' and owner == worker and number == run then return true end
  if state and not STATES[state] then error('invalid state', 0) end
  if state == 'queued' then return false end
  if state == 'in_progress' then
    if owner == worker then
      if not string.find(integer_text(number) or '', '^[1-9]') then error('invalid run', 0) end
      return false
    end
    if redis.call('SISMEMBER', claims_key(worker), id) == 1
      and redis.call('SISMEMBER', claims_key(owner or ''), id) == 0 then
      error('invalid worker', 0)
    end
  end
  buffer_write(buffered_releases, worker, id)
  return false
end
