#!lua flags=allow-oom
-- Heartbeat of a process: stores its description for a limited time. ARGV: its name, description, seconds to keep it
local name, gone_s = ARGV[1], tonumber(ARGV[3])
local now = exact_ms() / 1000
redis.call('SET', proc_key(name), ARGV[2], 'EX', gone_s)
redis.call('ZADD', procs_key(), now + gone_s, name)
redis.call('ZREMRANGEBYSCORE', procs_key(), '-inf', now - 3600)
return 1
