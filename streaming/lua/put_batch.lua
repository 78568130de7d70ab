-- Accepts a batch. ARGV: id, tenant, what was asked, its digest, window in ms | '', recipients of its events | '', the
-- tenant's quota of file bytes, to which the batch will add | '', its input file, the bytes of that
-- Returns: 'reused' (something else was asked before under this id, or by another tenant) |
--          {'quota', 'files', bytes the tenant keeps} | the fields of the batch's
--          record, new or not: asked, status, paused, created, expires, cancelling, progress, tenant
local id, tenant, asked, digest, window = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local events, most, input = ARGV[6], tonumber(ARGV[7]), ARGV[8]
local known = redis.call('HMGET', batch_key(id), 'digest', 'tenant')
if known[1] and (known[1] ~= digest or known[2] ~= tenant) then return 'reused' end
local now = now_ms()
if not known[1] then
  local stored = most and stored_bytes(tenant)
  if most and stored >= most then return {'quota', 'files', stored} end
  redis.call('HSET', batch_key(id), 'asked', asked, 'digest', digest, 'tenant', tenant, 'status', 'validating',
    'paused', '', 'created', now, 'expires', window ~= '' and now + window or '', 'turn', 0, 'epoch', 0, 'progress', '', 'events', events,
    'input', input)
  redis.call('ZADD', batches_key(tenant), now, id)
  redis.call('ZADD', due_key(), now, id)
  redis.call('SADD', readers_key(input), id)
  if redis.call('EXISTS', file_key(input)) == 0 then retain_file_cost(input, tenant, file_cost(ARGV[9])) end -- deleted meanwhile
end
return redis.call('HMGET', batch_key(id), 'asked', 'status', 'paused', 'created', 'expires', 'cancelling', 'progress',
  'tenant')
