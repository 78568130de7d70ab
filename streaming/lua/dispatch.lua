#!lua flags=allow-oom
-- Fans an event out: creates one webhook message per endpoint. Idempotent: an existing message is left as it is.
-- ARGV: its entry in the outbox, id of the event, type, subject, tenant, ms of the event, ms to keep the list, data
--       of its messages | '', then pairs of message id, webhook: the name of an endpoint, after a URL and a line break
--       if it goes there
-- Returns: how many messages are new
local entry, event, what, subject, tenant, at, keep, data = unpack(ARGV, 1, 8)
local now, new = now_ms(), 0
for i = 9, #ARGV, 2 do
  local id, url, endpoint = ARGV[i], string.match(ARGV[i + 1], '^(.-)\n?([^\n]*)$')
  if redis.call('EXISTS', hook_key(id)) == 0 then
    redis.call('HSET', hook_key(id), 'event', event, 'type', what, 'subject', subject, 'tenant', tenant, 'at', at,
      'endpoint', endpoint, 'state', 'pending', 'attempt', 0, 'before', 0, 'began', now, 'url', url, 'data', data)
    schedule_webhook(id, endpoint, now)
    redis.call('ZADD', hooks_key(), at, id)
    new = new + 1
  end
end
redis.call('ZREMRANGEBYSCORE', hooks_key(), '-inf', now - keep)
redis.call('PEXPIRE', hooks_key(), keep)
ack_and_delete(outbox_key('webhooks'), entry)
return new
