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
-- lane, jobs let go by worker, scores and jobs listed by tenant.
local dropped, let_go, listed = {}, {}, {}
local function do_gathered()
  for lane, entries in pairs(dropped) do
    redis.call('XACK', lane, GROUP, unpack(entries))
    redis.call('XDEL', lane, unpack(entries))
  end
  for worker, ids in pairs(let_go) do redis.call('SREM', claims_key(worker), unpack(ids)) end
  for tenant, words in pairs(listed) do redis.call('ZADD', jobs_key(tenant), unpack(words)) end
  dropped, let_go, listed = {}, {}, {}
end

local function gather(lists, key, word, second)
  local words = lists[key] or {}
  lists[key] = words
  words[#words + 1] = word
  words[#words + 1] = second
  if #words >= 1000 then do_gathered() end
end

-- Tell every process that holds a response of this job. `reply` is a list of addresses joined by commas.
local function tell(reply, message)
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
local function bury(...)
  redis.call('XADD', dead_key(), 'MAXLEN', '~', 10000, '*', ...)
end

local function drop_entry(lane, entry)
  if lane and entry and lane ~= '' then
    gather(dropped, lane, entry)
  end
end

-- An event, for those its record names: b the broker, w webhooks, which hear of ends alone. `what` is as in job.completed.
local function emit(for_whom, id, tenant, what, final)
  if string.find(for_whom, 'b', 1, true) then
    redis.call('XADD', outbox_key('broker'), '*', 'id', id, 'tenant', tenant, 'type', what)
  end
  if final and string.find(for_whom, 'w', 1, true) then
    redis.call('XADD', outbox_key('webhooks'), '*', 'id', id, 'tenant', tenant, 'type', what)
  end
end

-- End a job that no worker ends: cancelled in the queue, expired, given up.
local function end_job(id, state, reason, now)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'reply', 'worker', 'keep', 'events')
  redis.call('HSET', job, 'state', state, 'reason', reason, 'done', now)
  drop_entry(s[1], s[2])
  if s[4] then gather(let_go, s[4], id) end
  redis.call('ZREM', timers_key(), id)
  redis.call('EXPIRE', job, s[5] or 3600)
  if s[6] then emit(s[6], id, redis.call('HGET', job, 'tenant'), 'job.' .. state, true) end
  tell(s[3], cmsgpack.pack({'e', id}))
end

-- Put a claimed job back, before the lane it came from; a suspect where it will be run alone.
local function requeue(id, now, suspect)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'lane', 'entry', 'worker', 'deadline')
  drop_entry(s[1], s[2])
  if s[3] then gather(let_go, s[3], id) end
  local model, priority = string.match(s[1], '^' .. P .. '%a+:(.+):(%a+)$')
  local lane = suspect and suspects_key(model, priority) or retry_key(model, priority)
  local entry = redis.call('XADD', lane, '*', 'job', id)
  redis.call('HSET', job, 'state', 'queued', 'lane', lane, 'entry', entry, 'worker', '')
  if s[4] then redis.call('ZADD', timers_key(), s[4], id) end
  if not wake(model, now) then wake_scheduler(model) end
end

-- Keep a file's record until it expires.
local function keep_file(id, tenant, record, now, expires)
  redis.call('SET', file_key(id), record)
  redis.call('ZADD', files_key(tenant), now, id)
  redis.call('ZADD', expiring_key(), expires, id)
end
