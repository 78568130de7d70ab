#!lua flags=allow-oom
-- Take the jobs of workers whose lease has lapsed, and end waiting jobs whose time is over. Any process may run this.
-- ARGV: most workers at once, most expired jobs at once, most attempts, seconds to keep a dead worker's log, lease in ms
-- Returns: {lapsed workers, jobs put back, jobs expired, jobs given up, workers spared, tick}
local most_workers, most_jobs, most_attempts, keep = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local lease = tonumber(ARGV[5])
local now = now_ms()
local requeued, expired, given_up, spared = 0, 0, 0, 0

local function give_up(id, reason)
  end_job(id, 'failed', reason, now)
  dead_letter('job', id, 'reason', reason)
  given_up = given_up + 1
end

local back = {}
local function take_from_dead(id, worker)
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'cancel', 'alone', 'run')
  if s[1] == 'queued' then
    requeue(id, now, false, worker) -- the claim that gave it broke off
    requeued = requeued + 1
    return
  end
  if not holds(id, worker, s[5], s[1], s[2], s[5]) then return end
  local losses = redis.call('HINCRBY', job_key(id), 'losses', 1)
  if s[3] then
    end_job(id, 'cancelled', 'cancelled', now)
  elseif s[4] == '1' then
    give_up(id, 'poison') -- it was alone with the worker that died
  elseif losses >= most_attempts then
    give_up(id, 'attempts_exhausted')
  else
    requeue(id, now, losses == most_attempts - 1, worker)
    back[#back + 1] = id
    requeued = requeued + 1
  end
end

-- No sweep for so long: the store was away, and nobody could renew a lease that was good before. Once, for each.
local before = tonumber(redis.call('SET', swept_key(), now, 'GET') or now)
if now - before > lease / 2 then
  local held = redis.call('ZRANGE', leases_key(), string.format('(%d', before), now + lease / 2, 'BYSCORE', 'WITHSCORES')
  for i = 1, #held, 2 do
    if tonumber(redis.call('HGET', worker_key(held[i]), 'spared')) ~= tonumber(held[i + 1]) then
      local till = now + lease - 0.5 -- no whole number: a lease renewed in this very millisecond is another one
      redis.call('HSET', worker_key(held[i]), 'spared', till)
      redis.call('ZADD', leases_key(), till, held[i])
      spared = spared + 1
    end
  end
end

-- No lease ends so late unless the clock was set back; a dead worker's would stand for as long as it was set back by.
for _, worker in ipairs(redis.call('ZRANGE', leases_key(), string.format('(%d', now + 2 * lease), '+inf', 'BYSCORE')) do
  redis.call('ZADD', leases_key(), now + lease, worker)
end

local lapsed = redis.call('ZRANGE', leases_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_workers)
for _, worker in ipairs(lapsed) do
  redis.call('HSET', worker_key(worker), 'state', 'dead') -- the fence: from here on it can write nothing
  redis.call('EXPIRE', worker_key(worker), 3600)
  back = {}
  for _, id in ipairs(redis.call('SMEMBERS', claims_key(worker))) do or_malformed(id, worker, take_from_dead) end
  redis.call('ZREM', leases_key(), worker) -- behind its jobs: where the server refuses one, the next sweep goes on
  redis.call('DEL', claims_key(worker))
  inherit(worker, back, keep)
  end_log(worker, keep)
  local model = redis.call('HGET', worker_key(worker), 'model')
  if model then
    redis.call('ZREM', idle_key(model), worker)
    if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
    do_gathered() -- a consumer is forgotten once its entries are dropped
    forget_consumer(model, worker)
  end
end

local function expire(id)
  local state = redis.call('HGET', job_key(id), 'state')
  if state and not STATES[state] then error('its state is none', 0) end
  if state == 'queued' then
    end_job(id, 'expired', 'deadline_exceeded_in_queue', now)
    expired = expired + 1
  else
    redis.call('ZREM', timers_key(), id)
  end
end
for _, id in ipairs(redis.call('ZRANGE', timers_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most_jobs)) do
  or_malformed(id, nil, expire)
end

-- What is owed follows from the jobs that are there. Where none is left it is nothing: a sum that is not has outlived jobs
-- that were lost, or deleted by hand.
do_gathered()
local owed = redis.call('HGETALL', owed_key())
for i = 1, #owed, 2 do
  local model, priority = string.match(owed[i], '^(.+):(%a+)$')
  local unfinished = 0
  for _, key in ipairs({lane_key, retry_key, suspects_key}) do
    unfinished = unfinished + (model and redis.call('XLEN', key(model, priority)) or 0)
  end
  if unfinished == 0 then redis.call('HDEL', owed_key(), owed[i]) end
end
return {#lapsed, requeued, expired, given_up, spared, redis.call('INCR', tick_key())}
