-- Files of batches: their records, and the bytes that count against a tenant's quota.

-- The bytes that a file counts against its tenant's quota: its size, and at least 4,096, so that the quota also bounds
-- the number of files.
local MIN_FILE_COST = 4096

local function file_cost(bytes)
  bytes = parse_number(bytes) or 0
  return math.max(MIN_FILE_COST, bytes < 1e15 and math.ceil(bytes) or 0)
end

-- The same by the file's record; the minimum if that is malformed.
local function record_file_cost(record)
  local read, file = pcall(cmsgpack.unpack, record or '')
  return file_cost(read and type(file) == 'table' and file.size)
end

-- Set what a file counts as (nil: nothing) in its tenant's hash, which also holds the total, so that reading needs no sum.
local function set_file_cost(tenant, id, cost)
  local key = sizes_key(tenant)
  local before = redis.call('HGET', key, id)
  if cost then redis.call('HSET', key, id, cost) end
  if before and not cost then redis.call('HDEL', key, id) end
  if cost or before then redis.call('HINCRBY', key, 'total', (cost or 0) - (before or 0)) end
  if not cost and redis.call('HLEN', key) == 1 then redis.call('DEL', key) end
end

-- Schedule or cancel the deletion of a file or a batch. The entry names the tenant, since the record may be lost.
local function schedule_deletion(id, tenant, when)
  redis.call('ZADD', expiring_key(), when, id .. ':' .. tenant)
end

local function cancel_deletion(id, tenant)
  redis.call('ZREM', expiring_key(), id .. ':' .. tenant)
end

-- Save a file's record, list it, count its cost and schedule its deletion.
local function save_file(id, tenant, record, now, expires)
  redis.call('SET', file_key(id), record)
  redis.call('ZADD', files_key(tenant), now, id)
  set_file_cost(tenant, id, record_file_cost(record))
  schedule_deletion(id, tenant, expires)
end

-- The final states of jobs and batches.
local FINAL = {failed = true, completed = true, expired = true, cancelled = true}

-- Whether an unfinished batch has this file as its input. Removes batches that have ended or are lost from its readers.
local function is_file_in_use(id)
  local batch = redis.call('SRANDMEMBER', readers_key(id))
  while batch do
    local status = redis.call('HGET', batch_key(batch), 'status')
    if status and not FINAL[status] then return true end
    redis.call('SREM', readers_key(id), batch)
    batch = redis.call('SRANDMEMBER', readers_key(id))
  end
  return false
end

-- Count a deleted file that an unfinished batch still reads (the batch has its own hard link to the bytes), and look at it
-- again after a day, in case the batch's record is lost.
local HELD_FILE_CHECK_MS = 86400000

local function retain_file_cost(id, tenant, cost)
  set_file_cost(tenant, id, cost)
  schedule_deletion(id, tenant, now_ms() + HELD_FILE_CHECK_MS)
end

-- Stop counting a file whose record is deleted, unless an unfinished batch still reads it.
local function release_file_cost(id, tenant)
  if redis.call('EXISTS', file_key(id)) == 1 then return end
  if is_file_in_use(id) then
    retain_file_cost(id, tenant, redis.call('HGET', sizes_key(tenant), id) or MIN_FILE_COST)
  else
    set_file_cost(tenant, id, nil)
    cancel_deletion(id, tenant)
  end
  redis.call('ZREM', files_key(tenant), id)
end

-- The bytes that count against a tenant's file quota: of its files, and of deleted ones that its batches still read.
local function stored_bytes(tenant)
  return math.max(0, redis.call('HGET', sizes_key(tenant), 'total') or 0)
end

-- Places that deleted files, batches and conversation items had in their lists, so that a cursor may name them: a tenant's
-- last ones in each partition, for a day.
local MAX_PLACES = 1000

local function keep_place(tenant, name, place)
  local key = places_key(tenant)
  redis.call('LPUSH', key, name .. ' ' .. place)
  redis.call('LTRIM', key, 0, MAX_PLACES - 1)
  redis.call('EXPIRE', key, 86400)
end
