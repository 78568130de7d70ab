-- Scripts that accept a job, or find the one that an idempotency key has accepted.

#!lua name=put
-- Accepts a job: checks idempotency key, quotas, lane limit and reserved memory, then writes record and lane entry.
-- An idempotency key has no expiry until its job's end sets one: it lives as long as its job.
-- ARGV: id, body, tenant, model, priority, reply, max_queue_ms | '', deadline_ms | '', digest of tenant and idempotency
--       key | '', body digest, lane limit, '1' if it must not queue, retention in seconds, '1' if it is a batch's line
--       (not listed by itself), recipients of its events | '', metadata | '', bytes to reserve for what it may still
--       write, the most that may be reserved | '', what the job costs: units of its prompt, tokens of its output; the
--       weight of its tenant, its patience in ms, '1' if its record keeps the epoch in which it was accepted, the
--       letter of its endpoint, the conversation whose turn it is and the version that this must have | '', '', the
--       webhook that its request names | '', the first words of its prompt | '', the tenant's quotas: jobs | '', bytes of
--       their requests | '', bytes of their results | ''
-- Returns: {'queued', accepted at, its place ({}: not read), epoch} |
--          {'joined', id, state, accepted at, attempt, epoch} | {'reused'} | {'full', waiting, its tenant's} | {'busy'} |
--          {'crowded'}
--          (the reserved bytes would not fit into the store's memory) | {'quota', which of the three, the usage of it} |
--          {'changed'} (the conversation has another version, a turn, or is gone).
--          The epoch is for a request that does not wait, 0 for others. The place: {jobs before it of higher lanes,
--          requeued ones, of its tenant, of other tenants, units of work that its tenant got more than the one that got
--          least}.
local id, body, tenant, model, priority, reply = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local queue_ms, deadline_ms, idem, digest = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local limit, must_run, keep, part = tonumber(ARGV[11]), ARGV[12] == '1', ARGV[13], ARGV[14] == '1'
local events, metadata, reserved, max_reserved = ARGV[15], ARGV[16], tonumber(ARGV[17]), tonumber(ARGV[18])
local order = ARGV[19] .. ':' .. ARGV[20] .. ':' .. ARGV[21] .. ':' .. ARGV[22]
local dated, endpoint, conversation, version = ARGV[23] == '1', ARGV[24], ARGV[25], ARGV[26]
local webhook, preview = ARGV[27], ARGV[28]
local quotas = {jobs = tonumber(ARGV[29]), requests = tonumber(ARGV[30]), results = tonumber(ARGV[31])}
local exact = exact_ms()
local now = math.floor(exact)
local job, lane = job_key(id), lane_key(model, priority)

local epoch = 0
if reply == '' and not part then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end

-- A retry of the same put, after its reply was lost.
local created = redis.call('HGET', job, 'created')
if created then return {'queued', math.floor(parse_number(created) or now), {}, epoch} end

local key = idem ~= '' and idem_key(idem)
local found = key and find_by_idempotency_key(key, tenant, digest, reply == '', epoch)
if found then return found end

if conversation ~= '' then
  local known = redis.pcall('HMGET', conversation_key(conversation), 'tenant', 'version', 'turn')
  if known.err or known[1] ~= tenant or known[2] ~= version or known[3] ~= '' then return {'changed'} end
end

local size = #body + #metadata
local usage = next(quotas) and tenant_usage(tenant, tonumber(keep))
if usage then
  if quotas.jobs and usage.jobs + 1 > quotas.jobs then return {'quota', 'jobs', usage.jobs} end
  if quotas.requests and usage.requests + size > quotas.requests then return {'quota', 'requests', usage.requests} end
  if quotas.results and usage.results >= quotas.results then return {'quota', 'results', usage.results} end
end

local arrivals, line = arrivals_key(model, priority), tenant_line(model, priority, tenant)
local sizes = cache('line_sizes')
local waiting = sizes[arrivals] or redis.call('ZCARD', arrivals)
local own = waiting > 0 and (sizes[line] or redis.call('ZCARD', line)) or 0
-- The jobs of others may fill the lane: a tenant without any is let in beyond the limit, up to a tenth of it.
if waiting >= limit and (own > 0 or waiting >= limit + math.ceil(limit / 10)) then return {'full', waiting, own} end
local taker, takers = nil, nil
if must_run then
  taker, takers = find_taker(model, priority, tenant, waiting, own, now)
  if not taker then return {'busy'} end
end
if max_reserved then
  if total_reserved_bytes() + reserved > max_reserved then return {'crowded'} end
  round.reserved_total = round.reserved_total + reserved
end

local ends = usage_span_end(tonumber(keep), now)
local entry = redis.call('XADD', lane, '*', 'job', id)
if own == 0 then enter_tenant(model, priority, tenant, waiting == 0) end
local member = to_member(entry)
add_to_line(arrivals, line, member, id, now, now + ARGV[22])
if round.earlier and round.earlier.lane ~= lane then round.earlier = nil end
sizes[arrivals], sizes[line] = waiting + 1, own + 1
redis.call('HSET', job, 'state', 'queued', 'body', body, 'tenant', tenant, 'reply', reply, 'created', exact,
  'lane', lane, 'entry', entry, 'keep', keep, 'owed', reserved, 'size', part and '' or size .. ':' .. ends,
  'order', order, 'endpoint', endpoint, 'preview', preview)
if conversation ~= '' then
  begin_turn(conversation, id)
  redis.call('HSET', job, 'conversation', conversation)
end
add_reserved_bytes(model, priority, ARGV[17], 1)
if events ~= '' then
  redis.call('HSET', job, 'events', events)
  emit_event(events, id, tenant, 'job.accepted')
end
if metadata ~= '' then redis.call('HSET', job, 'metadata', metadata) end
if webhook ~= '' then redis.call('HSET', job, 'webhook', webhook) end
if dated then redis.call('HSET', job, 'born', redis.call('GET', epoch_key()) or 0) end
if not part then
  round.listing_keep_s = 2 * keep
  buffer_write('listings', tenant, now, id)
  buffer_write('usage', tenant, tostring(ends), size)
  if usage then usage.jobs, usage.requests = usage.jobs + 1, usage.requests + size end
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
if taker then
  redis.call('ZREM', takers, taker)
  notify_worker(taker, {'w'})
elseif not wake_worker(model, priority, now) and waiting == 0 and not has_consumer(model) then
  wake_scheduler(model)
end
if part then return {'queued', now, {}, epoch} end

-- Find the place of the job (streaming/jobs/places.py says how it is estimated). A job without a limit starts after all of
-- its tenant's.
local higher, requeued = count_earlier(model, priority)
local place, others = own, waiting - own
if own > 0 and expires then
  flush_writes()
  place = redis.call('ZRANK', line, member .. ':' .. id) or own
end
if others <= 0 then return {'queued', now, {higher, requeued, place, 0, 0}, epoch} end
local tenants = tenants_key(model, priority)
local least = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
local ahead = (redis.call('ZSCORE', tenants, tenant) or least[2]) - least[2]
others = math.min(others, (redis.call('ZCARD', tenants) - 1) * place + (redis.call('ZRANK', tenants, tenant) or 0))
return {'queued', now, {higher, requeued, place, others, math.floor(ahead / COUNTER_SCALE)}, epoch}

#!lua name=join flags=allow-oom
-- Finds the job of an idempotency key without accepting a new one, for a request that admission refuses: `put` would
-- refuse it before it looks. ARGV: tenant, digest of tenant and idempotency key, body digest, '1' if the request waits
-- Returns: {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (both as of `put`) | {'free'}
local tenant, idem, digest, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local epoch = 0
if not waits then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end
return find_by_idempotency_key(idem_key(idem), tenant, digest, not waits, epoch) or {'free'}
