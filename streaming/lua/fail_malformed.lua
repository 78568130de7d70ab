#!lua flags=allow-oom
-- Fail a job whose record a reader cannot read, unless it has ended. ARGV: id, why
-- Returns: when it ended (ms), now if that cannot be read; 0 if it is not kept
local now = now_ms()
fail_malformed(ARGV[1], ARGV[2], now)
local job = job_key(ARGV[1])
if redis.call('EXISTS', job) == 0 then return 0 end
return tonumber(string.match(redis.call('HGET', job, 'done') or '', '^%d+$')) or now
