-- Index of a lane: its waiting jobs in their order (streaming/order.py), and what goes before a new one.

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

-- Charge a job's tenant for what the job has generated, and for its prompt as far as the claim has not: `counted` are its
-- tokens by the engine (0: not known), and the claim charged an estimate. A counter never falls, so an estimate that was too
-- high is given back only by charging less for the output.
local function charge_rest(model, priority, tenant, order, generated, counted)
  local prompt, _, weight = parse_order(order)
  local change = charge_of(counted > 0 and counted or prompt, generated, weight) - charge_of(prompt, 0, weight)
  if change <= 0 then return end
  local lane = tenants_key(model, priority)
  local charges = buffered_charges[lane] or {model = model, priority = priority, changes = {}}
  buffered_charges[lane] = charges
  charges.changes[tenant] = (charges.changes[tenant] or 0) + change
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
