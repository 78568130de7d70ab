#!lua flags=allow-oom
-- Claims up to `want` waiting jobs for a live worker, one after the other in the order of streaming/order.py. Suspects
-- (jobs that may have killed their workers) run alone: one worker of a model at a time takes them, one by one.
-- ARGV: worker, model, want, lease in ms, '1' to take one suspect instead, most jobs from the lowest lane | '',
--       the number of the worker's last run: the runs that begin here get the following ones, places that are free:
--       jobs beyond them come from the highest lane alone, and the worker preempts others for them | ''
-- Returns: 'fenced' | {now, frame number, 1 if this worker must finish its jobs and then take suspects,
--                      {id, body, attempt, deadline | '', reply, runs before this one, accepted at, number of its run}...}
local worker, model, want, lease, alone = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local spare, number, free = tonumber(ARGV[6]) or want, tonumber(ARGV[7]), tonumber(ARGV[8]) or want
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame', 'name')
if mine[1] ~= 'live' then return 'fenced' end
local exact = exact_ms()
local now = math.floor(exact)
redis.call('ZADD', leases_key(), now + lease, worker)

-- Run a command that names this worker as a consumer of a stream. The stream or its group may not exist yet, or was
-- lost with the data.
local function with_group(stream, command)
  for attempt = 1, 2 do
    local got = command()
    if type(got) ~= 'table' or not got.err then return got end
    local missing = string.sub(got.err, 1, 7) == 'NOGROUP' or string.find(got.err, 'requires the key to exist', 1, true)
    if attempt == 2 or not missing then error(got.err, 0) end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
end

local function read_next(stream)
  local got = with_group(stream, function()
    return redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
  end)
  return got and got[1] and got[1][2][1] or nil
end

-- Whether a waiting job is queued at another lane and entry than the one that is being claimed.
local function is_queued_elsewhere(id, lane, entry)
  require_lane_entry(lane, entry)
  local found = redis.call('XRANGE', lane, entry, entry)[1]
  return found and found[2][2] == id
end

-- Check the record of the job at an entry. Returns nil if the job ended, expired, or waits elsewhere, so that the entry
-- is of no use any more. Raises if the record is malformed.
local function check_job(lane, entry, id)
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
  if (not s[8] and is_past(s[2], now)) or is_past(s[3], now) then
    end_job(id, 'expired', 'deadline_exceeded_in_queue', now)
    return nil
  end
  local order = parse_order(s[11])
  return {
    id = id, entry = entry, fields = s, tenant = s[12] or '', cost = units_of(order[1], order[2]),
    charge = charge_of(order, 0)
  }
end

