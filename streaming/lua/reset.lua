#!lua flags=allow-oom
-- Begins a new epoch of a job's events after the store lost deltas that a reader has seen, so that no event id is used
-- twice; once for all readers of the old epoch. ARGV: id, number of resets that the reader knows
-- Returns: number of resets now, or 'unknown'; the reader's number if the record is malformed: then the job has failed
local id, seen = ARGV[1], tonumber(ARGV[2])
return run_or_fail(id, nil, function()
  local known = redis.call('HMGET', job_key(id), 'state', 'epoch')
  if not known[1] then return 'unknown' end
  local now = tonumber(integer_text(known[2] or '0'))
  if not now then error('invalid epoch', 0) end
  if now == seen then return redis.call('HINCRBY', job_key(id), 'epoch', 1) end
  return now
end) or seen
