#!lua flags=allow-oom
-- Takes the lease of a batch for one offline process. ARGV: id, number of the notice, lease in ms
-- Returns: 'gone' | 'stale' (there is a newer notice, or the batch is not due) | 'held' (another process has the lease)
--          | {epoch, now, the fields of the batch's record, as of `put_batch`}
local id, turn, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local batch = batch_key(id)
local s = redis.call('HMGET', batch, 'asked', 'status', 'paused', 'created', 'expires', 'cancelling', 'progress', 'tenant',
  'turn', 'lease')
if not s[2] then return 'gone' end
if s[9] ~= turn or not redis.call('ZSCORE', due_key(), id) then return 'stale' end
local now = now_ms()
if s[10] and tonumber(s[10]) > now then return 'held' end
local epoch = redis.call('HINCRBY', batch, 'epoch', 1)
redis.call('HSET', batch, 'lease', now + lease, 'heard', turn)
redis.call('ZADD', due_key(), now + lease, id)
return {epoch, now, unpack(s, 1, 8)}
