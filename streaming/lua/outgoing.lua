#!lua flags=allow-oom
-- Takes webhook messages that are due, each under a lease; a message whose outcome is not reported in time is due again.
-- ARGV: endpoint, most messages, lease in ms
-- Returns: {now, {id, attempt, attempts before this round, ms this round began, event, type, subject, ms of the event,
--          data | '', the URL that its request names | ''}...}
local due, most, lease = hook_due_key(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local now = now_ms()
local taken = {now}
for _, id in ipairs(redis.call('ZRANGE', due, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)) do
  local s = redis.call('HMGET', hook_key(id), 'state', 'before', 'began', 'event', 'type', 'subject', 'at', 'data', 'url')
  if s[1] == 'pending' then
    redis.call('ZADD', due, now + lease, id)
    redis.call('HSET', hook_key(id), 'due', now + lease, 'tried', now)
    local attempt = redis.pcall('HINCRBY', hook_key(id), 'attempt', 1)
    if type(attempt) == 'table' then -- it was not a number
      redis.call('HSET', hook_key(id), 'attempt', 1)
      attempt = 1
    end
    taken[#taken + 1] = {id, attempt, tonumber(s[2]), tonumber(s[3]), s[4], s[5], s[6], tonumber(s[7]), s[8] or '',
      s[9] or ''}
  else
    redis.call('ZREM', due, id)
  end
end
return taken
