#!lua flags=no-writes
-- Reads a job's state and place in its lane, without its body. ARGV: id
-- Returns: {state | false, lane, entry, the partition's epoch | false}
local s = redis.call('HMGET', job_key(ARGV[1]), 'state', 'lane', 'entry')
return {s[1], s[2], s[3], redis.call('GET', epoch_key())}
