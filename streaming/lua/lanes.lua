#!lua flags=no-writes
-- Counts waiting and running jobs in every lane of these models, and lists the nearest deadlines of waiting jobs.
-- ARGV: most deadlines, model...
-- Returns: {now, {{waiting, running, time (ms) of the oldest that waits | 0, ever put}, by model and priority...},
--           {{lane, accepted at, expires at}...}}
local most = tonumber(ARGV[1])

-- Count the requeued jobs of one stream: waiting, running, time (ms) of the oldest that waits | 0. Entries leave a stream at
-- their job's end, so an entry is waiting if it was not delivered, and running if it was.
local function count_stream(stream)
  if redis.call('TYPE', stream).ok ~= 'stream' then return 0, 0, 0 end
  local waiting = count_undelivered(stream)
  local running = redis.call('XLEN', stream) - waiting
  if waiting <= 0 then return 0, math.max(running, 0), 0 end
  local first = redis.call('XRANGE', stream, undelivered_from(stream), '+', 'COUNT', 1)
  return waiting, running, first[1] and tonumber(string.match(first[1][1], '^%d+')) or 0
end

-- The same of a lane, whose waiting jobs are those of its index.
local function count_lane(model, priority)
  local lane = lane_key(model, priority)
  if redis.call('TYPE', lane).ok ~= 'stream' then return 0, 0, 0 end
  local waiting = redis.call('ZCARD', arrivals_key(model, priority))
  local oldest = redis.call('ZRANGE', arrivals_key(model, priority), 0, 0, 'WITHSCORES')
  return waiting, math.max(0, redis.call('XLEN', lane) - waiting), tonumber(oldest[2] or 0)
end

local function ever_put(lane)
  local about = redis.pcall('XINFO', 'STREAM', lane)
  for i = 1, about.err and 0 or #about, 2 do
    if about[i] == 'entries-added' then return about[i + 1] end
  end
  return 0
end

local lanes = {}
for i = 2, #ARGV do
  for _, priority in ipairs(PRIORITIES) do
    local waiting, running, oldest = count_lane(ARGV[i], priority)
    if oldest == 0 then oldest = math.huge end
    -- Requeued jobs count as waiting, but only the lane counts in `ever put`.
    for _, key in ipairs({suspects_key(ARGV[i], priority), retry_key(ARGV[i], priority)}) do
      local here, there, first = count_stream(key)
      waiting, running = waiting + here, running + there
      if first > 0 then oldest = math.min(oldest, first) end
    end
    lanes[#lanes + 1] = {waiting, running, oldest < math.huge and oldest or 0, ever_put(lane_key(ARGV[i], priority))}
  end
end

local due = {}
local nearest = most > 0 and redis.call('ZRANGE', timers_key(), 0, most - 1, 'WITHSCORES') or {}
for i = 1, #nearest, 2 do
  local s = redis.pcall('HMGET', job_key(nearest[i]), 'lane', 'created')
  if s[1] then due[#due + 1] = {s[1], s[2], nearest[i + 1]} end
end
return {now_ms(), lanes, due}
