#!lua flags=allow-oom
-- Cancels, pauses or resumes a batch for its owner. ARGV: id, 'cancel' | 'pause' | 'resume'
-- Returns: the status it was found in, or 'unknown'. A batch that is finalizing or has ended is not changed.
local id, command = ARGV[1], ARGV[2]
local status = redis.call('HGET', batch_key(id), 'status')
if not status then return 'unknown' end
if status ~= 'validating' and status ~= 'in_progress' then return status end
local now = now_ms()
if command == 'cancel' then
  redis.call('HSET', batch_key(id), 'status', 'cancelling', 'cancelling', now, 'paused', '')
else
  redis.call('HSET', batch_key(id), 'paused', command == 'pause' and '1' or '')
end
redis.call('ZADD', due_key(), now, id)
return status
