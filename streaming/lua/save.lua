#!lua flags=allow-oom
-- Saves a batch's progress and renews its lease, or ends it; fenced by the batch's epoch.
-- ARGV: id, epoch, lease in ms, status, progress, tokens still to be computed | '',
--       ms until the batch is due again (at once if it is not paused), or '' to keep the lease;
--       seconds to keep it after its end, then for every file it leaves: id, record, ms from now to keep it
-- Returns: 'fenced' (another process has the lease, or the batch has ended) | {now, status, paused}: the owner may have
--          changed these
local id, epoch, lease, status, progress, tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local resume_ms, keep = ARGV[7], tonumber(ARGV[8])
local batch = batch_key(id)
local s = redis.call('HMGET', batch, 'epoch', 'status', 'paused', 'tenant', 'events', 'input')
if s[1] ~= epoch or FINAL[s[2]] then return 'fenced' end
if s[2] == 'cancelling' and not FINAL[status] then status = 'cancelling' end
local now = now_ms()
redis.call('HSET', batch, 'status', status, 'progress', progress)
for i = 9, #ARGV, 3 do save_file(ARGV[i], s[4], ARGV[i + 1], now, now + ARGV[i + 2]) end
if FINAL[status] then
  redis.call('HSET', batch, 'lease', 0, 'paused', '')
  redis.call('ZREM', due_key(), id)
  redis.call('HDEL', enqueued_key(s[4]), id)
  if s[6] then
    redis.call('SREM', readers_key(s[6]), id)
    release_file_cost(s[6], s[4])
  end
  schedule_deletion(id, s[4], now + 1000 * keep)
  emit_event(s[5] or '', id, s[4], 'batch.' .. status, true)
else
  -- Only a paused batch rests: a batch that its owner has resumed since is due at once.
  if resume_ms ~= '' and s[3] == '' then resume_ms = 0 end
  redis.call('HSET', batch, 'lease', resume_ms == '' and now + lease or 0)
  redis.call('ZADD', due_key(), now + (resume_ms == '' and lease or resume_ms), id)
  if tokens ~= '' then redis.call('HSET', enqueued_key(s[4]), id, tokens) end
end
return {now, status, s[3]}
