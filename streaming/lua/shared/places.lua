-- Places that deleted files, batches and conversation items had in their lists, so that a cursor may name them.

-- A tenant's last ones in each partition, for a day.
local MAX_PLACES = 1000

local function keep_place(tenant, name, place)
  local key = places_key(tenant)
  redis.call('LPUSH', key, name .. ' ' .. place)
  redis.call('LTRIM', key, 0, MAX_PLACES - 1)
  redis.call('EXPIRE', key, 86400)
end
