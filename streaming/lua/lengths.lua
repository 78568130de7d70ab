#!lua flags=allow-oom
-- Stores the output lengths of a model for a while; those of a newer version stay. ARGV: model, version, message, seconds
-- Returns: 1, or 0 if a newer version's are there
local key = lengths_key(ARGV[1])
local version = redis.call('HGET', key, 'version') or ''
if #version > 9 or not string.find(version, '^%d+$') then version = 0 end -- none, or no version: it is replaced
if tonumber(version) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', key, 'version', ARGV[2], 'lengths', ARGV[3])
redis.call('EXPIRE', key, ARGV[4])
return 1
