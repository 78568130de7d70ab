#!lua flags=no-writes
-- Reads a job's record.
-- ARGV: id, '1' to leave its body out | '', the bytes of a result from which on it is left out where there is a summary
--       of it | '', the tenant whose job it must be | ''
-- Returns: {its fields and their values, the partition's epoch | nil}; {'malformed', ...} if it is not a hash;
--          no fields if it is not kept, or another tenant's
local job, bodiless, long, tenant = job_key(ARGV[1]), ARGV[2] == '1', tonumber(ARGV[3] or ''), ARGV[4] or ''
local epoch = redis.call('GET', epoch_key())
local size = redis.pcall('HSTRLEN', job, 'record')
if type(size) == 'table' then return {'malformed', epoch} end
if tenant ~= '' and (redis.call('HGET', job, 'tenant') or tenant) ~= tenant then return {{}, epoch} end
local resultless = long and size >= long and redis.call('HEXISTS', job, 'summary') == 1
if not (bodiless or resultless) then return {redis.call('HGETALL', job), epoch} end
local wanted, out = {}, {}
for _, name in ipairs(redis.call('HKEYS', job)) do
  if not (bodiless and name == 'body' or resultless and name == 'record') then wanted[#wanted + 1] = name end
end
local values = #wanted > 0 and redis.call('HMGET', job, unpack(wanted)) or {}
for i, name in ipairs(wanted) do out[2 * i - 1], out[2 * i] = name, values[i] end
return {out, epoch}
