#!lua flags=allow-oom
-- Takes the lease of a batch for one offline process. ARGV: id, number of the notice, lease in ms
-- Returns: 'gone' | 'stale' (there is a newer notice, or the batch is not due) | 'held' (another process has the lease)
--          | {epoch, now, status, paused, created, expires | '', asked, progress}
local id, turn, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local batch = batch_key(id)
local s = redis.call('HMGET', batch, 'status', 'paused', 'created', 'expires', 'asked', 'progress', 'turn', 'lease')
if not s[1] then return 'gone' end
if s[7] ~= turn or not redis.call('ZSCORE', due_key(), id) then return 'stale' end
local now = now_ms()
if s[8] and tonumber(s[8]) > now then return 'held' end
local epoch = redis.call('HINCRBY', batch, 'epoch', 1)
redis.call('HSET', batch, 'lease', now + lease, 'heard', turn)
redis.call('ZADD', due_key(), now + lease, id)
return {epoch, now, s[1], s[2], tonumber(s[3]), s[4], s[5], s[6]}
