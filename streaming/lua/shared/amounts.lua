-- What tenants and lanes hold in the store: bytes that are reserved, and bytes that count against a tenant's quotas.

-- Add (sign 1) or subtract (-1) the bytes reserved for an accepted job, summed by model and priority, which the names of
-- its lane, retry and suspects streams share. Malformed bytes are ignored: `reap` deletes a lane's sum with its last job.
local function add_reserved_bytes(model, priority, bytes, sign)
  if integer_text(bytes) then buffer_write(buffered_reservations, model .. ':' .. priority, sign * bytes) end
end

-- The bytes reserved for all unfinished jobs, cached: a call that reserves more adds them to reserved_total.
local reserved_total = nil

local function total_reserved_bytes()
  if not reserved_total then
    reserved_total = 0
    for _, bytes in ipairs(redis.call('HVALS', owed_key())) do reserved_total = reserved_total + math.max(0, bytes) end
  end
  return reserved_total
end

-- The end (s) of the time span in which a tenant's bytes are counted until their record has expired. A span is 1/24 of
-- the retention time. Counts lapse with their span and need no decrement, so none outlives its job, whatever crashes.
local function usage_span_end(keep, now)
  local span = math.ceil(keep / 24)
  return (math.floor((now / 1000 + keep) / span) + 1) * span
end

-- Move an ended job's request bytes to the span in which its record expires, and add its result bytes. `size` is what
-- `put` noted: 'request bytes:span end', or '' for a batch line, which is not counted.
local function count_ended_job(tenant, size, keep, now, result)
  local bytes, was = string.match(size or '', '^(%d+):(%d+)$')
  if not integer_text(bytes) or not integer_text(was) or not tenant then return end
  local ends = usage_span_end(tonumber(keep) or 3600, now)
  if tonumber(was) ~= ends then
    if tonumber(was) > now / 1000 then buffer_write(buffered_usage, tenant, was, -bytes) end
    buffer_write(buffered_usage, tenant, tostring(ends), tonumber(bytes))
  end
  if result > 0 then buffer_write(buffered_usage, tenant, 'r' .. ends, result) end
end

-- A tenant's usage, {jobs, requests (bytes), results (bytes)}, cached: a call that adds to it updates the cache.
local usage_by_tenant = {}

local function tenant_usage(tenant, keep)
  local sums = usage_by_tenant[tenant]
  if sums then return sums end
  flush_writes()
  local now = now_ms()
  sums = {jobs = redis.call('ZCOUNT', jobs_key(tenant), now - 1000 * keep, '+inf'), requests = 0, results = 0}
  local fields = redis.call('HGETALL', kept_key(tenant))
  for i = 1, #fields, 2 do
    local kind, ends = string.match(fields[i], '^(r?)(%d+)$')
    if ends and tonumber(ends) > now / 1000 then
      local what = kind == 'r' and 'results' or 'requests'
      sums[what] = sums[what] + fields[i + 1]
    end
  end
  usage_by_tenant[tenant] = sums
  return sums
end
