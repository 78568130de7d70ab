-- Reads a page of a tenant's jobs, newest first, without bodies and answers.
-- ARGV: tenant, drop entries older than this (ms), cursor: time | '', and id | '', most ids looked at,
--       most jobs found, their state | '' for any
-- Returns: {epoch | false, {time, id} of the last one looked at | false if there are no more, {id, time, fields}...}
local tenant, horizon, time, id = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local most_looked, most_found, state = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
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

local rank = entries_before()
local looked, last, out = 0, false, {redis.call('GET', epoch_key()), false}
while looked < most_looked and #out - 2 < most_found do
  local page = redis.call('ZRANGE', jobs, rank, rank + most_looked - looked - 1, 'REV', 'WITHSCORES')
  if #page == 0 then break end
  for i = 1, #page, 2 do
    rank, looked, last = rank + 1, looked + 1, {page[i + 1], page[i]}
    local job = job_key(page[i])
    if state == '' or redis.pcall('HGET', job, 'state') == state then
      local fields = redis.pcall('HMGET', job, 'state', 'lane', 'attempt', 'created', 'claimed', 'started', 'done',
        'keep', 'reason', 'summary', 'metadata', 'epoch', 'runs', 'endpoint', 'cancel')
      if fields[1] then out[#out + 1] = {page[i], page[i + 1], fields} end
    end
    if #out - 2 >= most_found then break end
  end
end
if rank < redis.call('ZCARD', jobs) then out[2] = last end
return out
