-- Streams that workers read, and their consumers.

-- The number of undelivered entries of a retry or suspects stream. (A lane's waiting jobs are counted by its index.)
local function count_undelivered(stream)
  local length = redis.call('XLEN', stream)
  local pending = length > 0 and redis.pcall('XPENDING', stream, GROUP)
  return length - (pending and pending[1] or 0)
end

-- A fact of a stream's group, by its name in the answer to XINFO; nil if the stream has no group.
local function group_fact(stream, name)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, group in ipairs(groups.err and {} or groups) do
    for i = 1, #group, 2 do
      if group[i] == name then return group[i + 1] end
    end
  end
end

-- From where on the undelivered entries of a stream are, as XRANGE takes it.
local function undelivered_from(stream)
  local last = group_fact(stream, 'last-delivered-id')
  return last and '(' .. last or '-'
end

-- Whether a live worker reads this model's lanes: a worker that leaves or whose lease lapses is removed from the groups.
local function has_consumer(model)
  for _, priority in ipairs(PRIORITIES) do
    if (group_fact(lane_key(model, priority), 'consumers') or 0) > 0 then return true end
  end
  return false
end

-- Every stream of a model that workers read, in the order in which they read them.
local function model_streams(model)
  local lanes = {}
  for _, priority in ipairs(PRIORITIES) do
    for _, lane in ipairs({suspects_key(model, priority), retry_key(model, priority), lane_key(model, priority)}) do
      lanes[#lanes + 1] = lane
    end
  end
  return lanes
end

-- Delete a worker from the consumer groups, except where it has pending entries: those would be lost.
local function delete_consumer(model, worker)
  for _, lane in ipairs(model_streams(model)) do
    local pending = redis.pcall('XPENDING', lane, GROUP, '-', '+', 1, worker)
    if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker) end
  end
end

-- Append a dead letter. Only operators read these, so the stream may be trimmed by length.
local function dead_letter(...)
  redis.call('XADD', dead_key(), 'MAXLEN', '~', 10000, '*', ...)
end

local function ack_and_delete(lane, entry)
  if string.sub(lane or '', 1, #P) == P and is_entry(entry) then buffer_write(buffered_acks, lane, entry) end
end

-- Run a command that names a worker as a consumer of a stream. The stream or its group may not exist yet, or was lost with
-- the data.
local function run_in_group(stream, command)
  for attempt = 1, 2 do
    local got = command()
    if type(got) ~= 'table' or not got.err then return got end
    local missing = string.sub(got.err, 1, 7) == 'NOGROUP' or string.find(got.err, 'requires the key to exist', 1, true)
    if attempt == 2 or not missing then error(got.err, 0) end
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
end
