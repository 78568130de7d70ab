#!lua flags=allow-oom
-- Lists the batches that are due, with a new notice for each: a batch is listed again only if it is still due after a
-- while. ARGV: most batches, ms until a batch is listed again
-- Returns: {id, number of this notice, reason}...; only the batch's latest notice is valid. Reason: 'due', 'unanswered'
--          (no process acted on the last notice), 'lapsed' (the lease of the process that ran it lapsed)
local most, repeat_ms = ARGV[1], tonumber(ARGV[2])
local function reason_for(id)
  local s = redis.call('HMGET', batch_key(id), 'turn', 'heard', 'lease')
  if s[1] ~= (s[2] or '0') then return 'unanswered' end
  return (s[3] or '0') ~= '0' and 'lapsed' or 'due'
end
local now, notices = now_ms(), {}
for _, id in ipairs(redis.call('ZRANGE', due_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most)) do
  if redis.call('EXISTS', batch_key(id)) == 1 then
    redis.call('ZADD', due_key(), now + repeat_ms, id)
    local reason = reason_for(id)
    notices[#notices + 1] = {id, redis.call('HINCRBY', batch_key(id), 'turn', 1), reason}
  else
    redis.call('ZREM', due_key(), id)
  end
end
return notices
