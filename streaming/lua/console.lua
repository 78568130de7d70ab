#!lua flags=allow-oom
-- Stores a session of the console, or a link that opens one; or takes one out, so that it can be used once.
-- ARGV: its digest, record | '' to take it out, ms it holds
-- Returns: 1 | the record that was taken out (false: there was none)
local key = console_key(ARGV[1])
if ARGV[2] == '' then
  local record = redis.call('GET', key)
  redis.call('DEL', key)
  return record
end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1
