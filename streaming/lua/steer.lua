#!lua flags=allow-oom
-- What its owner wants of a batch. ARGV: id, 'cancel' | 'pause' | 'resume'
-- Returns: the status it was found in, or 'unknown'. Nothing changes once its results are being put together.
local id, wish = ARGV[1], ARGV[2]
local status = redis.call('HGET', batch_key(id), 'status')
if not status then return 'unknown' end
if status ~= 'validating' and status ~= 'in_progress' then return status end
local now = now_ms()
if wish == 'cancel' then
  redis.call('HSET', batch_key(id), 'status', 'cancelling', 'cancelling', now, 'paused', '')
else
  redis.call('HSET', batch_key(id), 'paused', wish == 'pause' and '1' or '')
end
redis.call('ZADD', due_key(), now, id)
return status
