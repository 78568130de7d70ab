#!lua flags=allow-oom
-- A reader was shown deltas that are not in this job's history any more: begin a new epoch of its events, once for all
-- readers of the old one, so that no event id is used for two things. ARGV: id, resets the reader knew of
-- Returns: resets now, or 'unknown'
local known = redis.call('HMGET', job_key(ARGV[1]), 'state', 'epoch')
if not known[1] then return 'unknown' end
local now = tonumber(known[2] or 0)
if now == tonumber(ARGV[2]) then return redis.call('HINCRBY', job_key(ARGV[1]), 'epoch', 1) end
return now
