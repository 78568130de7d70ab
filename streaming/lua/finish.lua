#!lua flags=allow-oom
-- The terminal record and the acknowledgement, in one step, by the worker that holds the job and by no other.
-- ARGV: worker, then for each job: id, attempt, state, record, message ('' if it is the record),
--       Redis ms of the first token | '', why it is a dead letter | ''
-- Returns: 'fenced' | how many of them have ended now (the others had before, or are not this worker's)
local worker = ARGV[1]
if redis.call('HGET', worker_key(worker), 'state') ~= 'live' then return 'fenced' end
local now = now_ms()

local function finish(id, attempt, state, record, message, first, dead)
  local job = job_key(id)
  local s = redis.call('HMGET', job, 'state', 'worker', 'attempt', 'lane', 'entry', 'reply', 'keep')
  if s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= attempt then return 0 end
  redis.call('HSET', job, 'state', state, 'record', record, 'first', first, 'done', now)
  drop_entry(s[4], s[5])
  redis.call('SREM', claims_key(worker), id)
  redis.call('EXPIRE', job, s[7])
  tell(s[6], message ~= '' and message or record)
  if dead ~= '' then bury('job', id, 'reason', dead) end
  return 1
end

local ended = 0
for i = 2, #ARGV, 7 do ended = ended + finish(unpack(ARGV, i, i + 6)) end
return ended
