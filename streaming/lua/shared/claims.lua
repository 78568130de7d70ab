-- Claims: whether a worker may still write, which waiting jobs it gets, and how they become its own.

-- Fencing check: whether the worker still has its lease. Cached: no call of a round changes it.
local function is_live(worker)
  local live = cache('live_workers')
  if live[worker] == nil then live[worker] = redis.call('HGET', worker_key(worker), 'state') == 'live' end
  return live[worker]
end

-- Fencing check: whether this worker holds the job under this run, by the job's record. If the job has ended or another
-- worker holds it, it is removed from this worker's claims, and an ended one from its lane, as its end may have been
-- interrupted. Raises if the record is inconsistent: an invalid state or run, or a worker that has not claimed the job.
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
  elseif state then
    delete_entry(unpack(redis.call('HMGET', job_key(id), 'lane', 'entry')))
  end
  buffer_write('releases', worker, id)
  return false
end

-- The functions below share the state `c` of one call of `claim`: its arguments, `now`, `out` (the answer), `begun` (jobs in
-- it), `logged` (the worker and its next frame, as records have them), `lanes` (those in which jobs wait), `chosen`,
-- `credits`, `dropped` (entries without a job to claim, such as one that expired), and `commit`, which is commit_choices.
--
-- A job is among the worker's claims before anything else of it changes. If the server refuses a later write, the worker
-- does not know the job, so it hands it back; else the sweep after the worker's end puts it back.

-- Whether a waiting job is where its record says: in the index of its lane, or in a queue of jobs that were put back.
local function is_waiting_in(c, queue, lane, entry, id)
  local _, priority = parse_lane(lane)
  if queue == '' then return redis.call('ZSCORE', arrivals_key(c.model, priority), to_member(entry)) end
  if queue ~= 'retry' and queue ~= 'suspects' then return false end
  return redis.call('ZSCORE', requeued_key(queue, c.model, priority), to_member(entry) .. ':' .. id)
end

-- Check the record of the job at an entry of a lane that waits in `queue` (nil: in the index). Returns nil if it waits there
-- no more: it ended, expired or is elsewhere. Raises if the record is malformed.
local function check_job(c, lane, entry, id, queue)
  local s = redis.call('HMGET', job_key(id), 'state', 'queue_deadline', 'deadline', 'body', 'reply', 'entry', 'created',
    'attempt', 'events', 'lane', 'order', 'tenant', 'queue')
  if s[1] and not STATES[s[1]] then error('attempt to claim a job in state ' .. s[1], 0) end
  if s[1] == 'queued' and (s[6] ~= entry or (s[13] or '') ~= (queue or '')) then -- a second place, or a malformed record
    if not is_entry(s[6]) then error('invalid entry', 0) end
    if not is_waiting_in(c, s[13] or '', lane, s[6], id) then
      error(s[6] ~= entry and 'invalid entry' or 'invalid queue', 0)
    end
    if s[6] ~= entry then delete_entry(lane, entry) end
    return nil
  end
  if s[1] ~= 'queued' then
    if s[1] ~= 'in_progress' then delete_entry(lane, entry) end
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
    charge = charge_of(prompt, 0, weight), member = false
  }
end

-- Write the claim of a job into its record, and add it to the answer.
local function begin_job(c, _, _, id, claimed)
  local s, run = claimed.fields, c.number + c.begun + 1
  local job, attempt = job_key(id), (s[8] or 0) + 1
  local runs = s[8] and redis.call('HGET', job, 'runs') or ''
  if attempt == 2 then redis.call('HSET', job, 'started', redis.call('HGET', job, 'claimed')) end
  redis.call('HSET', job, 'state', 'in_progress', 'worker', c.worker, 'name', c.name, 'attempt', attempt, 'run', run,
    'claimed', c.exact, 'runs', runs .. c.logged .. run .. ';')
  if c.alone then redis.call('HSET', job, 'alone', 1) end
  if s[13] then redis.call('HDEL', job, 'queue') end
  if s[2] or s[3] then redis.call('ZREM', timers_key(), id) end
  if s[9] and attempt == 1 then emit_event(s[9], id, claimed.tenant, 'job.started') end
  local out, at = c.out, #c.out
  out[at + 1], out[at + 2], out[at + 3], out[at + 4] = id, s[4] or '', attempt, s[3] or ''
  out[at + 5], out[at + 6], out[at + 7], out[at + 8] = s[5] or '', runs, parse_number(s[7]) and s[7] or '0', run
  c.begun = c.begun + 1
  return true
end

-- Run step(c, lane, entry, id, about) for one job. If its record is malformed, only this job fails. If the server refused a
-- command, the call ends. `holder`: this worker, if the job is among its claims by then.
local function attempt_step(c, step, lane, entry, id, about, holder)
  local ran, result = pcall(step, c, lane, entry, id, about)
  if ran then return result end
  local why = record_fault(result)
  if not why then error(result, 0) end
  c.commit(c)
  fail_malformed(id, why, c.now, holder, lane, entry)
  return nil
