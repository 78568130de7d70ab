-- Scripts of a worker: its lease, its claims, the tokens and the end of its jobs.

#!lua name=register flags=allow-oom roles=worker
-- Registers a worker and gives it its lease. ARGV: worker, model, lease in ms, its name in `penstock ps`. Returns now.
local worker, model, lease, name = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] or ''
local now = now_ms()
redis.call('HSET', worker_key(worker), 'state', 'live', 'model', model, 'frame', 0, 'name', name)
redis.call('ZADD', leases_key(), now + lease, worker)
return now

#!lua name=claim flags=allow-oom roles=worker
-- Claims up to `want` waiting jobs for a live worker, in the order of streaming/order.py. Suspects
-- (jobs that may have killed their workers) run alone: one worker of a model at a time takes them, one by one.
-- ARGV: worker, model, want, lease in ms, '1' to take one suspect instead, most jobs from the lowest lane | '',
--       the number of the worker's last run: the runs that begin here get the following ones, places that are free:
--       jobs beyond them come from the highest lane alone, and the worker preempts others for them | '',
--       how many of these begin at once: for others the worker is not idle, and prefetches them | '',
--       places for jobs of any tenant | '', the adapters that the worker has loaded, each between line breaks | '' (its model has
--       no adapters), and tenants that get none of the further places...
-- Returns: 'fenced' | {now (ms, with decimals), frame number, 1 if this worker must finish its jobs and then take suspects,
--                      and of each job: id, body, attempt, deadline | '', reply, runs before this one, accepted at, number
--                      of its run}
local c = {
  worker = ARGV[1], model = ARGV[2], want = tonumber(ARGV[3]), alone = ARGV[5] == '1', number = tonumber(ARGV[7]),
  begun = 0, lanes = {}, chosen = {}, dropped = 0, crowding = {}, crowds = 0, commit = commit_choices, ahead = 1
}
local worker, model, want, lease = c.worker, c.model, c.want, tonumber(ARGV[4])
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame', 'name', 'closed')
if mine[1] ~= 'live' then return 'fenced' end
c.exact = exact_ms()
c.now, c.frame, c.name = math.floor(c.exact), tonumber(mine[2]), mine[3] or ''
c.logged = worker .. ':' .. (c.frame + 1) .. ':'
c.shared = tonumber(ARGV[10] or '') or want
if ARGV[11] and ARGV[11] ~= '' then c.loaded, c.ahead, c.adapters = ARGV[11], MAX_PASSED_BY, {} end
for i = 12, #ARGV do c.crowding[ARGV[i]], c.crowds = true, c.crowds + 1 end
c.spare, c.free, c.out = tonumber(ARGV[6]) or want, tonumber(ARGV[8]) or want, {string.format('%.3f', c.exact), c.frame, 0}
redis.call('ZADD', leases_key(), c.now + lease, worker)

-- The queues of jobs that were put back are there only while some wait: one EXISTS usually saves reading them.
local requeued, suspects = {}, 0
for i, priority in ipairs(PRIORITIES) do
  requeued[2 * i - 1], requeued[2 * i] = retry_key(model, priority), suspects_key(model, priority)
end
local any_requeued = redis.call('EXISTS', unpack(requeued)) > 0
for i = 2, any_requeued and #requeued or 0, 2 do suspects = suspects + redis.call('ZCARD', requeued[i]) end
local runner = suspects > 0 and redis.call('GET', alone_key(model))
local must_run = suspects > 0 and (not runner or runner == worker)
if must_run then
  redis.call('SET', alone_key(model), worker, 'PX', 3 * lease)
  c.out[3] = 1
end

-- A worker that is to run suspects claims nothing else before them.
if c.alone and must_run then
  for _, priority in ipairs(PRIORITIES) do
    local more = true
    while more and c.begun < want and c.dropped < MAX_DROPPED do
      local _
      _, more = take_requeued(c, 'suspects', priority)
    end
  end
elseif not c.alone and not must_run then
  take_in_order(c, any_requeued)
end
if c.dropped >= MAX_DROPPED then notify_worker(worker, {'w'}) end
if c.begun < want and c.free < want and not must_run then
  redis.call('ZADD', yielding_key(model), c.now, worker)
  redis.call('EXPIRE', yielding_key(model), YIELDING_EXPIRY_S)
end
local closed = closed_to(c)
if closed ~= (mine[4] or '') then redis.call('HSET', worker_key(worker), 'closed', closed) end
local idle, prefetching, ready = idle_key(model), prefetching_key(model), nil
if c.begun < c.free and not must_run then ready = c.begun < (tonumber(ARGV[9]) or c.free) and idle or prefetching end
if ready ~= idle then redis.call('ZREM', idle, worker) end
if ready ~= prefetching then redis.call('ZREM', prefetching, worker) end
if ready then redis.call('ZADD', ready, c.now, worker) end
if ready == prefetching then redis.call('EXPIRE', ready, YIELDING_EXPIRY_S) end
return c.out

