#!lua flags=no-writes
-- Reads since when the next job of each tenant has waited, in every lane of these models. The next job of a tenant is the one
-- that must start earliest; requeued jobs are left out. Tenants that were served least come first.
-- ARGV: most tenants of a lane, model...
-- Returns: {now, {{tenant, time (ms) of its job's acceptance...}, by model and priority...}}
local most = tonumber(ARGV[1])

local lanes = {}
for i = 2, #ARGV do
  for _, priority in ipairs(PRIORITIES) do
    local found = {}
    for _, tenant in ipairs(redis.call('ZRANGE', tenants_key(ARGV[i], priority), 0, most - 1)) do
      local first = redis.call('ZRANGE', tenant_line(ARGV[i], priority, tenant), 0, 0)[1]
      local _, _, member = from_member(first or '')
      local accepted = member and redis.call('ZSCORE', arrivals_key(ARGV[i], priority), member)
      if accepted then
        found[#found + 1], found[#found + 2] = tenant, tonumber(accepted)
      end
    end
    lanes[#lanes + 1] = found
  end
end
return {now_ms(), lanes}
