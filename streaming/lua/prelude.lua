-- Shared by every script. Time is Redis time in milliseconds: no client's clock is ever asked. It stands still while a
-- script runs. A command costs more than what it does, so what is known is not asked again by the next call of a run.
local CLOCK = nil
local function exact_ms()
  CLOCK = CLOCK or redis.call('TIME')
  return CLOCK[1] * 1000 + CLOCK[2] / 1000
end

local function now_ms()
  return math.floor(exact_ms())
end

local function past(when, now)
  return when and when ~= '' and tonumber(when) <= now
end

-- What many calls do to one key is done by one command, behind the last call or when it has grown long: entries dropped by
-- lane, jobs let go by worker, scores and jobs listed by tenant, bytes owed by model and priority, bytes kept by tenant.
local dropped, released, listed, owing, keeping = {}, {}, {}, {}, {}
local listed_s = 86400 -- put says for how long jobs are listed
local function do_gathered()
  for lane, entries in pairs(dropped) do
    redis.call('XACK', lane, GROUP, unpack(entries))
    redis.call('XDEL', lane, unpack(entries))
  end
  for worker, ids in pairs(released) do redis.call('SREM', claims_key(worker), unpack(ids)) end
  for tenant, words in pairs(listed) do
    redis.call('ZADD', jobs_key(tenant), unpack(words))
    if now_ms() % 8 == 0 then -- one in eight, which is often enough to trim what the others add
      redis.call('ZREMRANGEBYSCORE', jobs_key(tenant), '-inf', now_ms() - 1000 * listed_s)
    end
    redis.call('EXPIRE', jobs_key(tenant), listed_s)
  end
  for place, amounts in pairs(owing) do
    local sum = 0
    for _, bytes in ipairs(amounts) do sum = sum + bytes end
    redis.call('HINCRBY', owed_key(), place, sum)
  end
  for tenant, fields in pairs(keeping) do
    local key, now, last, new = kept_key(tenant), math.floor(now_ms() / 1000), 0, false
    local added = {}
    for i = 1, #fields, 2 do added[fields[i]] = (added[fields[i]] or 0) + fields[i + 1] end
    for field, bytes in pairs(added) do
      local sum = redis.call('HINCRBY', key, field, bytes)
      if sum == bytes then new = true end
      if sum <= 0 then redis.call('HDEL', key, field) end
      last = math.max(last, tonumber(string.match(field, '%d+')))
    end
    if new then -- as often as a new span of time begins: drop those that are over
      for _, field in ipairs(redis.call('HKEYS', key)) do
        if tonumber(string.match(field, '%d+') or 0) <= now then redis.call('HDEL', key, field) end
      end
      if last - now > redis.call('TTL', key) then redis.call('EXPIRE', key, last - now) end
    end
  end
  dropped, released, listed, owing, keeping = {}, {}, {}, {}, {}
end

