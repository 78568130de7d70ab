-- Accept a job: idempotency, room in the lane, record and lane entry in one step.
-- ARGV: id, body, tenant, model, priority, reply, max_queue_ms | '', deadline_ms | '', idempotency key | '', body digest,
--       lane limit, '1' if it must not queue, retention in seconds, '1' if it is part of something listed by itself,
--       whom its events are for | ''
-- Returns: {'queued', now, waiting before it} | {'joined', id} | {'reused'} | {'full', waiting} | {'busy'}
local id, body, tenant, model, priority, reply = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local queue_ms, deadline_ms, idem, digest = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local limit, must_run, keep, part = tonumber(ARGV[11]), ARGV[12] == '1', ARGV[13], ARGV[14] == '1'
local events = ARGV[15]
local exact = exact_ms()
local now = math.floor(exact)
local job, lane = job_key(id), lane_key(model, priority)

-- The same put again, after its reply was lost.
if redis.call('EXISTS', job) == 1 then return {'queued', now, 0} end

if idem ~= '' then
  local known = redis.call('GET', idem_key(tenant, idem))
  if known then
    if string.sub(known, 38) ~= digest then return {'reused'} end
    return {'joined', string.sub(known, 1, 36)}
  end
end

local waiting = waiting_in(lane)
if waiting >= limit then return {'full', waiting} end
if must_run then
  local freshest = redis.call('ZRANGE', idle_key(model), -1, -1, 'WITHSCORES')
  if waiting > 0 or #freshest == 0 or tonumber(freshest[2]) < now - 2000 then return {'busy'} end
end

local entry = redis.call('XADD', lane, '*', 'job', id)
waits[lane] = waiting + 1
redis.call('HSET', job, 'state', 'queued', 'body', body, 'tenant', tenant, 'reply', reply, 'created', exact,
  'lane', lane, 'entry', entry, 'keep', keep)
if events ~= '' then
  redis.call('HSET', job, 'events', events)
  emit(events, id, tenant, 'job.accepted')
end
if not part then gather(listed, tenant, now, id) end
local expires = nil
if deadline_ms ~= '' then
  redis.call('HSET', job, 'deadline', now + deadline_ms)
  expires = now + deadline_ms
end
if queue_ms ~= '' then
  redis.call('HSET', job, 'queue_deadline', now + queue_ms)
  expires = math.min(expires or math.huge, now + queue_ms)
end
if expires then redis.call('ZADD', timers_key(), expires, id) end
if idem ~= '' then redis.call('SET', idem_key(tenant, idem), id .. ':' .. digest, 'EX', keep) end
if not wake(model, now) and waiting == 0 and not is_read(lane) then wake_scheduler(model) end
return {'queued', now, waiting}
