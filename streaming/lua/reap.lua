-- Scripts that mend what a lost worker, a lost part of the store or a malformed record has left behind.

#!lua name=reap flags=allow-oom roles=api,worker,scheduler
-- Reaper: fences workers whose lease has lapsed, requeues their jobs and expires waiting jobs. Any process but an
-- offline one may run it.
-- ARGV: max workers at once, max expired jobs at once, max attempts, seconds to keep a dead worker's log, lease in ms,
--       a worker whose process is known to have ended ('': none): its lease lapses now; max jobs whose tokens the caller
--       stores (`salvage`): for a lease no other caller gets the same ones; max jobs that a script ended whose requests
--       the caller records: no other caller gets the same ones
-- Returns: {jobs expired, workers whose lease was extended, jobs whose time has come, number of this sweep, {{name of a lapsed worker, ids requeued,
--          {id, reason} of those given up, ids cancelled}...}, ids for `salvage`, ids of jobs that a script ended}
local most_workers, most_jobs, most_attempts, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local lease, ended = tonumber(ARGV[5]), ARGV[6]
local now, expired, spared = now_ms(), 0, 0

local lost = {} -- ids of jobs by what becomes of them: those of the worker that lapses now, so replaced for each worker
local function give_up(id, reason)
  local lane = redis.call('HGET', job_key(id), 'lane') or ''
  end_job(id, 'failed', reason, now)
  dead_letter('job', id, 'lane', lane, 'reason', reason)
  lost.given_up[#lost.given_up + 1] = {id, reason}
end

local function recover_job(id, worker)
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'cancel', 'alone', 'run', 'losses')
  if s[1] == 'queued' then
    requeue(id, now, false, worker) -- the claim was interrupted before it changed the record
    lost.requeued[#lost.requeued + 1] = id
    return
  end
  -- The record's run is passed as the worker's own too: the worker is gone, so its job is lost whichever run it was.
  if not holds_job(id, worker, s[5], s[1], s[2], s[5]) then return end
  if s[6] and not integer_text(s[6]) then error('invalid losses', 0) end
  local losses = (s[6] or 0) + 1
  close_attempt(id, 'lost', now, lost.seen)
  if s[3] then
    end_job(id, 'cancelled', 'cancelled', now)
    lost.cancelled[#lost.cancelled + 1] = id
  elseif s[4] == '1' then
    give_up(id, 'poison') -- the worker that died was running this job alone
  elseif losses >= most_attempts then
    give_up(id, 'attempts_exhausted')
  else
    requeue(id, now, losses == most_attempts - 1, worker)
    lost.requeued[#lost.requeued + 1] = id
  end
  redis.call('HSET', job_key(id), 'losses', losses) -- behind the rest: a sweep that was interrupted counts it once
  lost.heirs[#lost.heirs + 1] = id -- last: a job that fails here as malformed needs no log
end

-- No sweep for half a lease: the store was unavailable and workers could not renew leases that were valid before. Each
-- such lease is extended once.
local before = tonumber(redis.call('SET', swept_key(), now, 'GET') or now)
if now - before > lease / 2 then
  local held = redis.call('ZRANGE', leases_key(), string.format('(%d', before), now + lease / 2, 'BYSCORE', 'WITHSCORES')
  for i = 1, #held, 2 do
    if tonumber(redis.call('HGET', worker_key(held[i]), 'spared')) ~= tonumber(held[i + 1]) then
      local till = now + lease - 0.5 -- not an integer: differs from a lease renewed in the same millisecond
      redis.call('HSET', worker_key(held[i]), 'spared', till)
      redis.call('ZADD', leases_key(), till, held[i])
      spared = spared + 1
    end
  end
end

-- A lease can end this late only if the server's clock was set back: shorten it, or a dead worker would keep its jobs.
for _, worker in ipairs(redis.call('ZRANGE', leases_key(), string.format('(%d', now + 2 * lease), '+inf', 'BYSCORE')) do
  redis.call('ZADD', leases_key(), now + lease, worker)
end

if ended ~= '' then redis.call('ZADD', leases_key(), 'XX', 0, ended) end
local lapses = {}
for _, worker in ipairs(redis.call('ZRANGE', leases_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_workers)) do
  local name, seen = end_worker(worker, 'dead') -- the fence: from here on every write of this worker is refused
  lost = {requeued = {}, given_up = {}, cancelled = {}, heirs = {}, seen = seen}
  for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do run_or_fail(id, worker, recover_job) end
  redis.call('ZREM', leases_key(), worker) -- after its jobs: if the server refuses one, the next sweep continues
  redis.call('DEL', claims_key(worker))
  retain_log(worker, lost.heirs, keep)
  expire_log(worker, keep)
  lapses[#lapses + 1] = {name or worker, lost.requeued, lost.given_up, lost.cancelled}
end

-- Jobs whose time has come enter their lanes, in its order, as if they were accepted now.
local function enter(id)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'entry', 'lane', 'tenant', 'order', 'keep', 'deadline', 'queue_deadline', 'owed')
  if not s[1] then
    redis.call('ZREM', scheduled_key(), id)
    return
  end
  if s[1] == 'queued' and s[2] == HELD then
    local model, priority = require_lane_entry(s[3], s[2])
    local expires = math.min(parse_number(s[7]) or math.huge, parse_number(s[8]) or math.huge)
    if expires < math.huge then redis.call('ZADD', timers_key(), expires, id) end
    local entry = redis.call('XADD', s[3], '*', 'job', id)
    rejoin_line(model, priority, s[4] or '', entry, id, now, s[5])
    redis.call('HSET', job, 'entry', entry, 'created', now)
    local reserved = integer_text(s[9]) or 0
    buffer_sum('reservations', model, 'held', -reserved)
    buffer_sum('reservations', model, priority, reserved)
    if not wake_worker(model, priority, now) then wake_scheduler(model) end
  end
  unschedule(id, s[4] or '', s[6]) -- last: what the server has refused before is repeated
end
local due = redis.call('ZRANGE', scheduled_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_jobs)
for _, id in ipairs(due) do run_or_fail(id, nil, enter) end

local function expire(id)
  local state = redis.call('HGET', job_key(id), 'state')
  if state and not STATES[state] then error('invalid state', 0) end
  if state == 'queued' then
    end_job(id, 'expired', 'deadline_exceeded_in_queue', now)
    expired = expired + 1
  else
    redis.call('ZREM', timers_key(), id)
  end
end
for _, id in ipairs(redis.call('ZRANGE', timers_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_jobs)) do
  run_or_fail(id, nil, expire)
end

-- Mend an entry of a lane after a script that was interrupted between two writes, or a manual change in the store: delete
-- an entry without an unfinished job, and put back a job that waits nowhere. A foreign entry becomes a dead letter.
local function mend(fields, lane, entry, model, priority)
  local id = fields[2]
  if fields[1] ~= 'job' or fields[3] then
    dead_letter('lane', lane, 'entry', entry, 'reason', 'not a lane entry of Penstock')
    redis.call('XDEL', lane, entry)
    return
  end
  local s = redis.call('HMGET', job_key(id), 'state', 'entry')
  if not s[1] or FINAL[s[1]] or is_entry(s[2]) and s[2] ~= entry then
    redis.call('XDEL', lane, entry)
  elseif s[1] == 'queued' and s[2] == entry and not redis.call('ZSCORE', arrivals_key(model, priority), to_member(entry)) then
    local member = to_member(entry) .. ':' .. id
    for _, key in ipairs({retry_key(model, priority), suspects_key(model, priority)}) do
      if redis.call('ZSCORE', key, member) then return end
    end
    requeue(id, now, false, '')
  end
end

-- Mend the oldest entries of each lane, which every leftover becomes in time. Delete the sum of reserved bytes of an empty
-- lane (`held`: of jobs that wait for their time), and those of tenants once all are: jobs that were lost, or deleted by hand,
-- released nothing.
local MAX_MENDED = 10
flush_writes()
local owed = redis.call('HGETALL', owed_key())
for i = 1, #owed, 2 do
  local model, priority = string.match(owed[i], '^(.+):(%a+)$')
  local lane = model and lane_key(model, priority)
  for _, item in ipairs(lane and redis.call('XRANGE', lane, '-', '+', 'COUNT', MAX_MENDED) or {}) do
    run_or_fail(item[2][2], nil, function() mend(item[2], lane, item[1], model, priority) end)
  end
  local waits = lane and (redis.call('XLEN', lane) > 0 or priority == 'held' and redis.call('EXISTS', scheduled_key()) == 1)
  if not waits then redis.call('HDEL', owed_key(), owed[i]) end
end
if #owed == 0 then redis.call('DEL', tenant_owed_key()) end
local most_salvaged, cut = tonumber(ARGV[7]), {}
if most_salvaged > 0 then
  cut = redis.call('ZRANGE', cut_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_salvaged)
  for _, id in ipairs(cut) do redis.call('ZADD', cut_key(), now + lease, id) end
end
local most_recorded = tonumber(ARGV[8])
local ends = most_recorded > 0 and redis.call('LPOP', script_ends_key(), most_recorded) or {}
return {expired, spared, #due, redis.call('INCR', tick_key()), lapses, cut, ends}

#!lua name=fail_malformed flags=allow-oom roles=any
-- Fails a job whose record a reader could not decode, unless it has ended. ARGV: id, reason
-- Returns: when it ended (ms), or now if that is malformed too; 0 if the job is not kept
local now = now_ms()
fail_malformed(ARGV[1], ARGV[2], now)
local job = job_key(ARGV[1])
if redis.call('EXISTS', job) == 0 then return 0 end
return tonumber(string.match(redis.call('HGET', job, 'done') or '', '^%d+$')) or now

#!lua name=salvage flags=allow-oom roles=api,worker,offline
-- Stores the record of a job that a script ended after a worker had begun it, with the tokens that its workers have
-- logged, and charges its tenant for them; their logs are then needed no more. Idempotent.
-- ARGV: id, state, its runs, record, its rows, tokens that the job has generated, of its prompts, and cached of these
-- Returns: 1 | 0 (not kept, or it has a record, or another state or other runs than these)
local id, state, runs, record, rows = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local s = redis.pcall('HMGET', job_key(id), 'state', 'runs', 'record', 'keep', 'tenant', 'size', 'lane', 'order',
  'caller', 'done', 'hold')
redis.call('ZREM', cut_key(), id)
if s.err or s[1] ~= state or s[2] ~= runs or s[3] then return 0 end
redis.call('HSET', job_key(id), 'record', record, 'rows', rows)
if s[5] and (s[6] or '') ~= '' then
  buffer_sum('usage', s[5], 'r' .. usage_span_end(retention_s(s[4])), #record + #rows)
end
local generated = parse_number(ARGV[6])
if parse_lane(s[7]) and generated then charge_rest(s[7], s[5] or '', s[8], generated, 0) end
count_usage(s[5] or '', parse_lane(s[7]) or '', s[9], parse_number(s[10]) or now_ms(), 0, ARGV[7], generated or 0, ARGV[8])
if s[11] then settle_limits(id, s[11], false, parse_number(ARGV[7]) or 0, generated or 0) end
release_logs(id, runs)
return 1

#!lua name=rewound flags=allow-oom roles=api,worker,scheduler
-- Begins a new epoch of a partition that has lost data: a process has seen a later tick than the store has. Idempotent.
-- ARGV: the latest tick seen. Returns the epoch.
local seen = tonumber(ARGV[1])
if tonumber(redis.call('GET', tick_key()) or 0) < seen then
  redis.call('SET', tick_key(), seen + 1)
  return redis.call('INCR', epoch_key())
end
return tonumber(redis.call('GET', epoch_key()) or 0)

#!lua name=reset flags=allow-oom roles=api
-- Begins a new epoch of a job's events after the store lost deltas that a reader has seen, so that no event id is used
-- twice; once for all readers of the old epoch. ARGV: id, number of resets that the reader knows
-- Returns: number of resets now, or 'unknown'; the reader's number if the record is malformed: then the job has failed
local id, seen = ARGV[1], tonumber(ARGV[2])
return run_or_fail(id, nil, function()
  local known = redis.call('HMGET', job_key(id), 'state', 'epoch')
  if not known[1] then return 'unknown' end
  local now = tonumber(integer_text(known[2] or '0'))
  if not now then error('invalid epoch', 0) end
  if now == seen then return redis.call('HINCRBY', job_key(id), 'epoch', 1) end
  return now
end) or seen
