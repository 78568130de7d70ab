#!lua flags=no-writes
-- Lists the first undelivered entries of a lane. ARGV: the lane's key, most
-- Returns: their ids, in order
local groups = redis.pcall('XINFO', 'GROUPS', ARGV[1])
local behind = '-'
for _, group in ipairs(groups.err and {} or groups) do
  for i = 1, #group, 2 do
    if group[i] == 'last-delivered-id' then behind = '(' .. group[i + 1] end
  end
end
local ids = {}
for i, entry in ipairs(redis.call('XRANGE', ARGV[1], behind, '+', 'COUNT', ARGV[2])) do ids[i] = entry[1] end
return ids
