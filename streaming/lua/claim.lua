#!lua flags=allow-oom
-- Claims up to `want` waiting jobs for a live worker: highest lane first, requeued jobs before new ones. Suspects (jobs
-- that may have killed their workers) run alone: one worker of a model at a time takes them, one by one.
-- ARGV: worker, model, want, lease in ms, '1' to take one suspect instead, most jobs from the lowest lane | '',
--       the number of the worker's last run: the runs that begin here get the following ones
-- Returns: 'fenced' | {now, frame number, 1 if this worker must finish its jobs and then take suspects,
--                      {id, body, attempt, deadline | '', reply, runs before this one, accepted at, number of its run}...}
local worker, model, want, lease, alone = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local spare, number = tonumber(ARGV[6]) or want, tonumber(ARGV[7])
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame', 'name')
if mine[1] ~= 'live' then return 'fenced' end
local exact = exact_ms()
local now = math.floor(exact)
redis.call('ZADD', leases_key(), now + lease, worker)

local function read(lane, count)
  local got = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', lane, '>')
  if got and got.err then
    if string.sub(got.err, 1, 7) ~= 'NOGROUP' then return redis.error_reply(got.err) end
    -- The group does not exist yet, or was lost with the data: read from the start, for finished jobs leave the stream.
    redis.call('XGROUP', 'CREATE', lane, GROUP, '0', 'MKSTREAM')
    got = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', count, 'STREAMS', lane, '>')
  end
  return got and got[1] and got[1][2] or {}
end

-- Whether a waiting job is queued at another lane and entry than the one that is being claimed.
local function is_queued_elsewhere(id, lane, entry)
  require_lane_entry(lane, entry)
  local found = redis.call('XRANGE', lane, entry, entry)[1]
  return found and found[2][2] == id
end

local begun = 0 -- jobs claimed by this call: only these use up run numbers
local function claim_entry(lane, entry, id)
  local job, run = job_key(id), number + begun + 1
  local s = redis.call('HMGET', job, 'state', 'queue_deadline', 'deadline', 'body', 'reply', 'entry', 'created', 'attempt',
    'events', 'lane')
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
  local attempt, runs = (s[8] or 0) + 1, s[8] and redis.call('HGET', job, 'runs') or ''
  if attempt == 2 then redis.call('HSET', job, 'started', redis.call('HGET', job, 'claimed')) end
  redis.call('HSET', job, 'state', 'in_progress', 'worker', worker, 'name', mine[3] or '', 'attempt', attempt, 'run', run,
    'claimed', exact, 'runs', runs .. worker .. ':' .. (mine[2] + 1) .. ':' .. run .. ';')
  if alone then redis.call('HSET', job, 'alone', 1) end
  if s[2] or s[3] then redis.call('ZREM', timers_key(), id) end
  if s[9] and attempt == 1 then emit_event(s[9], id, redis.call('HGET', job, 'tenant') or '', 'job.started') end
  return {id, s[4] or '', attempt, s[3] or '', s[5] or '', runs, parse_number(s[7]) or 0, run}
end

local function job_ids(entries)
  local ids = {}
  for _, item in ipairs(entries) do ids[#ids + 1] = item[2] and item[2][1] == 'job' and item[2][2] or nil end
  return ids
end

-- Claim from one lane until the answer holds `most` jobs or the lane is empty.
local out = {now, tonumber(mine[2]), 0}
local function claim_from(lane, most)
  while #out - 3 < most do
    local asked, taken = math.min(most - (#out - 3), 1000), {}
    local entries = read(lane, asked)
    if entries.err then return entries end
    for _, item in ipairs(entries) do
      local fields = item[2]
      if not fields or fields[1] ~= 'job' or fields[3] then
        dead_letter('lane', lane, 'entry', item[1], 'reason', 'not a lane entry of Penstock')
        ack_and_delete(lane, item[1])
      else
        local ran, job = pcall(claim_entry, lane, item[1], fields[2])
        if not ran then -- only this job fails, unless the server refused a command
          local why = record_fault(job)
          if not why then -- record the entries read as this worker's: it releases jobs that it does not know
            redis.call('SADD', claims_key(worker), unpack(job_ids(entries)))
            error(job, 0)
          end
          fail_malformed(fields[2], why, now, nil, lane, item[1])
        elseif job then
          out[#out + 1], taken[#taken + 1], begun = job, job[1], begun + 1
        end
      end
    end
    if #taken > 0 then redis.call('SADD', claims_key(worker), unpack(taken)) end
    if #entries < asked then return nil end
  end
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

for _, priority in ipairs(PRIORITIES) do
  local lanes = {} -- a worker that is to run suspects claims nothing else before them
  if alone and out[3] == 1 then
    lanes = {suspects_key(model, priority)}
  elseif not alone and out[3] == 0 then
    lanes = any_requeued and {retry_key(model, priority), lane_key(model, priority)} or {lane_key(model, priority)}
  end
  local most = priority == PRIORITIES[#PRIORITIES] and math.min(want, #out - 3 + spare) or want
  for _, lane in ipairs(lanes) do
    local failed = claim_from(lane, most)
    if failed then return failed end
  end
end
if #out - 3 < want and out[3] == 0 then
  redis.call('ZADD', idle_key(model), now, worker)
else
  redis.call('ZREM', idle_key(model), worker)
end
return out
