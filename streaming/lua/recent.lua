-- Reads a page of a tenant's jobs, newest first, without bodies and answers.
-- ARGV: tenant, drop entries older than this (ms), cursor: time | '', and id | '', most ids looked at,
--       most jobs found; and '' for any: their state, model, priority, the earliest and the latest time (ms) of their
--       acceptance
-- Returns: {epoch | false, {time, id} of the last one looked at | false if there are no more, {id, time, fields}...}
local tenant, horizon, time, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most_looked, most_found, state = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local model, priority, since, till = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local filtered = state ~= '' or model ~= '' or priority ~= ''
local jobs = jobs_key(tenant)
if redis.call('ZCOUNT', jobs, '-inf', horizon) > 0 then redis.call('ZREMRANGEBYSCORE', jobs, '-inf', horizon) end

-- How many entries come before those behind the cursor (time, id). Binary search among entries of the same time: a client
-- can make as many of those as it likes, and no cursor may cause a read of all of them.
local function entries_before()
  if time == '' then return 0 end
  local low, high = redis.call('ZCOUNT', jobs, '(' .. time, '+inf'), redis.call('ZCOUNT', jobs, time, '+inf')
  while low < high do
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', jobs, middle, middle, 'REV')[1] < id then high = middle else low = middle + 1 end
  end
  return low
end

local function passes(job)
  local s = redis.pcall('HMGET', job, 'state', 'lane')
  local its_model, its_priority = parse_lane(s[2])
  return (state == '' or s[1] == state) and (model == '' or its_model == model) and
    (priority == '' or its_priority == priority)
end

local rank = entries_before()
if till ~= '' then rank = math.max(rank, redis.call('ZCOUNT', jobs, '(' .. till, '+inf')) end
local count = since ~= '' and redis.call('ZCOUNT', jobs, since, '+inf') or redis.call('ZCARD', jobs)
local looked, last, out = 0, false, {redis.call('GET', epoch_key()), false}
while looked < most_looked and rank < count and #out - 2 < most_found do
  local end_rank = math.min(rank + most_looked - looked, count) - 1
  local page = redis.call('ZRANGE', jobs, rank, end_rank, 'REV', 'WITHSCORES')
  for i = 1, #page, 2 do
    rank, looked, last = rank + 1, looked + 1, {page[i + 1], page[i]}
    local job = job_key(page[i])
    if not filtered or passes(job) then
      local fields = redis.pcall('HMGET', job, 'state', 'lane', 'attempt', 'created', 'claimed', 'started', 'done',
        'keep', 'reason', 'summary', 'metadata', 'epoch', 'runs', 'endpoint', 'cancel', 'preview')
      if fields[1] then out[#out + 1] = {page[i], page[i + 1], fields} end
    end
    if #out - 2 >= most_found then break end
  end
end
if rank < count then out[2] = last end
return out
