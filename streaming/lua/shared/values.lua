-- Time, values of records, amounts that tenants and lanes hold: what every other function stands on.

-- A round: the calls of a script that one FCALL runs. Each Redis command has a fixed cost, so a round keeps what an earlier
-- call has read or is to write, and every round begins with a new table (streaming/redis/scripts.py). All other variables
-- outside functions are constants: the server keeps them over all rounds.
--
-- What was read: `now`; `span_ends` by retention time; `lanes` by key; `live_workers`; `exhausted` lists of idle workers;
-- `busy`, by model the last priority for which wake_worker found no worker, so that it need not look again; `line_sizes`,
-- waiting jobs by key of an index; `earlier`, what goes before a lane's new jobs; `reserved_total`; `usage_by_tenant`.
local round = nil

local function cache(name)
  local found = round[name]
  if not found then
    found = {}
    round[name] = found
  end
  return found
end

-- Time is Redis server time in milliseconds, never a client's clock; it does not advance while a script runs.
local function exact_ms()
  if not round.now then
    local clock = redis.call('TIME')
    round.now = clock[1] * 1000 + clock[2] / 1000
  end
  return round.now
end

local function now_ms()
  return math.floor(exact_ms())
end

local function is_past(when, now)
  return when and when ~= '' and tonumber(when) <= now
end

-- Values of records and keys: parsed, and checked before anything is written.

-- Parse a number of a record, nil if it is malformed: integer_text returns a non-negative integer as its text,
-- parse_number any number from 0 to 1e18 (never inf or nan).
local function integer_text(text)
  return text and #text < 16 and string.match(text, '^%d+$') or nil
end

local function parse_number(text)
  local number = tonumber(text or nil)
  return number and number >= 0 and number < 1e18 and number or nil
end

