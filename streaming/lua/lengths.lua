#!lua flags=allow-oom
-- Stores the output lengths of a model for a while; those of a newer version stay. ARGV: model, version, message, seconds
-- Returns: 1, or 0 if a newer version's are there
local key = lengths_key(ARGV[1])
if tonumber(redis.call('HGET', key, 'version') or 0) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', key, 'version', ARGV[2], 'lengths', ARGV[3])
redis.call('EXPIRE', key, ARGV[4])
return 1
