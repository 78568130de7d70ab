#!lua flags=allow-oom
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
      ack_and_delete(box, item[1])
    end
  end
end
add(taken[2])
if #events < most then
  local fresh = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', most - #events, 'STREAMS', box, '>')
  add(fresh and fresh[1] and fresh[1][2] or {})
end
return events
