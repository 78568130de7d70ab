-- Stores a new conversation; once, however often it is called. ARGV: id, tenant, metadata, seconds to keep it, bytes that
-- every conversation counts as besides its items, the tenant's quota of request bytes | '', the items
-- Returns: when it was created (ms) | {'quota', 'requests', bytes the tenant keeps}
local id, tenant, metadata, keep, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[6])
local key, now = conversation_key(id), now_ms()
local created = redis.call('HGET', key, 'created')
if created then return tonumber(created) end
local bytes = ARGV[5] + #metadata
for i = 7, #ARGV do bytes = bytes + #ARGV[i] end
if most then
  local kept = tenant_usage(tenant, keep).requests
  if kept + bytes > most then return {'quota', 'requests', kept} end
end
redis.call('HSET', key, 'tenant', tenant, 'created', now, 'metadata', metadata, 'version', 0, 'turn', '', 'next',
  #ARGV - 6, 'size', count_conversation(tenant, '', bytes, keep, now))
for i = 7, #ARGV do redis.call('HSET', key, 'i' .. (i - 6), ARGV[i]) end
redis.call('EXPIRE', key, keep)
return now
