#!lua flags=allow-oom
-- Begins a new epoch of a partition that has lost data: a process has seen a later tick than the store has. Idempotent.
-- ARGV: the latest tick seen. Returns the epoch.
local seen = tonumber(ARGV[1])
if tonumber(redis.call('GET', tick_key()) or 0) < seen then
  redis.call('SET', tick_key(), seen + 1)
  return redis.call('INCR', epoch_key())
end
return tonumber(redis.call('GET', epoch_key()) or 0)