-- Parse the key of a lane, or of a queue of jobs that were put back to it. Returns its model, priority and kind, or nil.
local function parse_lane(lane)
  local known = round.lanes and round.lanes[lane]
  if known then return known.model, known.priority, known.kind end
  if string.sub(lane or '', 1, #P) ~= P then return nil end
  local kind, model, priority = string.match(lane, '^(%a+):(.+):(%a+)$', #P + 1)
  if kind ~= 'lane' and kind ~= 'retry' and kind ~= 'suspects' then return nil end
  for _, each in ipairs(PRIORITIES) do
    if priority == each then
      cache('lanes')[lane] = {model = model, priority = priority, kind = kind}
      return model, priority, kind
    end
  end
end

local function is_entry(entry)
  local ms, number = string.match(entry or '', '^(%d+)%-(%d+)$')
  return ms and #ms < 20 and #number < 20
end

-- Check the lane and the entry of a job's record, before anything is written. Returns as parse_lane; raises if invalid.
local function require_lane_entry(lane, entry)
  local model, priority, kind = parse_lane(lane)
  if not model then error('invalid lane', 0) end
  if not is_entry(entry) then error('invalid entry', 0) end
  return model, priority, kind
end

-- The time (s) for which the record of an ended job is kept; an hour if the record's own is malformed.
local function retention_s(keep)
  return integer_text(keep) or 3600
end

-- Whether a field of a record is an idempotency key, which expires with its job. Any other key must not be touched.
local function is_idem_key(key)
  local start = key and idem_key('')
  return key and string.sub(key, 1, #start) == start
end

-- The states of a job.
local STATES = {queued = true, in_progress = true, completed = true, failed = true, cancelled = true, expired = true}

-- Note virtual counters of tenants without waiting jobs, and an empty lane's virtual time under the empty name; they are
-- forgotten an hour after the last one. Counters that the virtual time has passed count no more: one of eight calls
-- removes them. ...: counter, tenant...
local SERVED_RETENTION_S = 3600

local function note_served(model, priority, time, ...)
  local served = served_key(model, priority)
  redis.call('ZADD', served, ...)
  if now_ms() % 8 == 0 then redis.call('ZREMRANGEBYSCORE', served, '-inf', string.format('(%.0f', time)) end
  redis.call('EXPIRE', served, SERVED_RETENTION_S)
end

-- Add to the counter of a tenant, whether or not it has waiting jobs.
local function charge_tenant(model, priority, tenant, change)
  if redis.call('ZADD', tenants_key(model, priority), 'XX', 'INCR', change, tenant) then return end
  local least = redis.call('ZRANGE', tenants_key(model, priority), 0, 0, 'WITHSCORES')
  local known = redis.call('ZMSCORE', served_key(model, priority), '', tenant)
  if not (least[1] or known[1] or known[2]) then return end
  local time = tonumber(least[2] or known[1] or 0)
  note_served(model, priority, time, math.max(tonumber(known[2] or 0), time) + change, tenant)
end

-- Buffered writes: the calls of a round add to its lists and sums, and flush_writes sends one command per key or sum, after
-- the last call or when a list reaches 1,000 values. Lists: `entries`, of ended jobs by lane; `releases`, jobs to remove
-- from a worker's claims; `listings`, scores and ids for a tenant's job list, kept for `listing_keep_s`; `members`, scores and
-- members of a lane's index by key. Sums: `reservations`, changes of reserved bytes by model and priority, and `tenant_owed`, by
-- tenant; `usage`, changes of a tenant's usage; `charges`, what tenants are charged, by lane; `used`, counts of
-- a day's usage, by key.
local NONE = {}
local BUFFERED = {'members', 'entries', 'releases', 'listings', 'reservations', 'tenant_owed', 'usage', 'charges', 'used'}

-- For so long (s) a day's usage is kept; docs/api.md says so.
local USAGE_RETENTION_S = 100 * 86400
-- So many pairs of key and model are counted a day of a tenant; further ones together, as key (others).
local MAX_USED = 1000

local function flush_writes()
  if not round.buffered then return end
  for key, words in pairs(round.members or NONE) do redis.call('ZADD', key, unpack(words)) end
  for lane, entries in pairs(round.entries or NONE) do redis.call('XDEL', lane, unpack(entries)) end
  for worker, ids in pairs(round.releases or NONE) do redis.call('SREM', claims_key(worker), unpack(ids)) end
  for tenant, words in pairs(round.listings or NONE) do
    redis.call('ZADD', jobs_key(tenant), unpack(words))
    if now_ms() % 8 == 0 then -- trimming in one of eight flushes is enough
      redis.call('ZREMRANGEBYSCORE', jobs_key(tenant), '-inf', now_ms() - 1000 * round.listing_keep_s)
    end
    redis.call('EXPIRE', jobs_key(tenant), round.listing_keep_s)
  end
  for model, sums in pairs(round.reservations or NONE) do
    for priority, bytes in pairs(sums) do redis.call('HINCRBY', owed_key(), model .. ':' .. priority, bytes) end
  end
  for key, sums in pairs(round.tenant_owed or NONE) do
    for tenant, bytes in pairs(sums) do
      if redis.call('HINCRBY', key, tenant, bytes) <= 0 then redis.call('HDEL', key, tenant) end
    end
  end
  for tenant, sums in pairs(round.usage or NONE) do
    local key, now, last, new = kept_key(tenant), math.floor(now_ms() / 1000), 0, false
    for field, bytes in pairs(sums) do
      local sum = redis.call('HINCRBY', key, field, bytes)
      if sum == bytes then new = true end
      if sum <= 0 then redis.call('HDEL', key, field) end
      last = math.max(last, tonumber(string.match(field, '%d+')))
    end
    if new then -- once per new span: delete the counts of spans that are over
      for _, field in ipairs(redis.call('HKEYS', key)) do
        if tonumber(string.match(field, '%d+') or 0) <= now then redis.call('HDEL', key, field) end
      end
      if last - now > redis.call('TTL', key) then redis.call('EXPIRE', key, last - now) end
    end
  end
  for lane, sums in pairs(round.charges or NONE) do
    local model, priority = parse_lane(lane)
    for tenant, change in pairs(sums) do charge_tenant(model, priority, tenant, change) end
  end
  for key, sums in pairs(round.used or NONE) do -- pcall: a count that cannot be added keeps no job from its end
    local counts = {'INCRBY', 'i64', '#0', sums[1], 'INCRBY', 'i64', '#1', sums[2], 'INCRBY', 'i64', '#2', sums[3]}
    for i, word in ipairs(tonumber(sums[4]) > 0 and {'INCRBY', 'i64', '#3', sums[4]} or NONE) do counts[12 + i] = word end
    local found = redis.pcall('BITFIELD', key, unpack(counts))
    if found[1] == sums[1] then -- once a day
      local day, tenant, who = string.match(key, ':(%d+):([^:]*):(.*)$', #P)
      if redis.call('SCARD', usage_names_key(day, tenant)) >= MAX_USED then -- a token's issuer names any number of callers
        redis.call('DEL', key)
        who = string.match(who, '^%S*') .. ' (others)'
        key = usage_key(day, tenant, who)
        redis.call('BITFIELD', key, unpack(counts))
      end
      redis.call('SADD', usage_names_key(day, tenant), who)
      redis.call('SADD', usage_tenants_key(day), tenant)
      for _, each in ipairs({key, usage_names_key(day, tenant), usage_tenants_key(day)}) do redis.call('EXPIRE', each, USAGE_RETENTION_S) end
    end
  end
  for _, kind in ipairs(BUFFERED) do round[kind] = nil end
  round.buffered = false
end

-- The list (buffer_write) or the sums by name (buffer_sum) of a key, which flush_writes empties.
local function buffer_of(kind, key)
  local own = round[kind] and round[kind][key]
  if not own then
    own = {}
    cache(kind)[key], round.buffered = own, true
  end
  return own
end

local function buffer_write(kind, key, word, second)
  local words = buffer_of(kind, key)
  local size = #words
  words[size + 1] = word
  if second then words[size + 2] = second end
  if size >= 998 then flush_writes() end -- at most two values come per call: never more than 1,000
end

local function buffer_sum(kind, key, name, change)
  local sums = buffer_of(kind, key)
  sums[name] = (sums[name] or 0) + change
end

-- What tenants and lanes hold in the store: bytes that are reserved, and bytes that count against a tenant's quotas.

-- The bytes reserved for all unfinished jobs, cached: a call that reserves more adds them to round.reserved_total.
local function total_reserved_bytes()
  local total = round.reserved_total
  if not total then
    total = 0
    for _, bytes in ipairs(redis.call('HVALS', owed_key())) do total = total + math.max(0, bytes) end
    round.reserved_total = total
  end
  return total
end

-- The end (s) of the time span in which a tenant's bytes are counted until their record has expired, as text: it is the
-- field's name. A span is 1/24 of the retention time. Counts lapse with their span, so none outlives its job.
local function usage_span_end(keep)
  local ends = cache('span_ends')
  if not ends[keep] then
    local span = math.ceil(keep / 24)
    ends[keep] = tostring((math.floor((now_ms() / 1000 + keep) / span) + 1) * span)
  end
  return ends[keep]
end

-- Move an ended job's request bytes to the span in which its record expires, and add its result bytes. `size` is what
-- `put` noted: 'request bytes:span end', or '' for a batch line, which is not counted.
local function count_ended_job(tenant, size, keep, result)
  local bytes, was = string.match(size or '', '^(%d+):(%d+)$')
  if not bytes or #bytes > 15 or #was > 15 or not tenant then return end
  local ends = usage_span_end(keep)
  if was ~= ends then
    if tonumber(was) > now_ms() / 1000 then buffer_sum('usage', tenant, was, -bytes) end
    buffer_sum('usage', tenant, ends, bytes)
  end
  if result > 0 then buffer_sum('usage', tenant, 'r' .. ends, result) end
end

-- A tenant's usage, {jobs, requests (bytes), results (bytes)}, cached: a call that adds to it updates the cache.
local function tenant_usage(tenant, keep)
  local sums = cache('usage_by_tenant')[tenant]
  if sums then return sums end
  flush_writes()
  local now = now_ms()
  local jobs = redis.call('ZCOUNT', jobs_key(tenant), now - 1000 * keep, '+inf') + redis.call('ZCARD', scheduled_of_key(tenant))
  sums = {jobs = jobs, requests = 0, results = 0}
  local fields = redis.call('HGETALL', kept_key(tenant))
  for i = 1, #fields, 2 do
    local kind, ends = string.match(fields[i], '^(r?)(%d+)$')
    if ends and tonumber(ends) > now / 1000 then
      local what = kind == 'r' and 'results' or 'requests'
      sums[what] = sums[what] + fields[i + 1]
    end
  end
  round.usage_by_tenant[tenant] = sums
  return sums
end

-- What a tenant takes of its share of the store, and what of it its unfinished jobs have only reserved; in bytes.
local function shared_bytes(tenant, keep)
  local usage = tenant_usage(tenant, keep)
  usage.reserved = usage.reserved or tonumber(redis.call('HGET', tenant_owed_key(), tenant) or 0)
  return usage.jobs * JOB_BYTES + usage.requests + usage.results + usage.reserved, usage.reserved
end
