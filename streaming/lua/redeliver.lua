-- Schedules a webhook message for redelivery, whatever its state, with as many attempts as a new one has. ARGV: id
-- Returns: 1 | 0 (there is none)
local hook = hook_key(ARGV[1])
local s = redis.call('HMGET', hook, 'endpoint', 'attempt')
if not s[1] then return 0 end
local now = now_ms()
redis.call('HSET', hook, 'state', 'pending', 'before', s[2], 'began', now)
schedule_webhook(ARGV[1], s[1], now)
return 1
