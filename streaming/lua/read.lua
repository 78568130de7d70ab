-- Scripts that only read jobs, tenants and lanes.

#!lua name=record flags=no-writes roles=api,worker,offline
-- Reads a job's record.
-- ARGV: id, '1' to leave its body out | '', the bytes from which on the rows of its result are left out | '', the tenant
--       whose job it must be | ''
-- Returns: {its fields and their values, the partition's epoch | nil}; {'malformed', epoch} if it is not a hash;
--          no fields if it is not kept, or another tenant's
local job, bodiless, long, tenant = job_key(ARGV[1]), ARGV[2] == '1', tonumber(ARGV[3] or ''), ARGV[4] or ''
local epoch = redis.call('GET', epoch_key())
local size = redis.pcall('HSTRLEN', job, 'rows')
if type(size) == 'table' then return {'malformed', epoch} end
if tenant ~= '' and (redis.call('HGET', job, 'tenant') or tenant) ~= tenant then return {{}, epoch} end
local rowless = long and size >= long
if not (bodiless or rowless) then return {redis.call('HGETALL', job), epoch} end
local wanted, out = {}, {}
for _, name in ipairs(redis.call('HKEYS', job)) do
  if not (bodiless and name == 'body' or rowless and name == 'rows') then wanted[#wanted + 1] = name end
end
local values = #wanted > 0 and redis.call('HMGET', job, unpack(wanted)) or {}
for i, name in ipairs(wanted) do out[2 * i - 1], out[2 * i] = name, values[i] end
return {out, epoch}

#!lua name=recent flags=no-writes roles=api
-- Reads a page of a tenant's jobs, newest first, without bodies and answers.
-- ARGV: tenant, time (ms) from before which nothing is listed, cursor: time | '', and id | '', most ids looked at,
--       most jobs found; and '' for any: their state, model (also model:adapter), priority, the earliest and the latest time (ms) of their
--       acceptance; the fields to read of each, `state` first
-- Returns: {epoch | false, {time, id} of the last one looked at | false if there are no more, {id, time, fields}...}
local tenant, horizon, time, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most_looked, most_found, state = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local model, priority, since, till = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local filtered = state ~= '' or model ~= '' or priority ~= ''

-- How many entries come before those behind the cursor (time, id). Binary search among entries of the same time: a client
-- can make as many of those as it likes, and no cursor may cause a read of all of them.
local function entries_before(jobs)
  if time == '' then return 0 end
  local low, high = redis.call('ZCOUNT', jobs, '(' .. time, '+inf'), redis.call('ZCOUNT', jobs, time, '+inf')
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', jobs, middle, middle, 'REV')[1] < id then high = middle else low = middle + 1 end
  end
  return low
end

local function passes(job)
  local s = redis.pcall('HMGET', job, 'state', 'lane', 'adapter')
  local its_model, its_priority = parse_lane(s[2])
  local full = s[3] and its_model and its_model .. ':' .. s[3]
  return (state == '' or s[1] == state) and (model == '' or its_model == model or full == model) and
    (priority == '' or its_priority == priority)
end

local first = since ~= '' and tonumber(since) > tonumber(horizon) and since or '(' .. horizon
local looked, last, out = 0, false, {redis.call('GET', epoch_key()), false}
-- Those that wait for their time come first (schedule).
for _, jobs in ipairs({scheduled_of_key(tenant), jobs_key(tenant)}) do
  local rank, count = entries_before(jobs), redis.call('ZCOUNT', jobs, first, '+inf')
  if till ~= '' then rank = math.max(rank, redis.call('ZCOUNT', jobs, '(' .. till, '+inf')) end
  while looked < most_looked and rank < count and #out - 2 < most_found do
    local end_rank = math.min(rank + most_looked - looked, count) - 1
    local page = redis.call('ZRANGE', jobs, rank, end_rank, 'REV', 'WITHSCORES')
    for i = 1, #page, 2 do
      rank, looked, last = rank + 1, looked + 1, {page[i + 1], page[i]}
      local job = job_key(page[i])
      if not filtered or passes(job) then
        local fields = redis.pcall('HMGET', job, unpack(ARGV, 12))
        if fields[1] then out[#out + 1] = {page[i], page[i + 1], fields} end
      end
      if #out - 2 >= most_found then break end
    end
  end
  if rank < count then out[2] = last end
end
return out

#!lua name=usage flags=allow-oom roles=api,offline
-- Reads a tenant's usage of the store, and counts waiting and running jobs in a slice of its list, newest first.
-- ARGV: tenant, seconds that jobs are kept after their end, jobs to skip, most jobs looked at
-- Returns: {jobs kept, bytes of their requests, bytes of their results, files, bytes of files, waiting among the jobs looked
--           at, running among them}
local tenant, keep, rank, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local page = most > 0 and redis.call('ZRANGE', jobs_key(tenant), rank, rank + most - 1, 'REV') or {}
local waiting, running = 0, 0
for _, id in ipairs(page) do
  local state = redis.pcall('HGET', job_key(id), 'state')
  if state == 'queued' then waiting = waiting + 1 end
  if state == 'in_progress' then running = running + 1 end
end
local kept = tenant_usage(tenant, keep)
return {kept.jobs, kept.requests, kept.results, redis.call('ZCARD', files_key(tenant)), stored_bytes(tenant), waiting, running}

#!lua name=stand flags=no-writes roles=api
-- Reads a job's state and where it waits, without its body. ARGV: id
-- Returns: {state | false, the queue that it was put back to | false, the partition's epoch | false, its entry | false}
local s = redis.call('HMGET', job_key(ARGV[1]), 'state', 'queue', 'entry')
return {s[1], s[2], redis.call('GET', epoch_key()), s[3]}

#!lua name=waiting flags=no-writes roles=api
-- Reads what decides about the places of a tenant's waiting jobs in a lane, or of jobs that were put back. ARGV: the key of
-- the lane or of the queue, tenant, most entries, patience (ms) of a job that the tenant would put now | ''
-- Returns: {{entry of the tenant's jobs, or of the queue's, in order...} (with a patience: the number of the tenant's jobs
--           that must start before the new one), jobs of higher lanes, requeued jobs of this
--           lane, new jobs of this lane, those of the tenant, tenants with jobs here, those that got less than this one,
--           its virtual counter, the least one}
local tenant, most, patience = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local model, priority, kind = parse_lane(ARGV[1])
local higher = 0
for _, lane in ipairs(PRIORITIES) do
  if lane == priority then break end
  higher = higher + count_waiting(model, lane)
end
local line, tenants = tenant_line(model, priority, tenant), tenants_key(model, priority)
local ids = nil
if patience then
  ids = redis.call('ZCOUNT', line, '-inf', now_ms() + patience)
else
  ids = redis.call('ZRANGE', kind == 'lane' and line or ARGV[1], 0, most - 1)
  for i, member in ipairs(ids) do ids[i] = from_member(member) or member end
end
if kind ~= 'lane' then return {ids, higher, 0, 0, 0, 1, 0, 0, 0} end
local count, least = redis.call('ZCARD', tenants), redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
local rank, counter = redis.call('ZRANK', tenants, tenant), redis.call('ZSCORE', tenants, tenant)
if not rank and least[1] then -- it would enter the lane
  counter = math.max(tonumber(redis.call('ZSCORE', served_key(model, priority), tenant) or 0), tonumber(least[2]))
  count, rank = count + 1, redis.call('ZCOUNT', tenants, '-inf', string.format('(%.0f', counter))
end
return {
  ids, higher, count_requeued(model, priority), redis.call('ZCARD', arrivals_key(model, priority)),
  redis.call('ZCARD', line), count, rank or 0, tonumber(counter or 0), tonumber(least[2] or 0)
}

#!lua name=lanes flags=no-writes roles=api,scheduler
-- Counts waiting and running jobs in every lane of these models, and lists the nearest deadlines of waiting jobs.
-- ARGV: most deadlines, model...
-- Returns: {now, {{waiting, running, time (ms) of the oldest that waits | 0, ever put}, by model and priority...},
--           {{lane, accepted at, expires at}...}}
local most = tonumber(ARGV[1])

-- Count a lane: waiting, running, time (ms) of the oldest that waits | 0. Its stream has every job that has not ended; those
-- that wait are in its index, or in a queue of jobs that were put back.
local function count_lane(model, priority)
  local waiting, oldest = 0, math.huge
  for _, key in ipairs({arrivals_key(model, priority), retry_key(model, priority), suspects_key(model, priority)}) do
    local length = redis.pcall('ZCARD', key)
    if type(length) == 'number' and length > 0 then
      waiting = waiting + length
      oldest = math.min(oldest, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]))
    end
  end
  local unfinished = redis.pcall('XLEN', lane_key(model, priority))
  local running = type(unfinished) == 'number' and math.max(0, unfinished - waiting) or 0
  return waiting, running, oldest < math.huge and oldest or 0
end

local function ever_put(lane)
  local about = redis.pcall('XINFO', 'STREAM', lane)
  for i = 1, about.err and 0 or #about, 2 do
    if about[i] == 'entries-added' then return about[i + 1] end
  end
  return 0
end

local lanes = {}
for i = 2, #ARGV do
  for _, priority in ipairs(PRIORITIES) do
    local waiting, running, oldest = count_lane(ARGV[i], priority)
    lanes[#lanes + 1] = {waiting, running, oldest, ever_put(lane_key(ARGV[i], priority))}
  end
end

local due = {}
local nearest = most > 0 and redis.call('ZRANGE', timers_key(), 0, most - 1, 'WITHSCORES') or {}
for i = 1, #nearest, 2 do
  local s = redis.pcall('HMGET', job_key(nearest[i]), 'lane', 'created')
  if s[1] then due[#due + 1] = {s[1], s[2], nearest[i + 1]} end
end
return {now_ms(), lanes, due}

#!lua name=ages flags=no-writes roles=api
-- Reads since when the next job of each tenant has waited, in every lane of these models. The next job of a tenant is the one
-- that must start earliest; requeued jobs are left out. Tenants that were served least come first.
-- ARGV: most tenants of a lane, model...
-- Returns: {now, {{tenant, time (ms) of its job's acceptance...}, by model and priority...}}
local most = tonumber(ARGV[1])

local lanes = {}
for i = 2, #ARGV do
  for _, priority in ipairs(PRIORITIES) do
    local found = {}
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_key(ARGV[i], priority), 0, most - 1)) do
      local first = redis.call('ZRANGE', tenant_line(ARGV[i], priority, tenant), 0, 0)[1]
      local _, _, member = from_member(first or '')
      local accepted = member and redis.call('ZSCORE', arrivals_key(ARGV[i], priority), member)
      if accepted then
        found[#found + 1], found[#found + 2] = tenant, tonumber(accepted)
      end
    end
    lanes[#lanes + 1] = found
  end
end
return {now_ms(), lanes}

#!lua name=ended flags=no-writes roles=offline
-- Filters job ids: returns those of jobs that have ended or are no longer kept. ARGV: ids. Returns: their ids.
local over = {}
for _, id in ipairs(ARGV) do
  local state = redis.pcall('HGET', job_key(id), 'state')
  if state ~= 'queued' and state ~= 'in_progress' then over[#over + 1] = id end
end
return over