end

-- Claim the next job of a lane that was put back to `queue`. Returns the job, or nil and whether there may be another one.
local function take_requeued(c, queue, priority)
  c.commit(c)
  local key, lane = requeued_key(queue, c.model, priority), lane_key(c.model, priority)
  local member = redis.call('ZRANGE', key, 0, 0)[1]
  if not member then return nil, false end
  local entry, id = from_member(member)
  local claimed = nil
  if entry then
    redis.call('SADD', claims_key(c.worker), id)
    claimed = attempt_step(c, check_job, lane, entry, id, queue)
    if claimed and not attempt_step(c, begin_job, lane, entry, id, claimed) then claimed = nil end
  end
  redis.call('ZREM', key, member)
  if not claimed then c.dropped = c.dropped + 1 end
  if entry and not claimed then buffer_write('releases', c.worker, id) end
  return claimed, true
end

-- New jobs are chosen one after the other, on a copy of what the index says of the first tenants of a lane and of their
-- first jobs; commit_choices writes all choices at once. After it the copies are read again.
local MAX_CHOSEN = 500
local MAX_TENANTS = 16

-- Write the choices of one lane into its index: charge the tenants, and retire those without other jobs.
local function write_choices(c, lane)
  local members, ids, counters, retired, gone = {}, {}, {}, {}, {}
  for i, job in ipairs(lane.chosen) do members[i], ids[i] = job.member, job.id end
  redis.call('SADD', claims_key(c.worker), unpack(ids))
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
  for _, job in ipairs(jobs) do attempt_step(c, begin_job, job.lane, job.entry, job.id, job, c.worker) end
end

-- Whether only the places are left that the worker keeps for tenants other than those that crowd it.
local function is_crowded(c)
  return c.crowds > 0 and c.begun + #c.chosen >= c.shared
end

