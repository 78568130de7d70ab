-- Scripts that accept a job, or find the one that an idempotency key has accepted.

#!lua name=put roles=api,offline promise
-- Accepts a job: checks idempotency key, quotas, lane limit and reserved memory, then writes record and lane entry.
-- An idempotency key has no expiry until its job's end sets one: it lives as long as its job.
-- ARGV: what Queue.put (streaming/jobs/queue.py) names, as a MessagePack map: times in ms, `may_write` and `max_reserved` in
--       bytes, `order` as the job's record has it, `quotas` what is left of the tenant's, `share` the most bytes that it may
--       use and reserve (none: any), `limits` name and limits of each account that it counts in, with `tokens` and their
--       `prices` (of one of the prompts, and of one of the answer), `media` (keep: also after it has completed); the job's body;
--       its metadata | ''; its media...
-- Returns: {'queued', accepted at, epoch, its place (none: not read)..., what is left of its rates (rates_left)...} |
--          {'joined', id, state, accepted at, attempt, epoch} | {'reused'} | {'full', waiting, its tenant's} | {'busy'} |
--          {'crowded'} (the reserved bytes would not fit into the store's memory) |
--          {'quota', 'jobs' | 'requests' | 'results', the usage of it} |
--          {'quota', 'share', bytes that its unfinished jobs have reserved} |
--          {'limit', account, name of its limit, the limit, what is used of it, ms until it may hold (0: not known, -1: never), what is
--          left of its rates...} |
--          {'changed'} (the conversation has another version, a turn, or is gone).
--          The epoch is for a request that does not wait, 0 for others. The place: jobs before it of higher lanes,
--          requeued ones, of its tenant, of other tenants, units of work that its tenant got more than the one that got
--          least.
local given, body, metadata = cmsgpack.unpack(ARGV[1]), ARGV[2], ARGV[3]
local id, tenant, model, priority, reply = given.id, given.tenant, given.model, given.priority, given.reply or ''
local keep, part, conversation, digest = given.retention_s, given.part, given.conversation, given.digest or ''
local quotas, may_write = given.quotas, given.may_write
local exact = exact_ms()
local now = math.floor(exact)
local job, lane = job_key(id), lane_key(model, priority)

local epoch = 0
if reply == '' and not part then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end

-- A retry of the same put, after its reply was lost. If the server refused one of its last writes, the job waits nowhere.
local created = redis.call('HGET', job, 'created')
if created then
  flush_writes()
  local known = redis.call('HMGET', job, 'state', 'queue', 'entry', 'not_before')
  local waits = known[1] == 'queued' and not known[2] and is_entry(known[3])
  if waits and known[3] == HELD then
    schedule(id, tenant, parse_number(known[4]) or now)
    waits = false
  end
  local own = waits and to_member(known[3])
  if waits and not (redis.call('ZSCORE', arrivals_key(model, priority), own)
    and redis.call('ZSCORE', tenant_line(model, priority, tenant), own .. ':' .. id)) then
    rejoin_line(model, priority, tenant, known[3], id, created, given.order)
  end
  return {'queued', math.floor(parse_number(created) or now), epoch}
end

local key = given.key and idem_key(given.key)
local found = key and find_by_idempotency_key(key, tenant, digest, reply == '', epoch)
if found then return found end

if conversation then
  local known = redis.pcall('HMGET', conversation_key(conversation), 'tenant', 'version', 'turn')
  if known.err or known[1] ~= tenant or known[2] ~= tostring(given.version) or known[3] ~= '' then return {'changed'} end
end

local size = #body + #metadata
for i = 4, #ARGV do size = size + #ARGV[i] end
local usage = (quotas or given.share) and tenant_usage(tenant, keep)
if quotas then
  if quotas.jobs and usage.jobs + 1 > quotas.jobs then return {'quota', 'jobs', usage.jobs} end
  if quotas.requests and usage.requests + size > quotas.requests then return {'quota', 'requests', usage.requests} end
  if quotas.results and usage.results >= quotas.results then return {'quota', 'results', usage.results} end
end

if given.share then
  local used, reserved = shared_bytes(tenant, keep)
  if used + size + may_write > given.share then return {'quota', 'share', reserved} end
end

local arrivals, line = arrivals_key(model, priority), tenant_line(model, priority, tenant)
-- A job whose time has not come has no place in its lane. As many as in a full lane may wait for their time, a month perhaps:
-- no tenant may have more of them than places are left.
local start = given.not_before or now + (given.delay_ms or 0)
local held = start > now
if held then arrivals, line = scheduled_key(), scheduled_of_key(tenant) else start = now end
local sizes = cache('line_sizes')
local waiting = sizes[arrivals] or redis.call('ZCARD', arrivals)
local own = waiting > 0 and (sizes[line] or redis.call('ZCARD', line)) or 0
-- The jobs of others may fill the lane: a tenant without any is let in beyond the limit, up to a tenth of it.
local limit = given.lane_limit
if (held and own or 0) >= limit - waiting and (own > 0 or waiting >= limit + math.ceil(limit / 10)) then return {'full', waiting, own} end
local taker, takers = nil, nil
if given.must_run then
  taker, takers = find_taker(lane, model, priority, tenant, waiting, own, now)
  if not taker then return {'busy'} end
end
local accounts, refusal, want = nil, nil, nil
if given.limits then
  local input, output = unpack(given.prices)
  want = {
    tokens = given.prompt + given.output, cost = given.prompt * input + given.output * output, input = input, output = output,
    waits = reply ~= '' and 1 or 0, part = part, guessed = given.guessed
  }
  accounts, refusal = open_accounts(given.limits, want)
  if refusal then return refusal end
end
if given.max_reserved then
  if total_reserved_bytes() + may_write > given.max_reserved then return {'crowded'} end
  round.reserved_total = round.reserved_total + may_write
end

local more = part and {} or {'preview', given.preview or ''}
for _, field in ipairs({'caller', 'adapter', 'conversation', 'events', 'webhook', 'media'}) do
  if given[field] then more[#more + 1], more[#more + 2] = field, given[field] end
end
-- Of a job for later by days, so that a tenant has few spans: its end moves the bytes to the one that is right by then.
local ends = held and tostring(86400 * math.ceil((start / 1000 + keep) / 86400)) or usage_span_end(keep)
for i = 4, #ARGV do redis.call('HSET', media_key(id), i - 4, ARGV[i]) end
if own == 0 and not held then enter_tenant(model, priority, tenant, waiting == 0) end
local entry = held and HELD or redis.call('XADD', lane, '*', 'job', id)
local member = to_member(entry)
if round.earlier and round.earlier.lane ~= lane then round.earlier = nil end
sizes[arrivals], sizes[line] = waiting + 1, own + 1
redis.call('HSET', job, 'state', 'queued', 'body', body, 'tenant', tenant, 'reply', reply, 'created', exact,
  'lane', lane, 'entry', entry, 'keep', keep, 'owed', may_write, 'size', part and '' or size .. ':' .. ends,
  'order', given.order, 'endpoint', given.endpoint, unpack(more))
if held then
  redis.call('HSET', job, 'not_before', start)
  schedule(id, tenant, start)
else
  add_to_line(arrivals, line, member, id, now, now + given.patience_ms)
end
if conversation then begin_turn(conversation, id) end
buffer_sum('reservations', model, held and 'held' or priority, may_write)
if given.share then
  redis.call('HSET', job, 'shared', 1)
  buffer_sum('tenant_owed', tenant_owed_key(), tenant, may_write)
  usage.reserved = usage.reserved + may_write
end
if given.events then emit_event(given.events, id, tenant, 'job.accepted') end
if accounts then redis.call('HSET', job, 'hold', reserve_limits(id, accounts, want)) end
if metadata ~= '' then redis.call('HSET', job, 'metadata', metadata) end
if given.dated then redis.call('HSET', job, 'born', redis.call('GET', epoch_key()) or 0) end
if not part then
  round.listing_keep_s = 2 * keep
  if not held then buffer_write('listings', tenant, now, id) end
  buffer_sum('usage', tenant, ends, size)
  if usage then usage.jobs, usage.requests = usage.jobs + 1, usage.requests + size end
end
local expires = (given.deadline_ms or given.max_queue_ms)
  and start + math.min(given.deadline_ms or math.huge, given.max_queue_ms or math.huge)
if given.deadline_ms then redis.call('HSET', job, 'deadline', start + given.deadline_ms) end
if given.max_queue_ms then redis.call('HSET', job, 'queue_deadline', start + given.max_queue_ms) end
if expires and not held then redis.call('ZADD', timers_key(), expires, id) end
if key then
  redis.call('SET', key, id .. ':' .. digest)
  redis.call('HSET', job, 'idem', key, 'pinned', reply == '' and 1 or '')
end
if taker then
  redis.call('ZREM', takers, taker)
  notify_worker(taker, {'w'})
elseif not held and not wake_worker(model, priority, now) and waiting == 0 and not is_running(model) then
  wake_scheduler(model)
end
if part then return {'queued', now, epoch} end

-- Find the place of the job (streaming/jobs/waiting.py says how it is estimated). A job without a limit starts after all of
-- its tenant's.
local higher, requeued, place, others = 0, 0, 0, 0
if not held then
  higher, requeued = count_earlier(lane, model, priority)
  place, others = own, waiting - own
end
if place > 0 and expires then
  flush_writes()
  place = redis.call('ZRANK', line, member .. ':' .. id) or own
end
local answer = {'queued', now, epoch, higher, requeued, place, 0, 0}
for _, number in ipairs(accounts and rates_left(accounts) or NONE) do answer[#answer + 1] = number end
if others <= 0 then return answer end
local tenants = tenants_key(model, priority)
local least = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
local ahead = (redis.call('ZSCORE', tenants, tenant) or least[2]) - least[2]
others = math.min(others, (redis.call('ZCARD', tenants) - 1) * place + (redis.call('ZRANK', tenants, tenant) or 0))
answer[7], answer[8] = others, math.floor(ahead / COUNTER_SCALE)
return answer

#!lua name=join flags=allow-oom roles=api promise
-- Finds the job of an idempotency key without accepting a new one, for a request that admission refuses: `put` would
-- refuse it before it looks. ARGV: tenant, digest of tenant and idempotency key, body digest, '1' if the request waits
-- Returns: {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (both as of `put`) | {'free'}
local tenant, idem, digest, waits = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local epoch = 0
if not waits then epoch = (redis.call('GET', epoch_key()) or 0) + 1 end
return find_by_idempotency_key(idem_key(idem), tenant, digest, not waits, epoch) or {'free'}
