-- Reserves a batch's tokens in its tenant's quota. ARGV: id, epoch, tenant, tokens, quota | ''
-- Returns: 'fenced' | {1 if there is room, else 0; tokens of the tenant's other batches}
local id, epoch, tenant, tokens, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
if redis.call('HGET', batch_key(id), 'epoch') ~= epoch then return 'fenced' end
local waiting = 0
for _, count in ipairs(redis.call('HVALS', enqueued_key(tenant))) do waiting = waiting + count end
waiting = waiting - (redis.call('HGET', enqueued_key(tenant), id) or 0)
if most ~= '' and waiting + tokens > tonumber(most) then return {0, waiting} end
redis.call('HSET', enqueued_key(tenant), id, tokens)
return {1, waiting}
