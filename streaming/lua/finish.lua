#!lua flags=allow-oom
-- The terminal record and the acknowledgement, in one step, by the worker that holds the job and by no other.
-- ARGV: worker, id, run, state, record, the same without its rows, '1' if readers are sent the record and not that,
--       why it is a dead letter | ''
-- Returns: 'fenced' | 0 (ended already, or not this run's, or its record cannot be read: then it has failed) | 1
local NUMBERS = {'created', 'claimed', 'started', 'deadline', 'keep', 'epoch', 'attempt'}
-- Raises if a reader could not read one of these, or the runs: who reads later must not be told another end.
local function check_readable(job)
  for i, text in ipairs(redis.call('HMGET', job, unpack(NUMBERS))) do
    if text and text ~= '' and not number_of(text) then error('its ' .. NUMBERS[i] .. ' is none', 0) end
  end
  local rest = string.gsub(redis.call('HGET', job, 'runs') or '', '[^:;]+:%d+:%d+;', '')
  if rest ~= '' then error('its runs are none', 0) end
end

local worker, id, run, state, record, summary = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local whole, dead = ARGV[7] == '1', ARGV[8]
if not is_live(worker) then return 'fenced' end
return or_malformed(id, worker, function()
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'run', 'lane', 'entry', 'reply', 'keep', 'events', 'idem', 'owed',
    'attempt', 'tenant', 'size')
  if not holds(id, worker, run, s[1], s[2], s[3]) then return 0 end
  local model, priority = checked_place(s[4], s[5])
  check_readable(job)
  local now = now_ms()
  redis.call('HSET', job, 'state', state, 'record', record, 'summary', summary, 'done', now)
  keep_ended(s[12], s[13], keep_of(s[7]), now, #record + #summary)
  drop_entry(s[4], s[5])
  owe(model, priority, s[10], -1)
  if s[11] ~= '1' then disown(id, redis.call('HGET', job, 'runs')) end
  gather(released, worker, id)
  redis.call('EXPIRE', job, keep_of(s[7]))
  if is_idem(s[9]) then redis.call('EXPIRE', s[9], keep_of(s[7])) end
  publish(s[6], whole and record or summary)
  if s[8] then emit(s[8], id, s[12] or '', 'job.' .. state, true) end
  if dead ~= '' then dead_letter('job', id, 'reason', dead) end
  return 1
end) or 0
