-- Scripts of conversations.

#!lua name=put_conversation roles=api promise
-- Stores a new conversation; once, however often it is called. ARGV: id, tenant, metadata, seconds to keep it, bytes that
-- every conversation counts as besides its items, the tenant's quota of request bytes | '', its share of the store | '',
-- the items. Returns: when it was created (ms) | {'quota', 'requests', bytes the tenant keeps} |
--                     {'quota', 'share', bytes that its unfinished jobs have reserved}
local id, tenant, metadata, keep, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[6])
local key, now = conversation_key(id), now_ms()
local created = redis.call('HGET', key, 'created')
if created then return tonumber(created) end
local bytes = ARGV[5] + #metadata
for i = 8, #ARGV do bytes = bytes + #ARGV[i] end
local refused = no_room(tenant, keep, bytes, most, tonumber(ARGV[7]))
if refused then return refused end
redis.call('HSET', key, 'tenant', tenant, 'created', now, 'metadata', metadata, 'version', 0, 'turn', '', 'next',
  #ARGV - 7, 'size', count_conversation(tenant, '', bytes, keep))
for i = 8, #ARGV do redis.call('HSET', key, 'i' .. (i - 7), ARGV[i]) end
redis.call('EXPIRE', key, keep)
return now

#!lua name=amend_conversation roles=api promise
-- Changes a conversation if it is still as the caller has read it: adds and deletes items, sets its metadata, ends its
-- turn. ARGV: id, tenant, version and turn that it must have (version '': any), the turn that it then has, seconds to
-- keep it, '=' and the metadata | '' to leave it, the tenant's quota of request bytes | '', its share of the store | '', the
-- items to delete as number:id, separated by commas, the items to add
-- A cursor may still name a deleted item.
-- Returns: 'unknown' (gone, no hash, or another tenant's) | 'changed' (another version or turn) | 'done' |
--          {'quota', ...} as above
local id, tenant, version, turn, next_turn = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local keep, metadata = tonumber(ARGV[6]), ARGV[7] ~= '' and string.sub(ARGV[7], 2)
local most, dropped = tonumber(ARGV[8]), ARGV[10]
local key = conversation_key(id)
local s = redis.pcall('HMGET', key, 'tenant', 'version', 'turn', 'next', 'size', 'metadata')
if s.err or not s[1] or s[1] ~= tenant then return 'unknown' end
if version ~= '' and (s[2] ~= version or s[3] ~= turn) then return 'changed' end
local bytes, number = conversation_bytes(s[5]), tonumber(s[4])
if metadata then bytes = bytes + #metadata - #(s[6] or '') end
for at in string.gmatch(dropped, '(%d+):') do bytes = bytes - redis.call('HSTRLEN', key, 'i' .. at) end
for i = 11, #ARGV do bytes = bytes + #ARGV[i] end
local more = bytes - conversation_bytes(s[5])
local refused = more > 0 and no_room(tenant, keep, more, most, tonumber(ARGV[9]))
if refused then return refused end
for at, item in string.gmatch(dropped, '(%d+):([^,]*)') do
  redis.call('HDEL', key, 'i' .. at)
  keep_place(tenant, id .. ' ' .. item, at)
end
for i = 11, #ARGV do redis.call('HSET', key, 'i' .. (number + i - 10), ARGV[i]) end
if metadata then redis.call('HSET', key, 'metadata', metadata) end
local after = version == '' and s[3] or next_turn
if version ~= '' then
  redis.call('HSET', key, 'version', version + 1, 'turn', after, 'next', number + math.max(0, #ARGV - 10))
end
redis.call('HSET', key, 'size', count_conversation(tenant, s[5], math.max(0, bytes), keep))
if after == '' then redis.call('EXPIRE', key, keep) end -- else the end of the turn's job sets it
return 'done'

#!lua name=drop_conversation flags=allow-oom roles=api promise
-- Deletes a conversation. ARGV: id, tenant. Returns: 'unknown' (gone, or another tenant's) | 'done'
local key = conversation_key(ARGV[1])
local s = redis.pcall('HMGET', key, 'tenant', 'size')
if s.err or not s[1] or s[1] ~= ARGV[2] then return 'unknown' end
count_conversation(s[1], s[2], 0, 1)
redis.call('DEL', key)
return 'done'
