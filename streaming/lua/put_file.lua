-- Stores the record of a file whose bytes are already in the files folder. ARGV: id, tenant, record, ms from now to keep
-- it, the tenant's quota of file bytes | ''
-- Returns: now | {'quota', 'files', bytes the tenant keeps}
local id, tenant, record, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local most = tonumber(ARGV[5])
if most and redis.call('EXISTS', file_key(id)) == 0 then
  local stored = stored_bytes(tenant)
  if stored + record_file_cost(record) > most then return {'quota', 'files', stored} end
end
local now = now_ms()
save_file(id, tenant, record, now, now + keep)
return now
