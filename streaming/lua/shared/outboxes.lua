-- Events of jobs for brokers and webhooks, until they are delivered.

-- Append a lifecycle event to the outboxes that the job's record names: b the broker, w webhooks (final events only).
-- The entry carries the webhook that the request names (h, o), because the record may be deleted before it is read.
-- `what` is the event type, such as job.completed. Undelivered events are dropped after a week, so that they do not fill
-- the store of a deployment without an offline process.
local OUTBOX_RETENTION_S = 7 * 86400

local function append_to_outbox(box, id, tenant, what, ...)
  local oldest = string.format('%d-0', now_ms() - 1000 * OUTBOX_RETENTION_S)
  redis.call('XADD', box, 'MINID', '~', oldest, '*', 'id', id, 'tenant', tenant, 'type', what, ...)
  redis.call('EXPIRE', box, OUTBOX_RETENTION_S)
end

local function emit_event(for_whom, id, tenant, what, final)
  if string.find(for_whom, 'b', 1, true) then append_to_outbox(outbox_key('broker'), id, tenant, what) end
  if not final or not string.find(for_whom, 'w', 1, true) then return end
  if string.find(for_whom, 'r', 1, true) then what = string.gsub(what, '^job', 'response') end
  local webhook = string.find(for_whom, '[ho]') and redis.call('HGET', job_key(id), 'webhook') or ''
  append_to_outbox(outbox_key('webhooks'), id, tenant, what, 'for', for_whom, 'webhook', webhook)
end

-- Schedule the next attempt of a webhook message. Its record and its endpoint's queue expire after 31 days, longer than
-- attempts can go on; `settle` shortens that. The expiry also removes messages of endpoints that are not configured now.
local WEBHOOK_RETENTION_S = 31 * 86400

local function schedule_webhook(id, endpoint, due)
  redis.call('HSET', hook_key(id), 'due', due)
  redis.call('EXPIRE', hook_key(id), WEBHOOK_RETENTION_S)
  redis.call('ZADD', hook_due_key(endpoint), due, id)
  redis.call('EXPIRE', hook_due_key(endpoint), WEBHOOK_RETENTION_S)
end