local function gather(lists, key, word, second)
  local words = lists[key] or {}
  lists[key] = words
  words[#words + 1] = word
  words[#words + 1] = second
  if #words >= 1000 then do_gathered() end
end

-- A number that a record holds: a whole one, as it is written; any that is no text like inf or nan. nil for another text.
local function whole_number(text)
  return #(text or '') < 16 and string.match(text or '', '^%d+$') or nil
end

local function number_of(text)
  local number = tonumber(text or nil)
  return number and number >= 0 and number < 1e18 and number or nil
end

-- The model, the priority and the kind of a lane, or of a stream that jobs are put back to; nil for any other name.
local function place_of(lane)
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

-- The same of a job, by the lane and the entry in its record. Raises if they are none: before anything is written.
local function checked_place(lane, entry)
  local model, priority, kind = place_of(lane)
  if not model then error('its lane is none', 0) end
  if not is_entry(entry) then error('its entry is none', 0) end
  return model, priority, kind
end

-- Count bytes that an accepted job may still write (less than 0: it has ended), by model and priority, which are what
-- the names of its lane, retry and suspects streams have in common. Bytes that are no number are nobody's: what is
-- counted for a lane goes when the last of its jobs has ended.
local function owe(model, priority, bytes, sign)
  if whole_number(bytes) then gather(owing, model .. ':' .. priority, sign * bytes) end
end

-- The bytes that all unfinished jobs may still write. Of what a call adds it tells `owed_now` itself.
local owed_sum = nil
local function owed_now()
  if not owed_sum then
    owed_sum = 0
    for _, bytes in ipairs(redis.call('HVALS', owed_key())) do owed_sum = owed_sum + math.max(0, bytes) end
  end
  return owed_sum
end

-- Bytes that a tenant's jobs take, by the second by which their records are gone, in some twenty spans of the retention
-- time. A span's bytes are counted until it is over and need not be taken back, so no count outlives what it counts,
-- whatever becomes of a job, a process or the store.
local function span_end(keep, now)
  local span = math.ceil(keep / 24)
  return (math.floor((now / 1000 + keep) / span) + 1) * span
end

-- A job has ended: its request is kept from now on, and its result. `size` says what was counted when it came: the bytes
-- of its request, and the end of their span. Parts of something that is listed by itself are not counted.
local function keep_ended(tenant, size, keep, now, result)
  local bytes, was = string.match(size or '', '^(%d+):(%d+)$')
  if not whole_number(bytes) or not whole_number(was) or not tenant then return end
  local ends = span_end(tonumber(keep) or 3600, now)
  if tonumber(was) ~= ends then
    if tonumber(was) > now / 1000 then gather(keeping, tenant, was, -bytes) end
    gather(keeping, tenant, tostring(ends), tonumber(bytes))
  end
  if result > 0 then gather(keeping, tenant, 'r' .. ends, result) end
end

-- What a tenant keeps: {jobs, bytes of requests, bytes of results}. Of what a call adds it tells these itself.
local kept_now = {}
local function kept_by(tenant, keep)
  local sums = kept_now[tenant]
  if sums then return sums end
  do_gathered()
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
  kept_now[tenant] = sums
  return sums
end

-- Tell every process that holds a response of this job. `reply` is a list of addresses joined by commas.
local function publish(reply, message)
  for address in string.gmatch(reply or '', '[^,]+') do
    redis.call('PUBLISH', address, message)
  end
end

local function tell_worker(worker, message)
  redis.call('PUBLISH', CHANNEL .. 'worker:' .. worker, cmsgpack.pack(message))
end

-- Wake the worker of this model that last said it had room; older entries may be of dead workers. Returns whether one was.
local nobody_idle = {}
local function wake(model, now)
  for _ = 1, nobody_idle[model] and 0 or 4 do
    local freshest = redis.call('ZPOPMAX', idle_key(model))
    if #freshest == 0 then
      nobody_idle[model] = true
      return false
    end
    if tonumber(freshest[2]) > now - 2000 then
      tell_worker(freshest[1], {'w'})
      return true
    end
  end
  return false
end

-- The fence: whether a worker's lease was not taken from it. No call of a run changes that.
local live = {}
local function is_live(worker)
  if live[worker] == nil then live[worker] = redis.call('HGET', worker_key(worker), 'state') == 'live' end
  return live[worker]
end

-- There is work and nobody to wake: the scheduler need not wait for its next tick.
local function wake_scheduler(model)
  redis.call('PUBLISH', CHANNEL .. 'scheduler:wake', model)
end

-- How many jobs of a lane nobody has read. Of what a call adds it tells `waiting_in` itself.
local waits = {}
local function waiting_in(lane)
  if not waits[lane] then
    local length = redis.call('XLEN', lane)
    local pending = length > 0 and redis.pcall('XPENDING', lane, GROUP)
    waits[lane] = length - (pending and pending[1] or 0)
  end
  return waits[lane]
end

-- Whether a live worker reads this lane: whoever leaves or lapses is taken out of the group.
local function is_read(lane)
  local groups = redis.pcall('XINFO', 'GROUPS', lane)
  for _, group in ipairs(groups.err and {} or groups) do
    for i = 1, #group, 2 do
      if group[i] == 'consumers' and group[i + 1] > 0 then return true end
    end
  end
  return false
end

-- Every stream of a model that workers read.
local function lanes_of(model)
  local lanes = {}
  for _, priority in ipairs(PRIORITIES) do
    for _, lane in ipairs({suspects_key(model, priority), retry_key(model, priority), lane_key(model, priority)}) do
      lanes[#lanes + 1] = lane
    end
  end
  return lanes
end

-- Forget a consumer, but never one with pending entries: that would strand them.
local function forget_consumer(model, worker)
  for _, lane in ipairs(lanes_of(model)) do
    local pending = redis.pcall('XPENDING', lane, GROUP, '-', '+', 1, worker)
    if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker) end
  end
end

-- A dead letter, for people: never work, so it may be trimmed by length.
local function dead_letter(...)
  redis.call('XADD', dead_key(), 'MAXLEN', '~', 10000, '*', ...)
end

local function drop_entry(lane, entry)
  if string.sub(lane or '', 1, #P) == P and is_entry(entry) then gather(dropped, lane, entry) end
end

-- An event, for those its record names: b the broker, w webhooks, which hear of ends alone. `what` is as in job.completed.
-- What nobody has passed on for a week is dropped: it must not fill the store of whoever runs no offline process.
local OUTBOX_S = 7 * 86400
local function post(box, id, tenant, what)
  local oldest = string.format('%d-0', now_ms() - 1000 * OUTBOX_S)
  redis.call('XADD', box, 'MINID', '~', oldest, '*', 'id', id, 'tenant', tenant, 'type', what)
  redis.call('EXPIRE', box, OUTBOX_S)
end

local function emit(for_whom, id, tenant, what, final)
  if string.find(for_whom, 'b', 1, true) then post(outbox_key('broker'), id, tenant, what) end
  if final and string.find(for_whom, 'w', 1, true) then post(outbox_key('webhooks'), id, tenant, what) end
end

-- A webhook message is due, and kept, with its place among those of its endpoint, longer than attempts may go on. What
-- follows its end sets a shorter time. Nobody asks for the messages of an endpoint that is no longer configured.
local HOOK_S = 31 * 86400
local function plan_hook(id, endpoint, due)
  redis.call('HSET', hook_key(id), 'due', due)
  redis.call('EXPIRE', hook_key(id), HOOK_S)
  redis.call('ZADD', hook_due_key(endpoint), due, id)
  redis.call('EXPIRE', hook_due_key(endpoint), HOOK_S)
end

-- A log is needed while a job lives whose tokens it holds; when the last such job of a worker that is gone has ended it
-- goes too, a minute later, for whoever reads it just now.
local LOG_TAIL_S = 60
local function inherit(worker, ids, keep)
  if #ids > 0 then
    redis.call('SADD', heirs_key(worker), unpack(ids))
    redis.call('EXPIRE', heirs_key(worker), keep)
  end
end

local function end_log(worker, keep)
  redis.call('EXPIRE', log_key(worker), redis.call('EXISTS', heirs_key(worker)) == 1 and keep or LOG_TAIL_S)
end

local function disown(id, runs)
  for worker in string.gmatch(runs or '', '([^:;]+):[^;]*;') do
    if redis.call('SREM', heirs_key(worker), id) == 1 and redis.call('EXISTS', heirs_key(worker)) == 0
      and redis.call('HGET', worker_key(worker), 'state') ~= 'live' then
      redis.call('EXPIRE', log_key(worker), LOG_TAIL_S)
    end
  end
end

-- For how long the record of an ended job is kept (s): an hour, if it says no number.
local function keep_of(keep)
  return whole_number(keep) or 3600
end

-- An idempotency key is kept as long as its job is. What is no such key is left alone.
local function is_idem(key)
  local start = idem_key('')
  return string.sub(key or '', 1, #start) == start
end

-- End a job that no worker ends: cancelled in the queue, expired, given up. Raises if its record cannot be read.
local function end_job(id, state, reason, now)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'reply', 'worker', 'keep', 'events', 'idem', 'owed', 'runs',
    'tenant', 'size')
  local model, priority = checked_place(s[1], s[2])
  redis.call('HSET', job, 'state', state, 'reason', reason, 'done', now)
  drop_entry(s[1], s[2])
  owe(model, priority, s[8], -1)
  keep_ended(s[10], s[11], keep_of(s[5]), now, 0)
  disown(id, s[9])
  if s[4] then gather(released, s[4], id) end
  redis.call('ZREM', timers_key(), id)
  redis.call('EXPIRE', job, keep_of(s[5]))
  if is_idem(s[7]) then redis.call('EXPIRE', s[7], keep_of(s[5])) end
  if s[6] then emit(s[6], id, s[10] or '', 'job.' .. state, true) end
  publish(s[3], cmsgpack.pack({'e', id}))
end

-- Put a job that a worker was given back, before the lane it came from; a suspect where it will be run alone. Raises if
-- its record cannot be read.
local function requeue(id, now, suspect, worker)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'deadline')
  local model, priority, kind = checked_place(s[1], s[2])
  local due = number_of(s[3])
  if s[3] and not due then error('its deadline is none', 0) end
  drop_entry(s[1], s[2])
  gather(released, worker, id)
  local lane = (suspect or kind == 'suspects') and suspects_key(model, priority) or retry_key(model, priority)
  local entry = redis.call('XADD', lane, '*', 'job', id)
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '')
  if due then redis.call('ZADD', timers_key(), due, id) end
  if not wake(model, now) then wake_scheduler(model) end
end

-- What a file counts as by its size: at least what it takes of the store and the disk, however small it is, so that a
-- quota of bytes bounds the number of files too.
local LEAST_FILE = 4096
local function cost_of(bytes)
  bytes = number_of(bytes) or 0
  return math.max(LEAST_FILE, bytes < 1e15 and math.ceil(bytes) or 0)
end

-- The same by its record; the least if that cannot be read.
local function cost_in(record)
  local read, file = pcall(cmsgpack.unpack, record or '')
  return cost_of(read and type(file) == 'table' and file.size)
end

-- Note what a file counts as, nil: nothing any more, in a hash that has the sum of all beside them: nobody adds them up.
local function count_file(key, id, cost)
  local before = redis.call('HGET', key, id)
  if cost then redis.call('HSET', key, id, cost) end
  if before and not cost then redis.call('HDEL', key, id) end
  if cost or before then redis.call('HINCRBY', key, 'total', (cost or 0) - (before or 0)) end
  if not cost and redis.call('HLEN', key) == 1 then redis.call('DEL', key) end
end

-- A file or a batch by its place among those that are to be forgotten, which says whose it is: its record may be gone.
local function forget_at(id, tenant, when)
  redis.call('ZADD', expiring_key(), when, id .. ':' .. tenant)
end

local function forget_never(id, tenant)
  redis.call('ZREM', expiring_key(), id .. ':' .. tenant)
end

-- Keep a file's record until it expires.
local function keep_file(id, tenant, record, now, expires)
  redis.call('SET', file_key(id), record)
  redis.call('ZADD', files_key(tenant), now, id)
  count_file(sizes_key(tenant), id, cost_in(record))
  forget_at(id, tenant, expires)
end

local FINAL = {failed = true, completed = true, expired = true, cancelled = true}

-- Whether a batch that has not ended was made of this file. Those whose record is lost are crossed out on the way.
local function in_use(id)
  local batch = redis.call('SRANDMEMBER', readers_key(id))
  while batch do
    local status = redis.call('HGET', batch_key(batch), 'status')
    if status and not FINAL[status] then return true end
    redis.call('SREM', readers_key(id), batch)
    batch = redis.call('SRANDMEMBER', readers_key(id))
  end
  return false
end

-- Go on counting a file that is gone: a batch has its own link to the bytes. Looked at again in a day, lest a batch whose
-- record is lost keep it counted.
local HELD_MS = 86400000
local function hold_file(id, tenant, cost)
  count_file(held_key(tenant), id, cost)
  forget_at(id, tenant, now_ms() + HELD_MS)
end

-- Of a file that has no record any more: count it while a batch works on it, and no longer.
local function release_file(id, tenant)
  if redis.call('EXISTS', file_key(id)) == 1 then return end
  if in_use(id) then
    local cost = redis.call('HGET', held_key(tenant), id) or redis.call('HGET', sizes_key(tenant), id)
    hold_file(id, tenant, cost or LEAST_FILE)
  else
    count_file(held_key(tenant), id, nil)
    forget_never(id, tenant)
  end
  count_file(sizes_key(tenant), id, nil)
  redis.call('ZREM', files_key(tenant), id)
end

-- The bytes that a tenant's files count as, and those of files that are gone and that its batches work on. They are
-- noted beside the list of its files, and anew where the two do not agree.
local function stored_bytes(tenant)
  local sizes, files = sizes_key(tenant), redis.call('ZCARD', files_key(tenant))
  if redis.call('HLEN', sizes) ~= (files > 0 and files + 1 or 0) then
    redis.call('DEL', sizes)
    for _, id in ipairs(redis.call('ZRANGE', files_key(tenant), 0, -1)) do
      count_file(sizes, id, cost_in(redis.call('GET', file_key(id))))
    end
  end
  return math.max(0, (redis.call('HGET', sizes, 'total') or 0) + (redis.call('HGET', held_key(tenant), 'total') or 0))
end

-- Free an idempotency key, if it is one and still leads to this job.
local function free_key(key, id)
  if not is_idem(key) then return end
  local known = redis.pcall('GET', key)
  if type(known) == 'string' and string.sub(known, 1, 36) == id then redis.call('DEL', key) end
end

-- The entries that a worker was given and that are not dropped yet, by job: lane and entry. Only what stands in no record
-- that can be read is looked for here.
local given = {}
local function given_to(worker)
  if given[worker] then return given[worker] end
  local found, model = {}, redis.call('HGET', worker_key(worker), 'model')
  given[worker] = found
  for _, lane in ipairs(model and lanes_of(model) or {}) do
    local from, pending = '-', {}
    repeat
      pending = redis.pcall('XPENDING', lane, GROUP, from, '+', 1000, worker) -- an error has no entries
      for _, item in ipairs(pending) do
        local entry = redis.call('XRANGE', lane, item[1], item[1])[1]
        if entry then found[entry[2][2]] = {lane, item[1]} end
        from = '(' .. item[1]
      end
    until #pending < 1000
  end
  return found
end

-- Fail a job whose record holds what no script can work with: nothing of it is trusted but its id, and each field that
-- can be read is used for what it is. `worker`, and its place if that is known, count for more than what its record
-- says of them. People may look at it; a request that comes again with its idempotency key is computed anew. Returns 0
-- if it had ended, or is not kept.
local function fail_malformed(id, reason, now, worker, lane, entry)
  local job = job_key(id)
  local s = redis.pcall('HMGET', job, 'state', 'lane', 'entry', 'worker', 'keep', 'events', 'tenant', 'reply', 'idem',
    'owed', 'runs', 'size')
  if s.err then
    redis.call('DEL', job) -- not a hash
    s = {'?'}
  end
  if worker then gather(released, worker, id) end
  if not s[1] or s[1] == 'completed' or s[1] == 'failed' or s[1] == 'cancelled' or s[1] == 'expired' then return 0 end
  lane, entry = lane or s[2], entry or s[3]
  if not pcall(checked_place, lane, entry) then
    local place = given_to(worker or s[4] or '')[id] or {}
    lane, entry = place[1], place[2]
  end
  redis.call('HSET', job, 'state', 'failed', 'reason', 'malformed', 'done', now)
  redis.call('HSETNX', job, 'body', '')
  drop_entry(lane, entry)
  local model, priority = place_of(lane or s[2])
  if model then owe(model, priority, s[10], -1) end
  keep_ended(s[7], s[12], keep_of(s[5]), now, 0)
  pcall(disown, id, s[11])
  free_key(s[9], id)
  if (s[4] or '') ~= '' then gather(released, s[4], id) end
  redis.call('ZREM', timers_key(), id)
  redis.call('EXPIRE', job, keep_of(s[5]))
  if s[6] and s[7] then emit(s[6], id, s[7], 'job.failed', true) end
  dead_letter('job', id, 'reason', 'unreadable: ' .. reason)
  publish(s[8], cmsgpack.pack({'e', id}))
  return 1
end

-- What an idempotency key leads to. It is free if its job is gone, or cannot be read: that one fails, and the request
-- is computed anew. `pin`: the request does not wait and is told the id, so that nobody's leaving may end the job.
-- Returns: nil | {'joined', id, state, accepted at, attempt, epoch} | {'reused'}
local STATES = {queued = true, in_progress = true, completed = true, failed = true, cancelled = true, expired = true}
local function job_of_key(key, tenant, digest, pin, epoch)
  local known = redis.pcall('GET', key)
  if type(known) ~= 'string' then return nil end
  local found = string.sub(known, 1, 36)
  local s = redis.pcall('HMGET', job_key(found), 'tenant', 'state', 'created', 'attempt')
  if not s.err and not s[1] then return nil end
  if not s.err and (s[1] ~= tenant or string.sub(known, 38) ~= digest) then return {'reused'} end
  local created, attempt = string.match(s[3] or '', '^%d+'), string.match(s[4] or '0', '^%d+$')
  if s.err or not STATES[s[2]] or not tonumber(s[3]) or not created or not attempt then
    fail_malformed(found, s.err or 'its state, its time or its attempt is none', now_ms())
    return nil
  end
  if pin then redis.call('HSET', job_key(found), 'pinned', 1) end
  return {'joined', found, s[2], tonumber(created), tonumber(attempt), epoch}
end

-- Why what a job's record holds makes a command or a computation fail; nil where the server refuses, whatever it holds:
-- by the code of its answer, or by these words. What is not known to be a refusal is the job's fault: it fails, people
-- look at it, and no other job waits for it.
local function fault_of(problem)
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

-- Do something to a job, which `worker` holds if one does. If its record cannot be worked with only that job fails.
-- Returns: what `step` does, or nil if the job has failed
local function or_malformed(id, worker, step)
  local ran, answer = pcall(step, id, worker)
  if ran then return answer end
  local why = fault_of(answer)
  if not why then error(answer, 0) end
  fail_malformed(id, why, now_ms(), worker)
  return nil
end

-- Whether a worker holds a job under a run, by the job's record. A job that has ended, or that another worker holds, is
-- not counted as this worker's any more. Raises if the record cannot be true: it has no state; it names a run that is
-- none, or a worker that knows nothing of it.
local function holds(id, worker, run, state, owner, number)
  if state == 'in_progress' and owner == worker and number == run then return true end
  if state and not STATES[state] then error('its state is none', 0) end
  if state == 'queued' then return false end
  if state == 'in_progress' then
    if owner == worker then
      if not string.find(whole_number(number) or '', '^[1-9]') then error('its run is none', 0) end
      return false
    end
    if redis.call('SISMEMBER', claims_key(worker), id) == 1
      and redis.call('SISMEMBER', claims_key(owner or ''), id) == 0 then
      error('its worker is none', 0)
    end
  end
  gather(released, worker, id)
  return false
end