-- Write the claim of a job into its record, and add it to the answer.
local out, begun = {now, tonumber(mine[2]), 0}, 0 -- only the jobs that this call claims use up run numbers
local function begin_job(claimed)
  local id, s, run = claimed.id, claimed.fields, number + begun + 1
  local job, attempt, runs = job_key(id), (s[8] or 0) + 1, s[8] and redis.call('HGET', job_key(id), 'runs') or ''
  if attempt == 2 then redis.call('HSET', job, 'started', redis.call('HGET', job, 'claimed')) end
  redis.call('HSET', job, 'state', 'in_progress', 'worker', worker, 'name', mine[3] or '', 'attempt', attempt, 'run', run,
    'claimed', exact, 'runs', runs .. worker .. ':' .. (mine[2] + 1) .. ':' .. run .. ';')
  if alone then redis.call('HSET', job, 'alone', 1) end
  if s[2] or s[3] then redis.call('ZREM', timers_key(), id) end
  if s[9] and attempt == 1 then emit_event(s[9], id, claimed.tenant, 'job.started') end
  out[#out + 1] = {id, s[4] or '', attempt, s[3] or '', s[5] or '', runs, parse_number(s[7]) or 0, run}
  begun = begun + 1
end

-- Run a step for one job. If its record is malformed, only this job fails. If the server refused a command, the call
-- ends; `held`: the entry is this worker's by then, which releases jobs that it does not know.
local taken = {}
local function attempt_step(lane, entry, id, held, step)
  local ran, result = pcall(step)
  if ran then return result end
  local why = record_fault(result)
  if not why then
    if held then taken[#taken + 1] = id end
    error(result, 0)
  end
  fail_malformed(id, why, now, nil, lane, entry)
  return nil
end

-- Claim the next job of a retry or suspects stream. Returns the job, or nil and whether the stream may have another one.
local function take_requeued(stream)
  local item = read_next(stream)
  if not item then return nil, false end
  local fields = item[2]
  if not fields or fields[1] ~= 'job' or fields[3] then
    dead_letter('lane', stream, 'entry', item[1], 'reason', 'not a lane entry of Penstock')
    ack_and_delete(stream, item[1])
    return nil, true
  end
  local id = fields[2]
  local claimed = attempt_step(stream, item[1], id, true, function()
    local job = check_job(stream, item[1], id)
    if job then begin_job(job) end
    return job
  end)
  if claimed then taken[#taken + 1] = id end
  return claimed, true
end

-- --- new jobs, by the index of their lane ----------------------------------------------------------------------------

-- Read the job at an entry of a lane's index, and drop the entry if there is none to claim.
local function job_at(lane, tenant, entry)
  local item = redis.call('XRANGE', lane.stream, entry, entry)[1]
  local job = item and attempt_step(lane.stream, entry, item[2][2], false, function()
    return check_job(lane.stream, entry, item[2][2])
  end)
  if not job then
    leave_line(model, lane.priority, tenant or '', entry)
    return nil
  end
  job.tenant = tenant or job.tenant
  return job
end

-- The next job of the tenant that got least, cached until the lane changes; nil if no new job waits. `last`: the tenant
-- has no other one.
local function fairest_job(lane)
  while not lane.fairest and not lane.empty do
    local least = redis.call('ZRANGE', lane.tenants, 0, 0, 'WITHSCORES')
    local head = least[1] and redis.call('ZRANGE', tenant_line(model, lane.priority, least[1]), 0, 1)
    if not head then
      lane.empty = true
    elseif head[1] then
      local job = job_at(lane, least[1], to_entry(head[1]))
      if job then job.counter, job.last = tonumber(least[2]), not head[2] end
      lane.fairest = job
    else
      retire_tenant(model, lane.priority, least[1], 0) -- its line was lost with the data
    end
  end
  return lane.fairest
end

-- Whether the lane's oldest job makes it count as one lane higher.
local function is_aged(lane)
  if not lane.boost then return false end
  local oldest = redis.call('ZRANGE', lane.arrivals, 0, 0, 'WITHSCORES')
  return oldest[1] and now - oldest[2] > lane.boost
end

-- Claim a new job: charge its tenant, and advance the lane's virtual time to the least counter.
local function take_new(lane, job)
  local priority, entry = lane.priority, job.entry
  with_group(lane.stream, function()
    return redis.pcall('XCLAIM', lane.stream, GROUP, worker, 0, entry, 'FORCE', 'JUSTID')
  end)
  local claimed = attempt_step(lane.stream, entry, job.id, true, function()
    local member = to_member(entry)
    lane.time = math.max(lane.time or tonumber(redis.call('ZSCORE', lane.served, '') or 0), job.counter)
    redis.call('ZREM', lane.arrivals, member)
    redis.call('ZREM', tenant_line(model, priority, job.tenant), member)
    if job.last then
      redis.call('ZREM', lane.tenants, job.tenant)
      redis.call('HDEL', lifts_key(model, priority), job.tenant)
      redis.call('ZADD', lane.served, job.counter + job.charge, job.tenant)
    else
      redis.call('ZADD', lane.tenants, job.counter + job.charge, job.tenant)
    end
    begin_job(job)
    return job
  end)
  lane.fairest = nil
  if claimed then taken[#taken + 1] = job.id end
  return claimed
end

-- Write the virtual time of a lane from which this call has claimed, and forget the counters that it has passed.
local function note_time(lane)
  if not lane.time then return end
  redis.call('ZREMRANGEBYSCORE', lane.served, '-inf', lane.time)
  note_served(model, lane.priority, lane.time, '')
end

-- Retry and suspects streams exist only while jobs are requeued: one EXISTS usually saves reading them.
local requeue_streams, suspects = {}, 0
for i, priority in ipairs(PRIORITIES) do
  requeue_streams[2 * i - 1], requeue_streams[2 * i] = retry_key(model, priority), suspects_key(model, priority)
end
local any_requeued = redis.call('EXISTS', unpack(requeue_streams)) > 0
for i = 2, any_requeued and #requeue_streams or 0, 2 do suspects = suspects + redis.call('XLEN', requeue_streams[i]) end
local runner = suspects > 0 and redis.call('GET', alone_key(model))
if suspects > 0 and (not runner or runner == worker) then
  redis.call('SET', alone_key(model), worker, 'PX', 3 * lease)
  out[3] = 1
end

local lanes = {}
for rank, priority in ipairs(PRIORITIES) do
  lanes[rank] = {
    rank = rank, priority = priority, stream = lane_key(model, priority), retry = retry_key(model, priority),
    tenants = tenants_key(model, priority), arrivals = arrivals_key(model, priority),
    served = served_key(model, priority), boost = BOOST_MS[rank], claimed = 0,
    requeued = any_requeued and count_undelivered(retry_key(model, priority)) or 0
  }
end
local credits, credits_changed = nil, false
local function credit_of(lane)
  if not credits then
    credits = redis.call('HMGET', credit_key(model), unpack(PRIORITIES))
    for rank = 1, #PRIORITIES do credits[rank] = tonumber(credits[rank] or 0) end
  end
  return credits[lane.rank]
end

local function add_credit(lane, parts)
  credits[lane.rank] = credit_of(lane) + parts
  credits_changed = true
end

-- Whether a lane from which this call may claim has a job. If it is not the highest one, none is looked at.
local function has_job(lane, highest)
  if lane.rank == #PRIORITIES and lane.claimed >= spare or lane.rank > 1 and begun >= free then return false end
  if lane.requeued > 0 or lane.fairest then return true end
  if highest then return fairest_job(lane) ~= nil end
  if not lane.empty then lane.empty = redis.call('EXISTS', lane.tenants) == 0 end
  return not lane.empty
end

-- Whether a lane goes before higher ones. Returns also the job for which it does, nil for a requeued one.
local function is_owed(lane)
  if credit_of(lane) <= 0 then return false end
  local job = fairest_job(lane)
  if not job then return lane.requeued > 0 end
  return credits[lane.rank] >= FLOOR * job.cost, job
end

-- Claim the next job. Returns whether there may be another one.
local function claim_next()
  local waiting = {}
  for _, lane in ipairs(lanes) do
    if has_job(lane, not waiting[1]) then waiting[#waiting + 1] = lane end
  end
  local lane, job = waiting[1], nil
  if not lane then return false end
  for i = 2, #waiting do
    local owed, oldest = is_owed(waiting[i])
    if owed then
      lane, job = waiting[i], oldest
      break
    end
  end
  local claimed = nil
  if lane.requeued > 0 then
    local more
    claimed, more = take_requeued(lane.retry)
    lane.requeued = more and lane.requeued - 1 or 0
  else
    claimed = take_new(lane, job or fairest_job(lane))
  end
  if not claimed then return true end
  lane.claimed = lane.claimed + 1
  if lane ~= waiting[1] then add_credit(lane, -FLOOR * claimed.cost) end
  for _, lower in ipairs(waiting) do
    if lower.rank > lane.rank and not (lower.empty and lower.requeued == 0) then
      local turns = lower.rank == lane.rank + 1 and is_aged(lower)
      add_credit(lower, claimed.cost * (turns and FLOOR or 1))
    end
  end
  return true
end

local function take_suspects()
  for _, priority in ipairs(PRIORITIES) do
    local more = true
    while more and begun < want do
      local _
      _, more = take_requeued(suspects_key(model, priority))
    end
  end
end

local function take_in_order()
  while begun < want and claim_next() do end
  for _, lane in ipairs(lanes) do note_time(lane) end
  if credits_changed then
    redis.call('HSET', credit_key(model), PRIORITIES[2], credits[2], PRIORITIES[3], credits[3])
    redis.call('EXPIRE', credit_key(model), SERVED_RETENTION_S)
  end
end

-- A worker that is to run suspects claims nothing else before them.
local ran, problem = true, nil
if alone and out[3] == 1 then
  ran, problem = pcall(take_suspects)
elseif not alone and out[3] == 0 then
  ran, problem = pcall(take_in_order)
end
for first = 1, #taken, 1000 do
  redis.call('SADD', claims_key(worker), unpack(taken, first, math.min(first + 999, #taken)))
end
if not ran then error(problem, 0) end
if begun < want and free < want and out[3] == 0 then
  redis.call('ZADD', yielding_key(model), now, worker)
  redis.call('EXPIRE', yielding_key(model), YIELDING_EXPIRY_S)
end
if begun < free and out[3] == 0 then
  redis.call('ZADD', idle_key(model), now, worker)
  with_group(lanes[1].stream, function()
    return redis.pcall('XGROUP', 'CREATECONSUMER', lanes[1].stream, GROUP, worker)
  end)
else
  redis.call('ZREM', idle_key(model), worker)
end
return out
