-- Waiting jobs: wake-ups of those who would take them, the index of a lane, queues of jobs that were put back.

-- Messages to processes: ends of jobs to their readers, wake-ups to workers and the scheduler.

-- Publish a message to every API process that has a reader of this job. `reply`: addresses joined by commas.
local function publish(reply, message)
  for address in string.gmatch(reply or '', '[^,]+') do
    redis.call('PUBLISH', address, message)
  end
end

-- The reply addresses of a job without one of them.
local function without_address(reply, address)
  local kept = {}
  for each in string.gmatch(reply or '', '[^,]+') do
    if each ~= address then kept[#kept + 1] = each end
  end
  return table.concat(kept, ',')
end

local function notify_worker(worker, message)
  redis.call('PUBLISH', CHANNEL .. 'worker:' .. worker, cmsgpack.pack(message))
end

local YIELDING_EXPIRY_S = 10

-- Wake the worker that joined this list last, unless it did 2 s ago or more: it may be dead. Returns whether one was woken.
local function wake_freshest(key, now)
  local exhausted = cache('exhausted')
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

-- Wake the worker of this model that most recently reported room: for the highest lane also one that would make room by
-- preemption; else one that would prefetch the job.
local function wake_worker(model, priority, now)
  local busy = cache('busy')
  if busy[model] == priority then return false end
  local woken = wake_freshest(idle_key(model), now)
    or priority == PRIORITIES[1] and wake_freshest(yielding_key(model), now) or wake_freshest(prefetching_key(model), now)
  if not woken then busy[model] = priority end
  return woken
end

-- Wake the scheduler before its next tick: a job waits and no worker is idle.
local function wake_scheduler(model)
  redis.call('PUBLISH', CHANNEL .. 'scheduler:wake', model)
end

-- Append a dead letter. Only operators read these, so the stream may be trimmed by length.
local function dead_letter(...)
  redis.call('XADD', dead_key(), 'MAXLEN', '~', 10000, '*', ...)
end

-- Delete the entry that a job has in its lane from its acceptance to its end.
local function delete_entry(lane, entry)
  if string.sub(lane or '', 1, #P) == P and is_entry(entry) then buffer_write('entries', lane, entry) end
end

-- Index of a lane: its waiting jobs in their order (streaming/order.py), and what goes before a new one.

-- A member of the index is the entry of a job, padded so that members with equal scores sort by arrival; in the line of
-- its tenant, the job's id follows.
local function to_member(entry)
  local ms, number = string.match(entry, '^(%d+)%-(%d+)$')
  return string.rep('0', 15 - #ms) .. ms .. '-' .. string.rep('0', 10 - #number) .. number
end

-- Returns the entry of a job, its id and its member of the lane's index, by its member of a line.
local function from_member(text)
  local member, ms, number, id = string.match(text, '^(0*(%d+)%-0*(%d+)):(.*)$')
  return ms and ms .. '-' .. number, id, member
end

local function tenant_line(model, priority, tenant)
  return line_key(#model, model, priority, tenant)
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
  if round.members then flush_writes() end
  round.line_sizes = nil
  local member, line = to_member(entry), tenant_line(model, priority, tenant)
  redis.call('ZREM', arrivals_key(model, priority), member)
  if redis.call('ZREM', line, member .. ':' .. id) == 1 and redis.call('EXISTS', line) == 0 then
    retire_tenant(model, priority, tenant)
  end
end

-- What a job costs, by its record: tokens of its prompt, tokens of its output, weight of its tenant, patience in ms; of a
-- malformed text one unit. Returns numbers or texts of numbers: arithmetic takes both, a comparison needs tonumber first.
local function parse_order(text)
  local prompt, output, weight, patience = string.match(text or '', '^(%d+):(%d+):(%d+%.?%d*):(%d+)$')
  local is_long = prompt and (math.max(#prompt, #output, #patience) > 18 or #weight > 24) -- 1/6 has 19 characters
  if not prompt or is_long or tonumber(weight) <= 0 then return 1, 0, 1, 0 end
  return prompt, output, weight, patience
end

local function units_of(prompt, output)
  return math.max(1, prompt + OUTPUT_UNITS * output)
end

-- What a job adds to the counter of its tenant.
local function charge_of(prompt, output, weight)
  return math.ceil(COUNTER_SCALE * units_of(prompt, output) / weight)
end

-- Charge a job's tenant for what the job has generated, and for its prompt as far as the claim has not: `counted` are its
-- tokens by the engine (0: not known), and the claim charged an estimate. A counter never falls, so an estimate that was too
-- high is given back only by charging less for the output.
local function charge_rest(lane, tenant, order, generated, counted)
  local prompt, _, weight = parse_order(order)
  if tonumber(counted) == 0 then counted = prompt end
  local change = charge_of(counted, generated, weight) - charge_of(prompt, 0, weight)
  if change > 0 then buffer_sum('charges', lane, tenant, change) end
end

-- Add a waiting job to the index of its lane, by its keys and the job's member. `accepted`: when it was; `start`: its
-- latest start (both ms).
local function add_to_line(arrivals, line, member, id, accepted, start)
  buffer_write('members', arrivals, accepted, member)
  buffer_write('members', line, start, member .. ':' .. id)
end

-- Add a job that was claimed before. Its age and its patience count from when it was accepted, `created` in its record. A job
-- without a limit of its own goes behind all others of its tenant.
local function rejoin_line(model, priority, tenant, entry, id, created, order)
  local tenants, line = tenants_key(model, priority), tenant_line(model, priority, tenant)
  local accepted = math.floor(parse_number(created) or tonumber(string.match(entry, '^%d+')))
  local _, _, _, patience = parse_order(order)
  local start = accepted + patience
  if tonumber(patience) == PATIENCE_MS[priority] then
    start = math.max(start, tonumber(redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2] or 0) + 1)
  end
  if not redis.call('ZSCORE', tenants, tenant) then
    enter_tenant(model, priority, tenant, redis.call('EXISTS', tenants) == 0)
  end
  add_to_line(arrivals_key(model, priority), line, to_member(entry), id, accepted, start)
end

-- The entry of a job that waits for its time. Its lane has no entry of it.
local HELD = '0-0'
local SCHEDULED_RETENTION_S = 31 * 86400

-- A tenant's list has its jobs for later before all others also while their time has come and no sweep has. What is left of
-- a lost record goes from it with the tenant's next one.
local LATER_MS = 1e14
local SWEEP_LAG_MS = 3600000

local function schedule(id, tenant, start)
  redis.call('ZADD', scheduled_key(), start, id)
  redis.call('ZREMRANGEBYSCORE', scheduled_of_key(tenant), '-inf', LATER_MS + now_ms() - SWEEP_LAG_MS)
  redis.call('ZADD', scheduled_of_key(tenant), LATER_MS + start, id)
  redis.call('EXPIRE', scheduled_of_key(tenant), SCHEDULED_RETENTION_S)
end

-- From now on the job is listed among those that were accepted.
local function unschedule(id, tenant, keep)
  round.listing_keep_s = 2 * retention_s(keep)
  buffer_write('listings', tenant, now_ms(), id)
  redis.call('ZREM', scheduled_of_key(tenant), id)
  redis.call('ZREM', scheduled_key(), id)
end

-- Jobs that were put back wait in a queue of their own, by when they were: `retry`, or `suspects`, whose jobs run alone. The
-- field `queue` of a job's record names it.
local function requeued_key(queue, model, priority)
  return queue == 'suspects' and suspects_key(model, priority) or retry_key(model, priority)
end

-- Remove a waiting job from where it waits: from the index of its lane, or from a queue of jobs that were put back.
local function leave_lane(model, priority, tenant, entry, id)
  leave_line(model, priority, tenant, entry, id)
  for _, key in ipairs({retry_key(model, priority), suspects_key(model, priority)}) do
    redis.call('ZREM', key, to_member(entry) .. ':' .. id)
  end
end

-- The number of jobs of a lane that were put back and wait.
local function count_requeued(model, priority)
  return redis.call('ZCARD', retry_key(model, priority)) + redis.call('ZCARD', suspects_key(model, priority))
end

-- The number of waiting jobs of a lane, with those requeued.
local function count_waiting(model, priority)
  return redis.call('ZCARD', arrivals_key(model, priority)) + count_requeued(model, priority)
end

-- Whether a job of this model runs, and so a worker is there.
local function is_running(model)
  if round.members then flush_writes() end
  for _, priority in ipairs(PRIORITIES) do
    if redis.call('XLEN', lane_key(model, priority)) > count_waiting(model, priority) then return true end
  end
  return false
end

-- Count what goes before the new jobs of a lane: jobs of higher lanes, and requeued jobs of its own. Usually there are none:
-- one EXISTS shows that, once for all calls of a round in the same lane.
local function count_earlier(own, model, priority)
  if round.earlier and round.earlier.lane == own then return round.earlier.higher, round.earlier.requeued end
  local keys, higher = {retry_key(model, priority), suspects_key(model, priority)}, 0
  round.earlier = {lane = own, higher = 0, requeued = 0}
  for _, above in ipairs(PRIORITIES) do
    if above == priority then break end
    local arrivals = arrivals_key(model, above)
    if round.members and round.members[arrivals] then flush_writes() end
    keys[#keys + 1], keys[#keys + 2], keys[#keys + 3] = arrivals, retry_key(model, above), suspects_key(model, above)
  end
  if redis.call('EXISTS', unpack(keys)) == 0 then return 0, 0 end
  for _, above in ipairs(PRIORITIES) do
    if above == priority then break end
    higher = higher + count_waiting(model, above)
  end
  round.earlier.higher, round.earlier.requeued = higher, count_requeued(model, priority)
  return round.earlier.higher, round.earlier.requeued
end

local MAX_LOOKED = 100

-- Find a worker that would begin a new job at once: of those that said within the last 2 s that they have room, the one that
-- said so last; for the highest lane also one that would preempt a job for it. `waiting`, `own`: jobs that wait in the lane,
-- and the tenant's among them. Jobs that wait take what is free, but a place that a worker keeps from their tenants
-- (closed_to in claims.lua) is for others in this lane. Returns the worker and the list that it is in; nil: none.
local function find_taker(lane, model, priority, tenant, waiting, own, now)
  if count_earlier(lane, model, priority) > 0 then return nil end
  for _, list in ipairs({idle_key(model), priority == PRIORITIES[1] and yielding_key(model) or nil}) do
    local ready = redis.call('ZRANGE', list, '+inf', now - 2000, 'BYSCORE', 'REV', 'LIMIT', 0, MAX_LOOKED)
    for _, worker in ipairs(ready) do
      local closed = redis.call('HGET', worker_key(worker), 'closed') or ''
      local function is_closed_to(name) return string.find(closed, '\n' .. name, 1, true) end
      local before = is_closed_to('tenant:') and own or waiting
      if before == 0 and not is_closed_to('lane:' .. priority .. '\n') and not is_closed_to('tenant:' .. tenant .. '\n') then
        return worker, list
      end
    end
  end
end