#!lua name=append flags=allow-oom roles=worker
-- Appends one engine step to the worker's durable log, then publishes its frames. Idempotent by the frame's number.
-- ARGV: worker, frame number, lease in ms (0: not renewed), oldest frame still needed ('': as before), '1' if earlier
--       frames may be missing, then pairs of reply address ('-' for none), frame
-- Returns: 'fenced' | 0 (this frame is already in the log) | 1 | -1 (frames before this one are missing: the store has
--          lost data, and nothing was written)
local worker, number, lease, oldest, forced = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5] == '1'
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame')
if mine[1] ~= 'live' then return 'fenced' end
local now = now_ms()
if lease > 0 then redis.call('ZADD', leases_key(), now + lease, worker) end
local last = tonumber(mine[2])
if number <= last then return 0 end
if number > last + 1 and not forced then return -1 end
if oldest == '' then
  redis.call('XADD', log_key(worker), number .. '-0', unpack(ARGV, 6))
else
  redis.call('XADD', log_key(worker), 'MINID', '~', oldest, number .. '-0', unpack(ARGV, 6))
end
redis.call('HSET', worker_key(worker), 'frame', number, 'at', now)
for i = 6, #ARGV, 2 do
  if ARGV[i] ~= '-' then redis.call('PUBLISH', ARGV[i], ARGV[i + 1]) end
end
return 1

#!lua name=mark flags=allow-oom roles=api,worker,offline
-- Writes something, also while the store is full. At durability D3 a replica then confirms all earlier writes with it.
redis.call('SET', mark_key(), 1)
return 1

#!lua name=finish flags=allow-oom roles=worker promise
-- Ends a job: writes its terminal record and takes it off its lane; only the worker that holds it may.
-- ARGV: worker, id, run, state, record, its rows, what readers are sent, reason for a dead letter | '', tokens that the
--       job has generated, tokens of its prompt, once for each choice (0: not known), tokens of its prompts, each counted
--       once, and how many of them were cached
-- Returns: 'fenced' | 0 (ended already, or not this run's, or its record is malformed: then it has failed) | 1
if not is_live(ARGV[1]) then return 'fenced' end
return run_or_fail(ARGV[2], ARGV[1], function(id, worker)
  local job, run, state, record, rows, dead = job_key(id), ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[8]
  -- END_FIELDS, the run, NUMBERS, then its own.
  local s = redis.call('HMGET', job, 'state', 'lane', 'entry', 'reply', 'worker', 'keep', 'events', 'idem', 'owed', 'runs',
    'tenant', 'size', 'conversation', 'shared', 'hold', 'media', 'run', 'attempt', 'created', 'claimed', 'started', 'deadline',
    'epoch', 'order', 'caller')
  if not holds_job(id, worker, run, s[1], s[5], s[17]) then return 0 end
  local model, priority = require_lane_entry(s[2], s[3])
  check_readable(s)
  redis.call('HSET', job, 'state', state, 'record', record, 'rows', rows, 'done', now_ms())
  let_go(job, id, s, model, priority, #record + #rows, tonumber(ARGV[11]), tonumber(ARGV[9]))
  charge_rest(s[2], s[11] or '', s[24], ARGV[9], ARGV[10])
  count_usage(s[11] or '', model, s[25], now_ms(), 1, ARGV[11], ARGV[9], ARGV[12])
  if s[18] ~= '1' then release_logs(id, s[10]) end
  publish(s[4], ARGV[7])
  if s[7] then emit_event(s[7], id, s[11] or '', 'job.' .. state, true) end
  if dead ~= '' then dead_letter('job', id, 'reason', dead) end
  return 1
end) or 0

#!lua name=checkpoint flags=allow-oom roles=worker
-- Records a checkpoint of a run: its deltas are complete from this frame of the log on, so that earlier frames can be
-- trimmed. ARGV: worker, id, run, frame
-- Returns: 'fenced' | 0 (not this run's, or the frame is not in the log) | 1
local worker, id, run, frame = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  if tonumber(redis.call('HGET', worker_key(worker), 'frame')) < tonumber(frame) then return 0 end
  local runs = string.gsub(s[4], ':%d+:%d+;$', ':' .. frame .. ':' .. run .. ';')
  redis.call('HSET', job_key(id), 'runs', runs)
  return 1
end) or 0

#!lua name=beat flags=allow-oom roles=worker
-- Heartbeat of a worker: renews its lease. ARGV: worker, lease in ms
-- Returns: 'fenced' | {id, run, who cancelled it | ''}... of every job that this worker holds by the store's records:
-- the message of a cancel, or the answer of a claim, may have been lost
local worker, lease = ARGV[1], tonumber(ARGV[2])
local mine = redis.call('HMGET', worker_key(worker), 'state', 'model')
local model = mine[2]
if mine[1] ~= 'live' then return 'fenced' end
redis.call('ZADD', leases_key(), now_ms() + lease, worker)
if model and redis.call('GET', alone_key(model)) == worker then redis.call('PEXPIRE', alone_key(model), 3 * lease) end
local held = {}
for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do
  local s = redis.pcall('HMGET', job_key(id), 'run', 'cancel')
  held[#held + 1] = {id, tonumber(integer_text(s[1])) or 0, s[2] or ''}
end
return held

#!lua name=release flags=allow-oom roles=worker
-- Requeues a job that a worker hands back unfinished, because it drains or needs the job's place; it does not count as a
-- lost worker. What the job's runs have generated moves from the workers' logs into the job's parked log.
-- ARGV: worker, id, run, the most seconds to keep the worker's log for the job if nothing is parked, outcome of the
--       attempt ('handed_back' | 'preempted'), frame...: all that the job's runs have generated; none: nothing, or the
--       worker does not know the job
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record is malformed: then it has
--          failed) | 1
local worker, id, run, keep, outcome = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'cancel', 'alone', 'runs')
  local now = now_ms()
  if s[1] == 'queued' and redis.call('SISMEMBER', claims_key(worker), id) == 1 then
    requeue(id, now, false, worker) -- the claim was interrupted before it changed the record
    return 1
  end
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  if #ARGV > 5 then
    if not string.find(s[6] or '', ':%d+:%d+;$') then error('invalid runs', 0) end
    redis.call('DEL', parked_key(id))
    for i = 6, #ARGV do redis.call('XADD', parked_key(id), i - 5 .. '-0', '-', ARGV[i]) end
    redis.call('HSET', job_key(id), 'runs', (string.gsub(s[6], ':%d+:(%d+;)$', ':0:%1')))
  else
    retain_log(worker, {id}, keep)
  end
  close_attempt(id, s[4] and 'cancelled' or outcome, now)
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
  else
    requeue(id, now, s[5] == '1', worker)
  end
  return 1
end) or 0

