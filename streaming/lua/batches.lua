-- Scripts of batches and of the records of files.

#!lua name=put_file roles=api promise
-- Stores the record of a file whose bytes are already in the files folder. ARGV: id, tenant, record, ms from now to keep
-- it, the tenant's quota of file bytes | ''
-- Returns: now | {'quota', 'files', bytes the tenant keeps}
local id, tenant, record, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local most = tonumber(ARGV[5])
if most and redis.call('EXISTS', file_key(id)) == 0 then
  local stored = stored_bytes(tenant)
  if stored + record_file_cost(record) > most then return {'quota', 'files', stored} end
end
local now = now_ms()
save_file(id, tenant, record, now, now + keep)
return now

#!lua name=put_batch roles=api,offline promise
-- Accepts a batch. ARGV: id, tenant, what was asked, its digest, window in ms | '', recipients of its events | '', the
-- tenant's quota of file bytes, to which the batch will add | '', its input file, that file's bytes, status
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
  local more = redis.call('HGET', sizes_key(tenant), input) and 1 or file_cost(ARGV[9])
  if most and stored + more > most then return {'quota', 'files', stored} end
  redis.call('HSET', batch_key(id), 'asked', asked, 'digest', digest, 'tenant', tenant, 'status', ARGV[10],
    'paused', '', 'created', now, 'expires', window ~= '' and now + window or '', 'turn', 0, 'epoch', 0, 'progress', '', 'events', events,
    'input', input)
  redis.call('ZADD', batches_key(tenant), now, id)
  redis.call('ZADD', due_key(), now, id)
  redis.call('PUBLISH', CHANNEL .. 'offline:due', id)
  redis.call('SADD', readers_key(input), id)
  if redis.call('EXISTS', file_key(input)) == 0 then retain_file_cost(input, tenant, file_cost(ARGV[9])) end -- no upload, or deleted meanwhile
end
return redis.call('HMGET', batch_key(id), 'asked', 'status', 'paused', 'created', 'expires', 'cancelling', 'progress',
  'tenant')

#!lua name=steer flags=allow-oom roles=api promise
-- Cancels, pauses or resumes a batch for its owner. ARGV: id, 'cancel' | 'pause' | 'resume'
-- Returns: the status it was found in, or 'unknown'. A batch that is finalizing or has ended is not changed.
local id, command = ARGV[1], ARGV[2]
local status = redis.call('HGET', batch_key(id), 'status')
if not status then return 'unknown' end
if status ~= 'validating' and status ~= 'in_progress' and status ~= 'scheduled' then return status end
local now = now_ms()
if command == 'cancel' then
  redis.call('HSET', batch_key(id), 'status', 'cancelling', 'cancelling', now, 'paused', '')
else
  redis.call('HSET', batch_key(id), 'paused', command == 'pause' and '1' or '')
end
redis.call('ZADD', due_key(), now, id)
redis.call('PUBLISH', CHANNEL .. 'offline:due', id)
return status

#!lua name=due flags=allow-oom roles=offline
-- Lists the batches that are due, with a new notice for each: a batch is listed again only if it is still due after a
-- while. ARGV: most batches, ms until a batch is listed again
-- Returns: {id, number of this notice, reason}...; only the batch's latest notice is valid. Reason: 'due', 'unanswered'
--          (no process acted on the last notice), 'lapsed' (the lease of the process that ran it lapsed)
local most, repeat_ms = ARGV[1], tonumber(ARGV[2])
local function reason_for(id)
  local s = redis.call('HMGET', batch_key(id), 'turn', 'heard', 'lease')
  if s[1] ~= (s[2] or '0') then return 'unanswered' end
  return (s[3] or '0') ~= '0' and 'lapsed' or 'due'
end
local now, notices = now_ms(), {}
for _, id in ipairs(redis.call('ZRANGE', due_key(), '-inf', now, 'BYSCORE', 'LIMIT', 0, most)) do
  if redis.call('EXISTS', batch_key(id)) == 1 then
    redis.call('ZADD', due_key(), now + repeat_ms, id)
    local reason = reason_for(id)
    notices[#notices + 1] = {id, redis.call('HINCRBY', batch_key(id), 'turn', 1), reason}
  else
    redis.call('ZREM', due_key(), id)
  end
end
return notices

#!lua name=hold flags=allow-oom roles=offline
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

#!lua name=reserve roles=offline
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

#!lua name=save flags=allow-oom roles=offline promise
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
  -- Only a paused batch or a schedule rests: a batch that its owner has resumed since is due at once.
  if resume_ms ~= '' and s[3] == '' and status ~= 'scheduled' then resume_ms = 0 end
  redis.call('HSET', batch, 'lease', resume_ms == '' and now + lease or 0)
  redis.call('ZADD', due_key(), now + (resume_ms == '' and lease or resume_ms), id)
  if tonumber(resume_ms) == 0 then redis.call('PUBLISH', CHANNEL .. 'offline:due', id) end
  if tokens ~= '' then redis.call('HSET', enqueued_key(s[4]), id, tokens) end
end
return {now, status, s[3]}

#!lua name=forget flags=allow-oom roles=api,offline
-- Deletes the record of a file, or of a batch that has ended; a cursor may still name it.
-- ARGV: 'file' | 'batch', id, tenant
local kind, id, tenant = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('ZSCORE', kind == 'file' and files_key(tenant) or batches_key(tenant), id)
if time then keep_place(tenant, id, time) end
if kind == 'file' then
  redis.call('DEL', file_key(id))
  release_file_cost(id, tenant)
else
  redis.call('DEL', batch_key(id))
  redis.call('ZREM', batches_key(tenant), id)
  cancel_deletion(id, tenant)
end
return 1
