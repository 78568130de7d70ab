-- Values of records and keys: parsed, and checked before anything is written.

-- Parse a number of a record, nil if it is malformed: integer_text returns a non-negative integer as its text,
-- parse_number any number from 0 to 1e18 (never inf or nan).
local function integer_text(text)
  return #(text or '') < 16 and string.match(text or '', '^%d+$') or nil
end

local function parse_number(text)
  local number = tonumber(text or nil)
  return number and number >= 0 and number < 1e18 and number or nil
end

-- Parse the key of a lane, a retry stream or a suspects stream. Returns its model, priority and kind, or nil.
local function parse_lane(lane)
  if string.sub(lane or '', 1, #P) ~= P then return nil end
  local kind, model, priority = string.match(lane, '^(%a+):(.+):(%a+)$', #P + 1)
  if kind ~= 'lane' and kind ~= 'retry' and kind ~= 'suspects' then return nil end
  for _, known in ipairs(PRIORITIES) do
    if priority == known then return model, priority, kind end
  end
end

local function is_entry(entry)
  local ms, number = string.match(entry or '', '^(%d+)%-(%d+)$')
  return ms and #ms < 20 and #number < 20
end

-- Check the lane and the entry of a job's record, before anything is written. Returns as parse_lane; raises if invalid.
local function require_lane_entry(lane, entry)
  local model, priority, kind = parse_lane(lane)
  if not model then error('invalid lane', 0) end
  if not is_entry(entry) then error('invalid entry', 0) end
  return model, priority, kind
end

-- The time (s) for which the record of an ended job is kept; an hour if the record's own is malformed.
local function retention_s(keep)
  return integer_text(keep) or 3600
end

-- Whether a field of a record is an idempotency key, which expires with its job. Any other key must not be touched.
local function is_idem_key(key)
  local start = idem_key('')
  return string.sub(key or '', 1, #start) == start
end

-- Find the job of an idempotency key. The key is free if its job is gone or malformed; a malformed job fails here. `pin`:
-- the client gets the job's id instead of waiting, so a disconnect of another client must not cancel the job.
-- Returns: nil | {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (with another body)
local STATES = {queued = true, in_progress = true, completed = true, failed = true, cancelled = true, expired = true}
