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
-- scores and ids for a tenant's job list; changes of reserved bytes by model and priority; changes of a tenant's usage;
-- scores and members of a lane's index by key.
local buffered_acks, buffered_releases, buffered_listings, buffered_reservations, buffered_usage = {}, {}, {}, {}, {}
local buffered_members = {}
local listing_keep_s = 86400 -- `put` sets it to the time for which jobs are listed
local function flush_writes()
  for key, words in pairs(buffered_members) do redis.call('ZADD', key, unpack(words)) end
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
  buffered_members = {}
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

-- A member of the index is the entry of a job, padded so that members with equal scores sort by arrival; in the line of
-- its tenant, the job's id follows.
local function pad(digits, width)
  return string.rep('0', width - #digits) .. digits
end

local function to_member(entry)
  local ms, number = string.match(entry, '^(%d+)%-(%d+)$')
  return pad(ms, 15) .. '-' .. pad(number, 10)
end

-- Returns the entry of a job, its id and its member of the lane's index, by its member of a line.
local function from_member(text)
  local member, ms, number, id = string.match(text, '^(0*(%d+)%-0*(%d+)):(.*)$')
  return ms and ms .. '-' .. number, id, member
end

local function tenant_line(model, priority, tenant)
  return line_key(#model, model, priority, tenant)
end

-- Note virtual counters of tenants without waiting jobs, and an empty lane's virtual time under the empty name; they are
-- forgotten an hour after the last one. Counters that the virtual time has passed count no more: one of eight calls
-- removes them. ...: counter, tenant...
local SERVED_RETENTION_S = 3600
local function note_served(model, priority, time, ...)
  local served = served_key(model, priority)
  redis.call('ZADD', served, ...)
  if now_ms() % 8 == 0 then redis.call('ZREMRANGEBYSCORE', served, '-inf', string.format('(%.0f', time)) end
  redis.call('EXPIRE', served, SERVED_RETENTION_S)
end

-- Begin the counter of a tenant that has a waiting job again: at the lane's virtual time at least. `alone`: no other
-- tenant has any, so the lane's credit begins anew.
local function enter_tenant(model, priority, tenant, alone)
  local tenants = tenants_key(model, priority)
  local least = alone and {} or redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
  local known = redis.call('ZMSCORE', served_key(model, priority), '', tenant)
  redis.call('ZADD', tenants, math.max(tonumber(known[2] or 0), tonumber(least[2] or known[1] or 0)), tenant)
  if not least[1] and priority ~= PRIORITIES[1] then redis.call('HDEL', credit_key(model), priority) end
end

-- What the calls of a batch of `put` have counted: waiting jobs by key of the index; what goes before a lane's new jobs.
local line_sizes = {}
local earlier = nil

-- Remove a tenant without waiting jobs from the index of its lane. The counter of the last one is the lane's virtual time.
local function retire_tenant(model, priority, tenant)
  local tenants = tenants_key(model, priority)
  local counter = tonumber(redis.call('ZSCORE', tenants, tenant) or 0)
  redis.call('ZREM', tenants, tenant)
  local is_last = redis.call('EXISTS', tenants) == 0
  note_served(model, priority, is_last and counter or 0, counter, is_last and '' or tenant)
end

-- Remove a job from the index of its lane without charging its tenant. Does nothing if the job is not in it.
local function leave_line(model, priority, tenant, entry, id)
  if next(buffered_members) then flush_writes() end
  line_sizes = {}
  local member, line = to_member(entry), tenant_line(model, priority, tenant)
  redis.call('ZREM', arrivals_key(model, priority), member)
  if redis.call('ZREM', line, member .. ':' .. id) == 1 and redis.call('EXISTS', line) == 0 then
    retire_tenant(model, priority, tenant)
  end
end

-- What a job costs, by its record: units of its prompt, tokens of its output, weight of its tenant, patience in ms. A
-- malformed text counts as one unit.
local function parse_order(text)
  local prompt, output, weight, patience = string.match(text or '', '^(%d+):(%d+):(%d+%.?%d*):(%d+)$')
  if not prompt then return 1, 0, 1, 0 end
  prompt, output, weight, patience = tonumber(prompt), tonumber(output), tonumber(weight), tonumber(patience)
  if weight <= 0 or math.max(prompt, output, weight, patience) >= 1e18 then return 1, 0, 1, 0 end
  return prompt, output, weight, patience
end

local function units_of(prompt, output)
  return math.max(1, prompt + OUTPUT_UNITS * output)
end

-- What a job adds to the counter of its tenant.
local function charge_of(prompt, output, weight)
  return math.ceil(COUNTER_SCALE * units_of(prompt, output) / weight)
end

-- Charge a job's tenant for what the job has generated; its claim has charged the prompt alone.
local function charge_output(model, priority, tenant, order, generated)
  local prompt, _, weight = parse_order(order)
  local change = charge_of(prompt, generated, weight) - charge_of(prompt, 0, weight)
  if change <= 0 or redis.call('ZADD', tenants_key(model, priority), 'XX', 'INCR', change, tenant) then return end
  local least = redis.call('ZRANGE', tenants_key(model, priority), 0, 0, 'WITHSCORES')
  local known = redis.call('ZMSCORE', served_key(model, priority), '', tenant)
  if not (least[1] or known[1] or known[2]) then return end
  local time = tonumber(least[2] or known[1] or 0)
  note_served(model, priority, time, math.max(tonumber(known[2] or 0), time) + change, tenant)
end

-- Add a waiting job to the index of its lane, by its keys and the job's member. `accepted`: when it was; `start`: its
-- latest start (both ms).
local function add_to_line(arrivals, line, member, id, accepted, start)
  buffer_write(buffered_members, arrivals, accepted, member)
  buffer_write(buffered_members, line, start, member .. ':' .. id)
end

-- Add a job that is not new, such as one that is put back. Its age and its patience count from when it was accepted,
-- `created` in its record. `behind`: a job without a limit of its own goes behind all others of its tenant.
local function rejoin_line(model, priority, tenant, entry, id, created, order, behind)
  local tenants, line = tenants_key(model, priority), tenant_line(model, priority, tenant)
  local accepted = math.floor(parse_number(created) or tonumber(string.match(entry, '^%d+')))
  local _, _, _, patience = parse_order(order)
  local start = accepted + patience
  if behind and patience == PATIENCE_MS[priority] then
    start = math.max(start, tonumber(redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2] or 0))
  end
  if not redis.call('ZSCORE', tenants, tenant) then
    enter_tenant(model, priority, tenant, redis.call('EXISTS', tenants) == 0)
  end
  add_to_line(arrivals_key(model, priority), line, to_member(entry), id, accepted, start)
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

-- Count what goes before the new jobs of a lane: jobs of higher lanes, and requeued jobs of its own. Usually there are none:
-- one EXISTS shows that, once for all calls of a batch in the same lane.
local function count_earlier(model, priority)
  local own = lane_key(model, priority)
  if earlier and earlier.lane == own then return earlier.higher, earlier.requeued end
  local keys, higher = {retry_key(model, priority), suspects_key(model, priority)}, 0
  earlier = {lane = own, higher = 0, requeued = 0}
  for _, above in ipairs(PRIORITIES) do
    if above == priority then break end
    local arrivals = arrivals_key(model, above)
    if buffered_members[arrivals] then flush_writes() end
    keys[#keys + 1], keys[#keys + 2], keys[#keys + 3] = arrivals, retry_key(model, above), suspects_key(model, above)
  end
  if redis.call('EXISTS', unpack(keys)) == 0 then return 0, 0 end
  for _, above in ipairs(PRIORITIES) do
    if above == priority then break end
    higher = higher + count_waiting(model, above)
  end
  earlier.higher, earlier.requeued = higher, count_requeued(model, priority)
  return earlier.higher, earlier.requeued
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
  if kind == 'lane' and is_entry(entry) then leave_line(model, priority, s[7] or '', entry, id) end
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
-- differ, and 10,000 entries at a time: the next sweep goes on behind them.
local REPAIR_S = 3600
local function repair_line(model, priority, now)
  local lane, arrivals = lane_key(model, priority), arrivals_key(model, priority)
  local length, indexed = redis.call('XLEN', lane), redis.call('ZCARD', arrivals)
  if length == 0 then
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_key(model, priority), 0, -1)) do
      redis.call('DEL', tenant_line(model, priority, tenant))
    end
    redis.call('DEL', arrivals, tenants_key(model, priority))
    return
  end
  if indexed > 0 and redis.call('EXISTS', tenants_key(model, priority)) == 0 then
    redis.call('DEL', arrivals) -- a part of the index is lost: make all of it again
    indexed = 0
  end
  if count_undelivered(lane) <= indexed then return end
  local field = model .. ':' .. priority
  local from = redis.call('HGET', repairs_key(), field) or '-'
  for _ = 1, 10 do
    local entries = redis.call('XRANGE', lane, from, '+', 'COUNT', 1000)
    if #entries == 0 then
      redis.call('HDEL', repairs_key(), field)
      return
    end
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
            local s = redis.call('HMGET', job_key(id), 'state', 'lane', 'entry', 'tenant', 'order', 'created')
            if s[1] ~= 'queued' or s[2] ~= lane or s[3] ~= entry then return ack_and_delete(lane, entry) end
            rejoin_line(model, priority, s[4] or '', entry, id, s[6], s[5])
          end)
        end
      end
    end
    from = '(' .. entries[#entries][1]
  end
  redis.call('HSET', repairs_key(), field, from)
  redis.call('EXPIRE', repairs_key(), REPAIR_S)
end

-- Run a command that names a worker as a consumer of a stream. The stream or its group may not exist yet, or was lost with
-- the data.
local function run_in_group(stream, command)
  for attempt = 1, 2 do
    local got = command()
    if type(got) ~= 'table' or not got.err then return got end
    local missing = string.sub(got.err, 1, 7) == 'NOGROUP' or string.find(got.err, 'requires the key to exist', 1, true)
    if attempt == 2 or not missing then error(got.err, 0) end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
end

-- Whether a waiting job is queued at another lane and entry than the one that is being claimed.
local function is_queued_elsewhere(id, lane, entry)
  require_lane_entry(lane, entry)
  local found = redis.call('XRANGE', lane, entry, entry)[1]
  return found and found[2][2] == id
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

-- --- claims: which waiting jobs a worker gets ------------------------------------------------------------------------

-- These functions share the state `c` of one call of `claim`: its arguments, `now`, `out` (the answer), `begun` (jobs in
-- it), `taken` (ids of entries that are this worker's: it releases those of jobs that it does not know), `lanes` (those in
-- which jobs wait), `chosen`, `credits`, and `commit`, which is commit_choices.

-- Check the record of the job at an entry. Returns nil if the job ended, expired, or waits elsewhere, so that the entry
-- is of no use any more. Raises if the record is malformed.
local function check_job(c, lane, entry, id)
  local s = redis.call('HMGET', job_key(id), 'state', 'queue_deadline', 'deadline', 'body', 'reply', 'entry', 'created',
    'attempt', 'events', 'lane', 'order', 'tenant')
  if s[1] and not STATES[s[1]] then error('attempt to claim a job in state ' .. s[1], 0) end
  if s[1] == 'queued' and s[6] ~= entry and not is_queued_elsewhere(id, s[10], s[6]) then
    error('invalid entry', 0)
  end
  if s[1] ~= 'queued' or s[6] ~= entry then
    ack_and_delete(lane, entry) -- the job ended, or was requeued elsewhere, while this entry waited
    return nil
  end
  if s[2] and not parse_number(s[2]) then error('invalid queue_deadline', 0) end
  if s[3] and not parse_number(s[3]) then error('invalid deadline', 0) end
  if s[8] and not integer_text(s[8]) then error('invalid attempt', 0) end
  if s[10] and s[10] ~= lane then error('invalid lane', 0) end
  if (not s[8] and is_past(s[2], c.now)) or is_past(s[3], c.now) then
    c.commit(c) -- the index is as the choices have left it
    end_job(id, 'expired', 'deadline_exceeded_in_queue', c.now)
    return nil
  end
  local prompt, output, weight = parse_order(s[11])
  return {
    id = id, entry = entry, fields = s, tenant = s[12] or '', cost = units_of(prompt, output),
    charge = charge_of(prompt, 0, weight), member = false, held = false
  }
end

-- Write the claim of a job into its record, and add it to the answer.
local function begin_job(c, _, _, id, claimed)
  local s, run = claimed.fields, c.number + c.begun + 1
  local job, attempt, runs = job_key(id), (s[8] or 0) + 1, s[8] and redis.call('HGET', job_key(id), 'runs') or ''
  if attempt == 2 then redis.call('HSET', job, 'started', redis.call('HGET', job, 'claimed')) end
  redis.call('HSET', job, 'state', 'in_progress', 'worker', c.worker, 'name', c.name, 'attempt', attempt, 'run', run,
    'claimed', c.exact, 'runs', runs .. c.worker .. ':' .. (c.frame + 1) .. ':' .. run .. ';')
  if c.alone then redis.call('HSET', job, 'alone', 1) end
  if s[2] or s[3] then redis.call('ZREM', timers_key(), id) end
  if s[9] and attempt == 1 then emit_event(s[9], id, claimed.tenant, 'job.started') end
  c.out[#c.out + 1] = {id, s[4] or '', attempt, s[3] or '', s[5] or '', runs, parse_number(s[7]) or 0, run}
  c.begun = c.begun + 1
  return true
end

-- Run step(c, lane, entry, id, job) for one job. If its record is malformed, only this job fails. If the server refused a
-- command, the call ends. `holder`: this worker, if the job is among its claims by then.
local function attempt_step(c, step, lane, entry, id, job, holder)
  local ran, result = pcall(step, c, lane, entry, id, job)
  if ran then return result end
  local why = record_fault(result)
  if not why then error(result, 0) end
  c.commit(c)
  fail_malformed(id, why, c.now, holder, lane, entry)
  return nil
end

-- Claim the next job of a retry or suspects stream. Returns the job, or nil and whether the stream may have another one.
local function take_requeued(c, stream)
  c.commit(c)
  local got = run_in_group(stream, function()
    return redis.pcall('XREADGROUP', 'GROUP', GROUP, c.worker, 'COUNT', 1, 'STREAMS', stream, '>')
  end)
  local item = got and got[1] and got[1][2][1]
  if not item then return nil, false end
  local fields = item[2]
  if not fields or fields[1] ~= 'job' or fields[3] then
    dead_letter('lane', stream, 'entry', item[1], 'reason', 'not a lane entry of Penstock')
    ack_and_delete(stream, item[1])
    return nil, true
  end
  local place = #c.taken + 1
  c.taken[place] = fields[2]
  local claimed = attempt_step(c, check_job, stream, item[1], fields[2])
  if claimed and not attempt_step(c, begin_job, stream, item[1], fields[2], claimed) then claimed = nil end
  if not claimed then c.taken[place] = nil end
  return claimed, true
end

-- New jobs are chosen one after the other, on a copy of what the index says of the first tenants of a lane and of their
-- first jobs; commit_choices writes all choices at once. After it the copies are read again.
local MAX_CHOSEN = 500
local MAX_TENANTS = 16

-- Write the choices of one lane into its group and its index: charge the tenants, and retire those without other jobs.
-- A choice whose entry the stream has lost is not begun.
local function write_choices(c, lane)
  local members, counters, retired, gone, taken = {}, {}, {}, {}, c.taken
  local words = {lane.stream, GROUP, c.worker, 0}
  for i, job in ipairs(lane.chosen) do words[4 + i], members[i] = job.entry, job.member end
  words[#words + 1], words[#words + 2] = 'FORCE', 'JUSTID'
  local got, at = run_in_group(lane.stream, function() return redis.pcall('XCLAIM', unpack(words)) end), 1
  for _, job in ipairs(lane.chosen) do -- the answer has their order
    job.held = got[at] == job.entry
    if job.held then taken[#taken + 1], at = job.id, at + 1 end
  end
  redis.call('ZREM', arrivals_key(c.model, lane.priority), unpack(members))
  for tenant, line in pairs(lane.changed) do
    redis.call('ZREM', line.key, unpack(line.members, 1, line.at - 1))
    local list = line.members[line.at] and counters or retired
    list[#list + 1], list[#list + 2] = line.counter, tenant
  end
  if counters[1] then redis.call('ZADD', lane.tenants, unpack(counters)) end
  if retired[1] then
    for i = 2, #retired, 2 do gone[i / 2] = retired[i] end
    redis.call('ZREM', lane.tenants, unpack(gone))
    local is_empty = not lane.lines[1] and (not lane.more or redis.call('EXISTS', lane.tenants) == 0)
    if is_empty then retired[#retired + 1], retired[#retired + 2] = lane.time, '' end
    note_served(c.model, lane.priority, lane.time, unpack(retired))
  end
end

local function commit_choices(c)
  local jobs = c.chosen
  c.chosen = {}
  for _, lane in ipairs(c.lanes) do
    if lane.chosen then write_choices(c, lane) end
    lane.lines, lane.fairest, lane.chosen, lane.empty = nil, nil, nil, lane.empty or nil
  end
  for _, job in ipairs(jobs) do
    if job.held then attempt_step(c, begin_job, job.stream, job.entry, job.id, job, c.worker) end
  end
end

-- Read the first tenants of a lane with their counters: one more than can be needed shows whether the lane gets empty.
-- `more`: it may have others.
local function read_lines(c, lane)
  local most = math.min(c.want - c.begun - #c.chosen, MAX_TENANTS) + 1
  local read, lines = redis.call('ZRANGE', lane.tenants, 0, most - 1, 'WITHSCORES'), {}
  for i = 1, #read, 2 do lines[#lines + 1] = {tenant = read[i], counter = tonumber(read[i + 1]), at = 1} end
  lane.lines, lane.more = lines, #lines == most
  return lines[1]
end

-- Read the next jobs of a tenant, so that the one after its next is known, if there is one.
local function read_members(c, lane, line)
  local members = line.members
  if line.whole or members and members[line.at + 1] then return end
  line.key = line.key or tenant_line(c.model, lane.priority, line.tenant)
  local known = members and #members or 0
  local wanted = line.at + math.ceil((c.want - c.begun - #c.chosen) / #lane.lines)
  local read = redis.call('ZRANGE', line.key, known, wanted - 1)
  line.whole, line.members = known + #read < wanted, members or read
  for i = 1, members and #read or 0 do members[known + i] = read[i] end
end

-- The next job of the tenant that got least, cached until the lane changes; nil if no new job waits. An entry that leads
-- to no job to claim is dropped.
local function fairest_job(c, lane)
  while not lane.fairest and not lane.empty do
    local line = lane.lines and lane.lines[1]
    if line then
      read_members(c, lane, line)
      local entry, id, member = from_member(line.members[line.at] or '')
      local job = entry and attempt_step(c, check_job, lane.stream, entry, id)
      if job then
        job.stream, job.tenant, job.member, lane.fairest = lane.stream, line.tenant, member, job
      else
        commit_choices(c)
        if entry then leave_line(c.model, lane.priority, line.tenant, entry, id) end
        if not entry then retire_tenant(c.model, lane.priority, line.tenant) end -- its line was lost with the data
      end
    elseif lane.lines and not lane.more then
      lane.empty = true
    else
      commit_choices(c)
      lane.empty = not read_lines(c, lane)
    end
  end
  return lane.fairest
end

-- Whether the lane's oldest job makes it count as one lane higher.
local function is_aged(c, lane)
  if not BOOST_MS[lane.rank] then return false end
  if lane.chosen then commit_choices(c) end
  local oldest = redis.call('ZRANGE', arrivals_key(c.model, lane.priority), 0, 0, 'WITHSCORES')
  return oldest[1] and c.now - oldest[2] > BOOST_MS[lane.rank]
end

-- Whether a tenant stands before another one, as in a sorted set.
local function is_before(line, other)
  if line.counter ~= other.counter then return line.counter < other.counter end
  for i = 1, math.min(#line.tenant, #other.tenant) do
    local one, two = string.byte(line.tenant, i), string.byte(other.tenant, i)
    if one ~= two then return one < two end
  end
  return #line.tenant < #other.tenant
end

-- Choose the lane's fairest job: charge its tenant, and advance the lane's virtual time to the least counter.
local function choose_job(c, lane)
  local job = fairest_job(c, lane)
  local lines, line = lane.lines, table.remove(lane.lines, 1)
  lane.time, line.counter, line.at = line.counter, line.counter + job.charge, line.at + 1
  if not lane.chosen then lane.chosen, lane.changed = {}, {} end
  lane.changed[line.tenant], lane.chosen[#lane.chosen + 1], c.chosen[#c.chosen + 1] = line, job, job
  lane.fairest = nil
  if line.members[line.at] then
    local place = #lines + 1
    while place > 1 and is_before(line, lines[place - 1]) do place = place - 1 end
    if place <= #lines or not lane.more then table.insert(lines, place, line) end -- else others may stand before it
  end
  if #c.chosen == MAX_CHOSEN then commit_choices(c) end
  return job
end

-- Whether a lane from which this call may claim has a job. If it is not the highest one, none is looked at.
local function has_job(c, lane, highest)
  if lane.rank == #PRIORITIES and lane.claimed >= c.spare then return false end
  if lane.rank > 1 and c.begun + #c.chosen >= c.free then return false end
  if lane.requeued > 0 or lane.fairest then return true end
  if highest then return fairest_job(c, lane) ~= nil end
  if lane.lines and not lane.lines[1] then commit_choices(c) end
  if not lane.lines and lane.empty == nil then lane.empty = redis.call('EXISTS', lane.tenants) == 0 end
  return not lane.empty
end

local function credit_of(c, lane)
  if not c.credits then
    c.credits = redis.call('HMGET', credit_key(c.model), unpack(PRIORITIES))
    for rank = 1, #PRIORITIES do c.credits[rank] = tonumber(c.credits[rank] or 0) end
  end
  return c.credits[lane.rank]
end

local function add_credit(c, lane, parts)
  c.credits[lane.rank], c.credits_changed = credit_of(c, lane) + parts, true
end

-- Whether a lane goes before higher ones: its credit pays for its next new job, if it has one.
local function is_owed(c, lane)
  if credit_of(c, lane) <= 0 then return false end
  local job = fairest_job(c, lane)
  if not job then return lane.requeued > 0 end
  return c.credits[lane.rank] >= FLOOR * job.cost
end

-- Claim the next job. Returns whether there may be another one.
local function claim_next(c)
  local highest, lane = nil, nil
  for _, each in ipairs(c.lanes) do
    each.waits = has_job(c, each, not highest)
    if each.waits and not highest then
      highest, lane = each, each
    elseif each.waits and lane == highest and is_owed(c, each) then
      lane = each
    end
  end
  if not lane then return false end
  local claimed = nil
  if lane.requeued > 0 then
    local more
    claimed, more = take_requeued(c, retry_key(c.model, lane.priority))
    lane.requeued = more and lane.requeued - 1 or 0
  else
    claimed = choose_job(c, lane)
  end
  if not claimed then return true end
  lane.claimed = lane.claimed + 1
  if lane ~= highest then add_credit(c, lane, -FLOOR * claimed.cost) end
  for _, lower in ipairs(c.lanes) do
    if lower.rank > lane.rank and lower.waits and not (lower.empty and lower.requeued == 0) then
      local turns = lower.rank == lane.rank + 1 and is_aged(c, lower)
      add_credit(c, lower, claimed.cost * (turns and FLOOR or 1))
    end
  end
  return true
end

-- Find the lanes in which jobs wait.
local function find_lanes(c, any_requeued)
  for rank, priority in ipairs(PRIORITIES) do
    local requeued = any_requeued and count_undelivered(retry_key(c.model, priority)) or 0
    local lane = {
      rank = rank, priority = priority, tenants = tenants_key(c.model, priority), stream = false, claimed = 0,
      requeued = requeued, waits = false, more = false, time = 0, empty = nil
    }
    local there = nil
    if c.lanes[1] then there = redis.call('EXISTS', lane.tenants) == 1 else there = read_lines(c, lane) end
    if there or requeued > 0 then
      lane.stream, lane.empty = lane_key(c.model, priority), not there
      c.lanes[#c.lanes + 1] = lane
    end
  end
end

-- Claim jobs in the order of streaming/order.py.
local function take_in_order(c, any_requeued)
  find_lanes(c, any_requeued)
  local more = c.lanes[1]
  while more and c.begun < c.want do
    while more and c.begun + #c.chosen < c.want do more = claim_next(c) end
    commit_choices(c)
  end
  if c.credits_changed then
    redis.call('HSET', credit_key(c.model), PRIORITIES[2], c.credits[2], PRIORITIES[3], c.credits[3])
    redis.call('EXPIRE', credit_key(c.model), SERVED_RETENTION_S)
  end
end
