-- The record of a file that lies in its place already. ARGV: id, tenant, record, ms from now to keep it, the most bytes
-- of files that the tenant may keep | ''
-- Returns: now | {'quota', 'files', bytes it keeps}
local id, tenant, record, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local most = tonumber(ARGV[5])
if most and redis.call('EXISTS', file_key(id)) == 0 then
  local stored = stored_bytes(tenant)
  if stored + cost_in(record) > most then return {'quota', 'files', stored} end
end
local now = now_ms()
keep_file(id, tenant, record, now, now + keep)
return now
