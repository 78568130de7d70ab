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

-- Wake the worker of this model that most recently reported room: for the highest lane also one that would make room by
-- preemption; else one that would prefetch it. Entries older than 2 s may be of dead workers. Returns whether one was found.
local YIELDING_EXPIRY_S = 10
local exhausted = {}
local function wake_freshest(key, now)
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

local function wake_worker(model, priority, now)
  return wake_freshest(idle_key(model), now) or priority == PRIORITIES[1] and wake_freshest(yielding_key(model), now)
    or wake_freshest(prefetching_key(model), now)
end

-- Wake the scheduler before its next tick: a job waits and no worker is idle.
local function wake_scheduler(model)
  redis.call('PUBLISH', CHANNEL .. 'scheduler:wake', model)
end
