#!lua flags=allow-oom
-- Deletes a conversation. ARGV: id, tenant. Returns: 'unknown' (gone, or another tenant's) | 'done'
local key = conversation_key(ARGV[1])
local s = redis.pcall('HMGET', key, 'tenant', 'size')
if s.err or not s[1] or s[1] ~= ARGV[2] then return 'unknown' end
count_conversation(s[1], s[2], 0, 1, now_ms())
redis.call('DEL', key)
return 'done'
