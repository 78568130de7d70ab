-- Accept a job: idempotency, room in the lane, record and lane entry in one step.
-- An idempotency key lives as long as its job: it has no expiry until its job's end sets one.
-- ARGV: id, body, tenant, model, priority, reply, max_queue_ms | '', deadline_ms | '', digest of tenant and idempotency
--       key | '', body digest, lane limit, '1' if it must not queue, retention in seconds, '1' if it is part of
--       something listed by itself, whom its events are for | '', its metadata | '', bytes it may still write, the most
--       that all jobs here may still write | '', the most that the tenant may keep here: jobs | '', bytes of their
--       requests | '', bytes of their results | ''
-- Returns: {'queued', accepted at, waiting before it, epoch} | {'joined', id, state, accepted at, attempt, epoch} |
--          {'reused'} | {'full', waiting} | {'busy'} | {'crowded'} (what all of them may still write would not fit into
--          the store's memory) | {'quota', which of the three, what is kept of it}. The epoch is for a request that
--          does not wait, 0 for others.
local id, body, tenant, model, priority, reply = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local queue_ms, deadline_ms, idem, digest = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local limit, must_run, keep, part = tonumber(ARGV[11]), ARGV[12] == '1', ARGV[13], ARGV[14] == '1'
local events, metadata, owed, most_owed = ARGV[15], ARGV[16], tonumber(ARGV[17]), tonumber(ARGV[18])
local quotas = {jobs = tonumber(ARGV[19]), requests = tonumber(ARGV[20]), results = tonumber(ARGV[21])}
local exact = exact_ms()
local now = math.floor(exact)
local job, lane = job_key(id), lane_key(model, priority)

local epoch = 0
if reply == '' and not part then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end

-- The same put again, after its reply was lost.
if redis.call('EXISTS', job) == 1 then return {'queued', now, 0, epoch} end

local key = idem ~= '' and idem_key(idem)
local found = key and job_of_key(key, tenant, digest, reply == '', epoch)
if found then return found end

local size = #body + #metadata
local kept = next(quotas) and kept_by(tenant, tonumber(keep))
if kept then
  if quotas.jobs and kept.jobs + 1 > quotas.jobs then return {'quota', 'jobs', kept.jobs} end
  if quotas.requests and kept.requests + size > quotas.requests then return {'quota', 'requests', kept.requests} end
  if quotas.results and kept.results >= quotas.results then return {'quota', 'results', kept.results} end
end

local waiting = waiting_in(lane)
if waiting >= limit then return {'full', waiting} end
if must_run then
  local freshest = redis.call('ZRANGE', idle_key(model), -1, -1, 'WITHSCORES')
  if waiting > 0 or #freshest == 0 or tonumber(freshest[2]) < now - 2000 then return {'busy'} end
end
if most_owed then
  if owed_now() + owed > most_owed then return {'crowded'} end
  owed_sum = owed_sum + owed
end

local ends = span_end(tonumber(keep), now)
local entry = redis.call('XADD', lane, '*', 'job', id)
waits[lane] = waiting + 1
redis.call('HSET', job, 'state', 'queued', 'body', body, 'tenant', tenant, 'reply', reply, 'created', exact,
  'lane', lane, 'entry', entry, 'keep', keep, 'owed', owed, 'size', part and '' or size .. ':' .. ends)
owe(model, priority, ARGV[17], 1)
if events ~= '' then
  redis.call('HSET', job, 'events', events)
  emit(events, id, tenant, 'job.accepted')
end
if metadata ~= '' then redis.call('HSET', job, 'metadata', metadata) end
if not part then
  listed_s = 2 * keep
  gather(listed, tenant, now, id)
  gather(keeping, tenant, tostring(ends), size)
  if kept then kept.jobs, kept.requests = kept.jobs + 1, kept.requests + size end
end
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
if key then
  redis.call('SET', key, id .. ':' .. digest)
  redis.call('HSET', job, 'idem', key, 'pinned', reply == '' and 1 or '')
end
if not wake(model, now) and waiting == 0 and not is_read(lane) then wake_scheduler(model) end
return {'queued', now, waiting, epoch}
