-- Accept a batch. ARGV: id, tenant, what was asked, its digest, window in ms | '', whom its end is for | ''
-- Returns: 'new' | 'there' (the same was asked before under this id) | 'reused' (something else was)
local id, tenant, asked, digest, window = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local events = ARGV[6]
local known = redis.call('HGET', batch_key(id), 'digest')
if known then return known == digest and 'there' or 'reused' end
local now = now_ms()
redis.call('HSET', batch_key(id), 'asked', asked, 'digest', digest, 'tenant', tenant, 'status', 'validating',
  'paused', '', 'created', now, 'expires', window ~= '' and now + window or '', 'turn', 0, 'epoch', 0, 'progress', '', 'events', events)
redis.call('ZADD', batches_key(tenant), now, id)
redis.call('ZADD', due_key(), now, id)
return 'new'
