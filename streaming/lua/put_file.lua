-- The record of a file that lies in its place already. ARGV: id, tenant, record, ms from now to keep it
-- Returns: now
local id, tenant, record, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now = now_ms()
keep_file(id, tenant, record, now, now + keep)
return now