#!lua name=restart flags=allow-oom roles=worker
-- Restarts a claimed job from its beginning under a new epoch, where the logged tokens cannot be continued. The record
-- then names this run alone, so readers ignore earlier deltas, and cursors of the old epoch get a reset.
-- ARGV: worker, id, run, the draft to keep: what earlier runs generated, which its readers have seen | ''
-- Returns: 'fenced' | 0 (not this run's, or its record is malformed: then it has failed) | 1
local worker, id, run, draft = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or ''
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'run', 'runs')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local mine = string.match(s[4], '([^;]+;)$')
  if not mine then error('invalid runs', 0) end
  if mine ~= s[4] then
    -- First, because it fails if `epoch` is not a number.
    local epoch = redis.call('HINCRBY', job_key(id), 'epoch', 1)
    if draft ~= '' then redis.call('HSET', job_key(id), 'draft:' .. epoch, draft) end
    release_logs(id, string.sub(s[4], 1, -#mine - 1))
    redis.call('HSET', job_key(id), 'runs', mine)
  end
  return 1
end) or 0

#!lua name=decline flags=allow-oom roles=worker
-- Puts a job back that only a newer version can read: undoes the claim and puts the job behind those of its tenant, so that
-- this worker claims these first. For this its tenant stays charged. A job with a limit keeps its latest start.
-- ARGV: worker, id, run
-- Returns: 'fenced' | 0 (not this worker's, or no longer under this run, or its record is malformed: then it has
--          failed) | 1
local worker, id, run = ARGV[1], ARGV[2], ARGV[3]
if not is_live(worker) then return 'fenced' end
return run_or_fail(id, worker, function()
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'run', 'cancel', 'lane', 'entry', 'runs', 'queue_deadline',
    'deadline', 'alone', 'attempt', 'tenant', 'order', 'created')
  if not holds_job(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local now = now_ms()
  if s[4] then
    end_job(id, 'cancelled', 'cancelled', now)
    return 1
  end
  local model, priority = require_lane_entry(s[5], s[6])
  local before, runs = s[11] - 1, string.gsub(s[7], '[^;]*;$', '')
  local expires = math.min(before == 0 and parse_number(s[8]) or math.huge, parse_number(s[9]) or math.huge)
  redis.call('HSET', job, 'state', 'queued', 'worker', '', 'attempt', before, 'runs', runs)
  if s[10] == '1' then
    redis.call('ZADD', suspects_key(model, priority), now, to_member(s[6]) .. ':' .. id)
    redis.call('HSET', job, 'queue', 'suspects')
    if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
  else
    rejoin_line(model, priority, s[12] or '', s[6], id, s[14], s[13])
  end
  if before == 0 then redis.call('HDEL', job, 'attempt', 'runs', 'claimed') end
  if expires < math.huge then redis.call('ZADD', timers_key(), expires, id) end
  buffer_write('releases', worker, id) -- last, as in requeue
  wake_worker(model, priority, now)
  return 1
end) or 0

#!lua name=leave flags=allow-oom roles=worker
-- Gives up a worker's lease at its graceful shutdown. Refused while it still holds jobs; of a worker that was fenced
-- nothing is written. ARGV: worker, seconds to keep its log. Returns: how many jobs it still holds (0: it has left)
local worker, keep = ARGV[1], ARGV[2]
local held = redis.call('SCARD', claims_key(worker))
if held > 0 or not is_live(worker) then return held end
end_worker(worker, 'left')
expire_log(worker, keep)
redis.call('ZREM', leases_key(), worker)
return 0
