-- Time, and writes that the calls of a batch gather. One EVALSHA runs a batch of calls, and each Redis command has a
-- fixed cost: so variables outside functions keep what an earlier call has read or is to write.

-- Time is Redis server time in milliseconds, never a client's clock; it does not advance while a script runs.
local CLOCK = nil

local function exact_ms()
  CLOCK = CLOCK or redis.call('TIME')
  return CLOCK[1] * 1000 + CLOCK[2] / 1000
end

local function now_ms()
  return math.floor(exact_ms())
end

local function is_past(when, now)
  return when and when ~= '' and tonumber(when) <= now
end

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

-- Buffered writes: the calls of a batch add to these tables, and flush_writes sends one command per key, after the last
-- call or when a list reaches 1,000 values. Stream entries to acknowledge by lane; jobs to remove from a worker's claims;
-- scores and ids for a tenant's job list; changes of reserved bytes by model and priority; changes of a tenant's usage;
-- scores and members of a lane's index by key; what tenants are charged, by the key of a lane's counters.
local buffered_acks, buffered_releases, buffered_listings, buffered_reservations, buffered_usage = {}, {}, {}, {}, {}
local buffered_members, buffered_charges = {}, {}
local listing_keep_s = 86400 -- `put` sets it to the time for which jobs are listed
local function flush_writes()
  for key, words in pairs(buffered_members) do redis.call('ZADD', key, unpack(words)) end
  for lane, entries in pairs(buffered_acks) do
    redis.call('XACK', lane, GROUP, unpack(entries))
    redis.call('XDEL', lane, unpack(entries))
  end
  for worker, ids in pairs(buffered_releases) do redis.call('SREM', claims_key(worker), unpack(ids)) end
  for tenant, words in pairs(buffered_listings) do
    redis.call('ZADD', jobs_key(tenant), unpack(words))
    if now_ms() % 8 == 0 then -- trimming in one of eight flushes is enough
      redis.call('ZREMRANGEBYSCORE', jobs_key(tenant), '-inf', now_ms() - 1000 * listing_keep_s)
    end
    redis.call('EXPIRE', jobs_key(tenant), listing_keep_s)
  end
  for place, amounts in pairs(buffered_reservations) do
    local sum = 0
    for _, bytes in ipairs(amounts) do sum = sum + bytes end
    redis.call('HINCRBY', owed_key(), place, sum)
  end
  for tenant, fields in pairs(buffered_usage) do
    local key, now, last, new = kept_key(tenant), math.floor(now_ms() / 1000), 0, false
    local added = {}
    for i = 1, #fields, 2 do added[fields[i]] = (added[fields[i]] or 0) + fields[i + 1] end
    for field, bytes in pairs(added) do
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
  for _, lane in pairs(buffered_charges) do
    for tenant, change in pairs(lane.changes) do charge_tenant(lane.model, lane.priority, tenant, change) end
  end
  buffered_acks, buffered_releases, buffered_listings, buffered_reservations, buffered_usage = {}, {}, {}, {}, {}
  buffered_members, buffered_charges = {}, {}
end

local function buffer_write(lists, key, word, second)
  local words = lists[key] or {}
  lists[key] = words
  words[#words + 1] = word
  words[#words + 1] = second
  if #words >= 1000 then flush_writes() end
end
