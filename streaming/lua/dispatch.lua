#!lua flags=allow-oom
-- Fans an event out: creates one webhook message per endpoint. Idempotent: an existing message is left as it is.
-- ARGV: its entry in the outbox, id of the event, type, subject, tenant, ms of the event, ms to keep the list,
--       then pairs of message id, endpoint
-- Returns: how many messages are new
local entry, event, what, subject, tenant, at, keep = unpack(ARGV, 1, 7)
local now, new = now_ms(), 0
for i = 8, #ARGV, 2 do
  local id, endpoint = ARGV[i], ARGV[i + 1]
  if redis.call('EXISTS', hook_key(id)) == 0 then
    redis.call('HSET', hook_key(id), 'event', event, 'type', what, 'subject', subject, 'tenant', tenant, 'at', at,
      'endpoint', endpoint, 'state', 'pending', 'attempt', 0, 'before', 0, 'began', now)
    schedule_webhook(id, endpoint, now)
    redis.call('ZADD', hooks_key(), at, id)
    new = new + 1
  end
end
redis.call('ZREMRANGEBYSCORE', hooks_key(), '-inf', now - keep)
redis.call('PEXPIRE', hooks_key(), keep)
ack_and_delete(outbox_key('webhooks'), entry)
return new
