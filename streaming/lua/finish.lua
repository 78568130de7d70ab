#!lua flags=allow-oom
-- The terminal record and the acknowledgement, in one step, by the worker that holds the job and by no other.
-- ARGV: worker, id, attempt, state, record, message ('' if it is the record), why it is a dead letter | ''
-- Returns: 'fenced' | 0 (ended already, or not this worker's) | 1
local worker, id, attempt, state, record, message = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local dead = ARGV[7]
if not is_live(worker) then return 'fenced' end
local job = job_key(id)
local s = redis.call('HMGET', job, 'state', 'worker', 'attempt', 'lane', 'entry', 'reply', 'keep', 'events')
if s[1] ~= 'in_progress' or s[2] ~= worker or s[3] ~= attempt then return 0 end
redis.call('HSET', job, 'state', state, 'record', record, 'done', now_ms())
drop_entry(s[4], s[5])
gather(let_go, worker, id)
redis.call('EXPIRE', job, s[7])
tell(s[6], message ~= '' and message or record)
if s[8] then emit(s[8], id, redis.call('HGET', job, 'tenant'), 'job.' .. state, true) end
if dead ~= '' then bury('job', id, 'reason', dead) end
return 1