-- Names the lane and the tenants that may not take the places that this claim leaves; `put` reads it (find_taker). The lane
-- is batch; the tenants are those that crowd the worker. '' if anyone may.
local function closed_to(c)
  local lowest, names = c.lanes[#c.lanes], {}
  local batches = lowest and lowest.rank == #PRIORITIES and lowest.claimed or 0
  if batches >= c.spare then names[1] = 'lane:' .. PRIORITIES[#PRIORITIES] end
  for tenant in pairs(is_crowded(c) and c.crowding or {}) do names[#names + 1] = 'tenant:' .. tenant end
  table.sort(names)
  return names[1] and '\n' .. table.concat(names, '\n') .. '\n' or ''
end

-- Read the first tenants of a lane with their counters: one more than can be needed shows whether the lane gets empty.
-- `more`: it may have others.
local function read_lines(c, lane)
  local most = math.min(c.want - c.begun - #c.chosen, MAX_TENANTS) + 1 + c.crowds
  local read, lines = redis.call('ZRANGE', lane.tenants, 0, most - 1, 'WITHSCORES'), {}
  for i = 1, #read, 2 do lines[#lines + 1] = {tenant = read[i], counter = tonumber(read[i + 1]), at = 1} end
  lane.lines, lane.more = lines, #lines == most
  return lines[1]
end

-- Read the next jobs of a tenant, so that the one after its next is known, if there is one; with adapters, more of them.
local function read_members(c, lane, line)
  local members = line.members
  if line.whole or members and members[line.at + c.ahead] then return end
  line.key = line.key or tenant_line(c.model, lane.priority, line.tenant)
  local known = members and #members or 0
  local wanted = line.at + math.max(c.ahead, math.ceil((c.want - c.begun - #c.chosen) / #lane.lines))
  local read = redis.call('ZRANGE', line.key, known, wanted - 1)
  line.whole, line.members = known + #read < wanted, members or read
  for i = 1, members and #read or 0 do members[known + i] = read[i] end
end

-- The tenant that got least of those that were read and may get a place now, and its position; nil: none of them.
local function fairest_line(c, lane)
  local at = 1
  while is_crowded(c) and lane.lines[at] and c.crowding[lane.lines[at].tenant] do at = at + 1 end
  return lane.lines[at], at
end

-- A job whose adapter the worker must load may be passed over by a later one of its tenant, lane and turn that needs no
-- load: so other tenants and lanes wait no longer than without adapters. Each load costs time, and evicts another adapter,
-- whose next job then needs a load, too. At most the next MAX_PASSED_BY jobs are looked at, and a tenant's first job is
-- passed over MAX_PASSES times and then taken, so that a rare adapter waits for MAX_PASSED_BY * MAX_PASSES jobs of its own
-- tenant at most. A job with a limit of time is never passed over.
local MAX_PASSED_BY, MAX_PASSES = 8, 8

-- Whether the worker has the adapter of a job, or will have it for a job that this call has chosen.
local function is_loaded(c, id)
  local adapter = c.adapters[id] or redis.pcall('HGET', job_key(id), 'adapter') or '' -- it may be no hash
  c.adapters[id] = adapter
  return adapter == '' or type(adapter) == 'string' and string.find(c.loaded, '\n' .. adapter .. '\n', 1, true) ~= nil
end

-- The job that goes before `first`, the next one of a tenant, because the worker has its adapter; else `first`. Returns
-- false if a job failed or expired at the look, and so the lane is to be read again.
local function loaded_job(c, lane, line, first)
  if is_loaded(c, first.id) or first.fields[2] or first.fields[3] then return first end
  local passes = tonumber(redis.call('HGET', job_key(first.id), 'passes') or 0) or 0
  for at = line.at + 1, passes < MAX_PASSES and line.at + MAX_PASSED_BY or 0 do
    local entry, id, member = from_member(line.members[at] or '')
    local job = entry and is_loaded(c, id) and attempt_step(c, check_job, lane.key, entry, id)
    if not lane.lines then
      c.dropped = c.dropped + 1
      return false
    end
    if job then
      job.member, job.passes = member, {first.id, passes + 1}
      table.insert(line.members, line.at, table.remove(line.members, at))
      return job
    end
  end
  return first
end

-- The next job of the tenant that got least, cached until the lane changes; nil if no new job waits that may be claimed
-- now. An entry that leads to no job to claim is dropped; also nil once the call has dropped enough.
local function fairest_job(c, lane)
  if lane.fairest and is_crowded(c) and c.crowding[lane.fairest.tenant] then lane.fairest = nil end
  while not lane.fairest and not lane.empty and c.dropped < MAX_DROPPED do
    local line = lane.lines and fairest_line(c, lane)
    if line then
      read_members(c, lane, line)
      local entry, id, member = from_member(line.members[line.at] or '')
      local job = entry and attempt_step(c, check_job, lane.key, entry, id)
      if job then job.member = member end
      if job and c.loaded then job = loaded_job(c, lane, line, job) end
      if job then
        job.lane, job.tenant, lane.fairest = lane.key, line.tenant, job
      elseif job == nil then
        commit_choices(c)
        c.dropped = c.dropped + 1
        if entry then leave_line(c.model, lane.priority, line.tenant, entry, id) end
        if not entry then retire_tenant(c.model, lane.priority, line.tenant) end -- its line was lost with the data
      end
    elseif lane.lines and not lane.more then
      if lane.lines[1] then return nil end
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
  local job, lines = fairest_job(c, lane), lane.lines
  local line, position = fairest_line(c, lane)
  lane.time, line.counter, line.at = lines[1].counter, line.counter + job.charge, line.at + 1
  table.remove(lines, position)
  if not lane.chosen then lane.chosen, lane.changed = {}, {} end
  lane.changed[line.tenant], lane.chosen[#lane.chosen + 1], c.chosen[#c.chosen + 1] = line, job, job
  lane.fairest = nil
  if job.passes then redis.call('HSET', job_key(job.passes[1]), 'passes', job.passes[2]) end
  if c.loaded then c.loaded = c.loaded .. (c.adapters[job.id] or '') .. '\n' end
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
  if lane.requeued > 0 or lane.fairest and not is_crowded(c) then return true end
  if highest or is_crowded(c) then return fairest_job(c, lane) ~= nil end
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

-- Whether a lane without a job to claim has some of tenants that get no place now.
local function is_passed_over(c, lane)
  return is_crowded(c) and lane.lines and lane.lines[1] ~= nil
end

-- Claim the next job. Returns whether there may be another one.
local function claim_next(c)
  local highest, lane = nil, nil
  for _, each in ipairs(c.lanes) do
    each.waits = has_job(c, each, not highest)
    if not highest then
      if each.waits then lane = each end
      if each.waits or is_passed_over(c, each) then highest = each end
    elseif each.waits and (not lane or lane == highest) and is_owed(c, each) then
      lane = each
    end
  end
  if not lane or c.dropped >= MAX_DROPPED then return false end
  local claimed = nil
  if lane.requeued > 0 then
    local more
    claimed, more = take_requeued(c, 'retry', lane.priority)
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
    local requeued = any_requeued and redis.call('ZCARD', retry_key(c.model, priority)) or 0
    local lane = {
      rank = rank, priority = priority, tenants = tenants_key(c.model, priority), key = lane_key(c.model, priority),
      claimed = 0, requeued = requeued, waits = false, more = false, time = 0, empty = nil
    }
    local there = nil
    if c.lanes[1] then there = redis.call('EXISTS', lane.tenants) == 1 else there = read_lines(c, lane) end
    if there or requeued > 0 then
      lane.empty = not there
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
