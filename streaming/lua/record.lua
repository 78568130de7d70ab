#!lua flags=no-writes
-- What is written about a job. ARGV: id, '1' to leave its body out
-- Returns: {the fields of its record and their values, the partition's epoch | nil}; {'malformed', ...} if it is no hash
local job = job_key(ARGV[1])
local names = redis.pcall(ARGV[2] == '1' and 'HKEYS' or 'HGETALL', job)
if names.err then return {'malformed', redis.call('GET', epoch_key())} end
if ARGV[2] ~= '1' then return {names, redis.call('GET', epoch_key())} end
local wanted, out = {}, {}
for _, name in ipairs(names) do
  if name ~= 'body' then wanted[#wanted + 1] = name end
end
local values = #wanted > 0 and redis.call('HMGET', job, unpack(wanted)) or {}
for i, name in ipairs(wanted) do out[2 * i - 1], out[2 * i] = name, values[i] end
return {out, redis.call('GET', epoch_key())}
