#!lua flags=allow-oom
-- A reader was shown deltas that are not in this job's history any more: begin a new epoch of its events, once for all
-- readers of the old one, so that no event id is used for two things. ARGV: id, resets the reader knew of
-- Returns: resets now, or 'unknown'; the resets that were known if its record cannot be read: then it has failed
local id, seen = ARGV[1], tonumber(ARGV[2])
return or_malformed(id, nil, function()
  local known = redis.call('HMGET', job_key(id), 'state', 'epoch')
  if not known[1] then return 'unknown' end
  local now = tonumber(whole_number(known[2] or '0'))
  if not now then error('its epoch is none', 0) end
  if now == seen then return redis.call('HINCRBY', job_key(id), 'epoch', 1) end
  return now
end) or seen
