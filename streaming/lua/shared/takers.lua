-- Takers: workers that would begin a new job at once.

local MAX_LOOKED = 100

-- Find such a worker, of those that said within the last 2 s that they have room, the one that said so last; for the highest
-- lane also one that would preempt a job for it. `waiting`, `own`: jobs that wait in the lane, and the tenant's among them.
-- Jobs that wait take what is free, but a place that a worker keeps from their tenants (closed_to in claims.lua) is for
-- others in this lane. Returns the worker and the list that it is in; nil: none.
local function find_taker(model, priority, tenant, waiting, own, now)
  if count_earlier(model, priority) > 0 then return nil end
  for _, list in ipairs({idle_key(model), priority == PRIORITIES[1] and yielding_key(model) or nil}) do
    local ready = redis.call('ZRANGE', list, '+inf', now - 2000, 'BYSCORE', 'REV', 'LIMIT', 0, MAX_LOOKED)
    for _, worker in ipairs(ready) do
      local closed = redis.call('HGET', worker_key(worker), 'closed') or ''
      local function is_closed_to(name) return string.find(closed, '\n' .. name, 1, true) end
      local before = is_closed_to('tenant:') and own or waiting
      if before == 0 and not is_closed_to('lane:' .. priority .. '\n') and not is_closed_to('tenant:' .. tenant .. '\n') then
        return worker, list
      end
    end
  end
end
