#!lua flags=allow-oom
-- How far a batch is, said by whoever works on it and by nobody else.
-- ARGV: id, epoch, lease in ms, status, progress, tokens still to be computed | '',
--       ms until somebody must go on with it (at once if it is not paused), or '' while this one does;
--       seconds to keep it after its end, then for every file it leaves: id, record, ms from now to keep it
-- Returns: 'fenced' (another has it, or it has ended) | {now, status, paused}: what its owner wants may have changed
local id, epoch, lease, status, progress, tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local rest, keep = ARGV[7], tonumber(ARGV[8])
local batch = batch_key(id)
local s = redis.call('HMGET', batch, 'epoch', 'status', 'paused', 'tenant', 'events', 'input')
if s[1] ~= epoch or FINAL[s[2]] then return 'fenced' end
if s[2] == 'cancelling' and not FINAL[status] then status = 'cancelling' end
local now = now_ms()
redis.call('HSET', batch, 'status', status, 'progress', progress)
for i = 9, #ARGV, 3 do keep_file(ARGV[i], s[4], ARGV[i + 1], now, now + ARGV[i + 2]) end
if FINAL[status] then
  redis.call('HSET', batch, 'lease', 0, 'paused', '')
  redis.call('ZREM', due_key(), id)
  redis.call('HDEL', enqueued_key(s[4]), id)
  if s[6] then
    redis.call('SREM', readers_key(s[6]), id)
    release_file(s[6], s[4])
  end
  forget_at(id, s[4], now + 1000 * keep)
  emit(s[5] or '', id, s[4], 'batch.' .. status, true)
else
  -- It sleeps only while it is paused: what its owner wished since it was last heard of is not slept through.
  if rest ~= '' and s[3] == '' then rest = 0 end
  redis.call('HSET', batch, 'lease', rest == '' and now + lease or 0)
  redis.call('ZADD', due_key(), now + (rest == '' and lease or rest), id)
  if tokens ~= '' then redis.call('HSET', enqueued_key(s[4]), id, tokens) end
end
return {now, status, s[3]}
