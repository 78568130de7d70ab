#!lua flags=allow-oom
-- The batches somebody must be told to work on now. Each is told once, and again when nothing came of it for a while.
-- ARGV: most of them, ms until it is told again
-- Returns: {id, number of this telling, why}...; whoever is told by an earlier number need not begin. Why: 'due', or
--          'unanswered' (nobody began when it was told last), 'lapsed' (whoever worked on it fell silent)
local most, again = ARGV[1], tonumber(ARGV[2])
local function why(id)
  local s = redis.call('HMGET', batch_key(id), 'turn', 'heard', 'lease')
  if s[1] ~= (s[2] or '0') then return 'unanswered' end
  return (s[3] or '0') ~= '0' and 'lapsed' or 'due'
end
local now, told = now_ms(), {}
for _, id in ipairs(redis.call('ZRANGE', due_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most)) do
  if redis.call('EXISTS', batch_key(id)) == 1 then
    redis.call('ZADD', due_key(), now + again, id)
    local reason = why(id)
    told[#told + 1] = {id, redis.call('HINCRBY', batch_key(id), 'turn', 1), reason}
  else
    redis.call('ZREM', due_key(), id)
  end
end
return told
