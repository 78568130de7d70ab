#!lua flags=allow-oom
-- Fails a job whose record a reader could not decode, unless it has ended. ARGV: id, reason
-- Returns: when it ended (ms), or now if that is malformed too; 0 if the job is not kept
local now = now_ms()
fail_malformed(ARGV[1], ARGV[2], now)
local job = job_key(ARGV[1])
if redis.call('EXISTS', job) == 0 then return 0 end
return tonumber(string.match(redis.call('HGET', job, 'done') or '', '^%d+$')) or now
