-- Repair of a lane's index.

-- Make the index of a lane agree with its stream, which is the record of what was accepted: drop the index of an empty
-- stream, add waiting jobs that it lacks, and remove entries that are no job's. Reads the stream only if their numbers
-- differ, and 10,000 entries at a time: the next sweep goes on behind them.
local REPAIR_S = 3600

local function repair_line(model, priority, now)
  local lane, arrivals = lane_key(model, priority), arrivals_key(model, priority)
  local length, indexed = redis.call('XLEN', lane), redis.call('ZCARD', arrivals)
  if length == 0 then
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_key(model, priority), 0, -1)) do
      redis.call('DEL', tenant_line(model, priority, tenant))
    end
    redis.call('DEL', arrivals, tenants_key(model, priority))
    return
  end
  if indexed > 0 and redis.call('EXISTS', tenants_key(model, priority)) == 0 then
    redis.call('DEL', arrivals) -- a part of the index is lost: make all of it again
    indexed = 0
  end
  if count_undelivered(lane) <= indexed then return end
  local field = model .. ':' .. priority
  local from = redis.call('HGET', repairs_key(), field) or '-'
  for _ = 1, 10 do
    local entries = redis.call('XRANGE', lane, from, '+', 'COUNT', 1000)
    if #entries == 0 then
      redis.call('HDEL', repairs_key(), field)
      return
    end
    local members = {}
    for i, item in ipairs(entries) do members[i] = to_member(item[1]) end
    for i, score in ipairs(redis.call('ZMSCORE', arrivals, unpack(members))) do
      local entry, fields = entries[i][1], entries[i][2]
      local pending = not score and redis.pcall('XPENDING', lane, GROUP, entry, entry, 1)
      if pending and (pending.err or #pending == 0) then
        if fields[1] ~= 'job' or fields[3] then
          dead_letter('lane', lane, 'entry', entry, 'reason', 'not a lane entry of Penstock')
          ack_and_delete(lane, entry)
        else
          run_or_fail(fields[2], nil, function(id)
            local s = redis.call('HMGET', job_key(id), 'state', 'lane', 'entry', 'tenant', 'order', 'created')
            if s[1] ~= 'queued' or s[2] ~= lane or s[3] ~= entry then return ack_and_delete(lane, entry) end
            rejoin_line(model, priority, s[4] or '', entry, id, s[6], s[5])
          end)
        end
      end
    end
    from = '(' .. entries[#entries][1]
  end
  redis.call('HSET', repairs_key(), field, from)
  redis.call('EXPIRE', repairs_key(), REPAIR_S)
end
