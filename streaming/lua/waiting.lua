#!lua flags=no-writes
-- Reads what decides about the places of a tenant's waiting jobs in a lane. Of a retry or suspects stream: its first
-- undelivered entries. ARGV: the key of the lane or stream, tenant, most entries, patience (ms) of a job that the tenant
-- would put now | ''
-- Returns: {{entry of the tenant's jobs, or of the stream's, in order...} (with a patience: the number of the tenant's jobs
--           that must start before the new one), jobs of higher lanes, requeued jobs of this
--           lane, new jobs of this lane, those of the tenant, tenants with jobs here, those that got less than this one,
--           its virtual counter, the least one}
local tenant, most, patience = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local model, priority, kind = parse_lane(ARGV[1])
local higher = 0
for _, lane in ipairs(PRIORITIES) do
  if lane == priority then break end
  higher = higher + count_waiting(model, lane)
end
if kind ~= 'lane' then
  local ids = {}
  for i, entry in ipairs(redis.call('XRANGE', ARGV[1], undelivered_from(ARGV[1]), '+', 'COUNT', most)) do ids[i] = entry[1] end
  return {ids, higher, 0, 0, 0, 1, 0, 0, 0}
end
local line, tenants = tenant_line(model, priority, tenant), tenants_key(model, priority)
local ids = nil
if patience then
  ids = redis.call('ZCOUNT', line, '-inf', now_ms() + patience)
else
  ids = redis.call('ZRANGE', line, 0, most - 1)
  for i, member in ipairs(ids) do ids[i] = from_member(member) or member end
end
local count, least = redis.call('ZCARD', tenants), redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
local rank, counter = redis.call('ZRANK', tenants, tenant), redis.call('ZSCORE', tenants, tenant)
if not rank and least[1] then -- it would enter the lane
  counter = math.max(tonumber(redis.call('ZSCORE', served_key(model, priority), tenant) or 0), tonumber(least[2]))
  count, rank = count + 1, redis.call('ZCOUNT', tenants, '-inf', string.format('(%.0f', counter))
end
return {
  ids, higher, count_requeued(model, priority), redis.call('ZCARD', arrivals_key(model, priority)),
  redis.call('ZCARD', line), count, rank or 0, tonumber(counter or 0), tonumber(least[2] or 0)
}
