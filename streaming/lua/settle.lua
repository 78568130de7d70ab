#!lua flags=allow-oom
-- Records the outcome of a webhook delivery attempt, from the latest attempt only, except that any may report success.
-- ARGV: id, attempt, 'delivered' | 'pending' | 'failed', status of the answer | 0, the problem | '', ms until the next
--       attempt, seconds to keep it after its end
-- Returns: 1 | 0 (another attempt has begun, or it has ended)
local id, attempt, state, status, problem, wait, keep = unpack(ARGV, 1, 7)
local hook = hook_key(id)
local s = redis.call('HMGET', hook, 'state', 'attempt', 'endpoint')
if s[1] ~= 'pending' or (s[2] ~= attempt and state ~= 'delivered') then return 0 end
local now = now_ms()
redis.call('HSET', hook, 'state', state, 'status', status, 'problem', problem)
if state == 'pending' then
  schedule_webhook(id, s[3], now + wait)
else
  redis.call('HSET', hook, 'due', 0)
  redis.call('ZREM', hook_due_key(s[3]), id)
  redis.call('EXPIRE', hook, keep)
end
return 1
