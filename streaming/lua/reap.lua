#!lua flags=allow-oom
-- Take the jobs of workers whose lease has lapsed, and end waiting jobs whose time is over. Any process may run this.
-- ARGV: most workers at once, most expired jobs at once, most attempts, seconds to keep a dead worker's log
-- Returns: {lapsed workers, jobs put back, jobs expired, jobs given up}
local most_workers, most_jobs, most_attempts, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local now = now_ms()
local requeued, expired, given_up = 0, 0, 0

local function take_from_dead(id, worker)
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'cancel', 'attempt')
  if s[1] ~= 'in_progress' or s[2] ~= worker then return end
  if s[3] then
    end_job(id, 'cancelled', 'cancelled', now)
  elseif tonumber(s[4]) >= most_attempts then
    redis.call('XADD', dead_key(), '*', 'job', id, 'reason', 'lost ' .. s[4] .. ' workers')
    end_job(id, 'failed', 'attempts_exhausted', now)
    given_up = given_up + 1
  else
    requeue(id, now)
    requeued = requeued + 1
  end
end

local lapsed = redis.call('ZRANGE', leases_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_workers)
for _, worker in ipairs(lapsed) do
  redis.call('HSET', worker_key(worker), 'state', 'dead') -- the fence: from here on it can write nothing
  redis.call('EXPIRE', worker_key(worker), 3600)
  redis.call('ZREM', leases_key(), worker)
  local model = redis.call('HGET', worker_key(worker), 'model')
  if model then redis.call('ZREM', idle_key(model), worker) end
  for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do take_from_dead(id, worker) end
  redis.call('DEL', claims_key(worker))
  redis.call('EXPIRE', log_key(worker), keep)
  if model then
    for _, priority in ipairs(PRIORITIES) do
      for _, lane in ipairs({retry_key(model, priority), lane_key(model, priority)}) do
        local pending = redis.pcall('XPENDING', lane, GROUP, '-', '+', 1, worker)
        if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker) end
      end
    end
  end
end

for _, id in ipairs(redis.call('ZRANGE', timers_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_jobs)) do
  if redis.call('HGET', job_key(id), 'state') == 'queued' then
    end_job(id, 'expired', 'deadline_exceeded_in_queue', now)
    expired = expired + 1
  else
    redis.call('ZREM', timers_key(), id)
  end
end
return {#lapsed, requeued, expired, given_up}
