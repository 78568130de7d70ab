-- Filters job ids: returns those of jobs that have ended or are no longer kept. ARGV: ids. Returns: their ids.
local over = {}
for _, id in ipairs(ARGV) do
  local state = redis.pcall('HGET', job_key(id), 'state')
  if state ~= 'queued' and state ~= 'in_progress' then over[#over + 1] = id end
end
return over
