#!lua flags=allow-oom
-- Cancel a job wherever it stands.
-- ARGV: id, '1' to leave it alone if it runs, and if it is cancelled only because no client of an API process waits for
--       it any more: the address of that process. Then the job is kept if others follow it or know its id (pinned), and
--       its idempotency key is freed with it, so that the next request with that key computes.
-- Returns: the state it was found in, 'unknown' or 'kept'. A waiting job has ended on return; a running one will. One
--          whose record cannot be read has failed.
local id, waiting_only, left = ARGV[1], ARGV[2] == '1', ARGV[3]
return or_malformed(id, nil, function()
  local s = redis.call('HMGET', job_key(id), 'state', 'worker', 'reply', 'pinned', 'idem', 'lane', 'entry')
  if not s[1] then return 'unknown' end
  if not STATES[s[1]] then error('its state is none', 0) end
  if s[1] == 'queued' then checked_place(s[6], s[7]) end
  if s[1] == 'in_progress' and not s[2] then error('its worker is none', 0) end
  if left and (s[1] == 'queued' or s[1] == 'in_progress') then
    local others = {}
    for address in string.gmatch(s[3] or '', '[^,]+') do
      if address ~= left then others[#others + 1] = address end
    end
    redis.call('HSET', job_key(id), 'reply', table.concat(others, ','))
    if #others > 0 or s[4] == '1' then return 'kept' end
    redis.call('HSET', job_key(id), 'abandoned', 1)
    redis.call('HDEL', job_key(id), 'idem')
    free_key(s[5], id)
  end
  if s[1] == 'queued' then
    end_job(id, 'cancelled', 'cancelled', now_ms())
  elseif s[1] == 'in_progress' and not waiting_only then
    redis.call('HSET', job_key(id), 'cancel', 1)
    tell_worker(s[2], {'c', id})
  end
  return s[1]
end) or 'failed'
