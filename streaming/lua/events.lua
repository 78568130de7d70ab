-- Scripts that deliver the events of jobs to brokers and webhooks.

#!lua name=collect flags=allow-oom roles=offline
-- Takes undelivered events from an outbox, first those that a lost process had taken.
-- ARGV: outbox ('broker' | 'webhooks'), consumer, most events, ms without an acknowledgement after which an event is
--       taken over. Returns: {entry, id, tenant, type, letters of its recipients | '', its own webhook | ''}...
local box, consumer, most, idle = outbox_key(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('EXISTS', box) == 0 then return {} end
local taken = redis.pcall('XAUTOCLAIM', box, GROUP, consumer, idle, '0-0', 'COUNT', most)
if taken.err then
  if string.sub(taken.err, 1, 7) ~= 'NOGROUP' then return redis.error_reply(taken.err) end
  redis.call('XGROUP', 'CREATE', box, GROUP, '0')
  taken = {'0-0', {}}
end
local events = {}
local function add(entries)
  for _, item in ipairs(entries) do
    local fields = {}
    for i = 1, #(item[2] or {}), 2 do fields[item[2][i]] = item[2][i + 1] end
    if fields.id and fields.tenant and fields.type then
      events[#events + 1] = {item[1], fields.id, fields.tenant, fields.type, fields['for'] or '', fields.webhook or ''}
    else
      dead_letter('lane', box, 'entry', item[1], 'reason', 'not an event of Penstock')
      delete_event(box, item[1])
    end
  end
end
add(taken[2])
if #events < most then
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', most - #events, 'STREAMS', box, '>')
  add(fresh and fresh[1] and fresh[1][2] or {})
end
return events

#!lua name=posted flags=allow-oom roles=offline
-- Acknowledges events of an outbox that were delivered. ARGV: outbox ('broker' | 'webhooks'), entries
for i = 2, #ARGV do delete_event(outbox_key(ARGV[1]), ARGV[i]) end
return #ARGV - 1

#!lua name=dispatch flags=allow-oom roles=offline
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
delete_event(outbox_key('webhooks'), entry)
return new

#!lua name=outgoing flags=allow-oom roles=offline
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

#!lua name=settle flags=allow-oom roles=offline
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

#!lua name=redeliver roles=api
-- Schedules a webhook message for redelivery, whatever its state, with as many attempts as a new one has. ARGV: id
-- Returns: 1 | 0 (there is none)
local hook = hook_key(ARGV[1])
local s = redis.call('HMGET', hook, 'endpoint', 'attempt')
if not s[1] then return 0 end
local now = now_ms()
redis.call('HSET', hook, 'state', 'pending', 'before', s[2], 'began', now)
schedule_webhook(ARGV[1], s[1], now)
return 1
