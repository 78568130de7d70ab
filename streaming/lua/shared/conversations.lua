-- Conversations: one turn at a time, what they count as, and how long they are kept.

-- The most time (s) for which a conversation waits for the end of its turn. The end of the turn's job shortens it.
local MAX_TURN_S = 31 * 86400

-- Count a conversation's bytes as requests of its tenant until it expires, and no more where `size` says that they are
-- counted. Returns what its record notes as its size: 'bytes:span end'.
local function count_conversation(tenant, size, bytes, keep, now)
  local was, span = string.match(size or '', '^(%d+):(%d+)$')
  if integer_text(was) and integer_text(span) and tonumber(span) > now / 1000 then
    buffer_write(buffered_usage, tenant, span, -was)
  end
  local ends = usage_span_end(keep, now)
  if bytes > 0 then buffer_write(buffered_usage, tenant, tostring(ends), bytes) end
  return bytes .. ':' .. ends
end

local function conversation_bytes(size)
  return tonumber(integer_text(string.match(size or '', '^(%d+):')) or 0)
end

-- Give a conversation its turn: no other one may begin until this job has ended and its items were added.
local function begin_turn(conversation, id)
  redis.call('HSET', conversation_key(conversation), 'turn', id)
  redis.call('EXPIRE', conversation_key(conversation), MAX_TURN_S)
end

-- Let a conversation be kept for as long as the job of its turn, which has ended. The job's items are added by whoever
-- uses the conversation next, from the job's record. Does nothing if the conversation is gone or malformed.
local function end_turn(conversation, id, keep, now)
  if (conversation or '') == '' then return end
  local key = conversation_key(conversation)
  local s = redis.pcall('HMGET', key, 'turn', 'tenant', 'size')
  if s.err or s[1] ~= id or not s[2] then return end
  redis.call('HSET', key, 'size', count_conversation(s[2], s[3], conversation_bytes(s[3]), tonumber(keep), now))
  redis.call('EXPIRE', key, keep)
end
