#!lua flags=allow-oom
-- A process says that it is there. ARGV: its name, what it says of itself, seconds after which it counts as gone
local name, gone_s = ARGV[1], tonumber(ARGV[3])
local now = exact_ms() / 1000
redis.call('SET', proc_key(name), ARGV[2], 'EX', gone_s)
redis.call('ZADD', procs_key(), now + gone_s, name)
redis.call('ZREMRANGEBYSCORE', procs_key(), '-inf', now - 3600)
return 1
