-- Malformed records, which a bug or a manual change in the store leaves: only the job concerned fails.

-- Delete an idempotency key, if it is one and still points to this job.
local function free_idempotency_key(key, id)
  if not is_idem_key(key) then return end
  local known = redis.pcall('GET', key)
  if type(known) == 'string' and string.sub(known, 1, 36) == id then redis.call('DEL', key) end
end

-- Fail a job whose record is malformed. Only its id is trusted; every field that is valid is still used to clean up.
-- `worker`, `lane` and `entry`, where the caller knows them, override the record's; of a job without a valid place a later
-- claim and `reap` remove what is left there. The job becomes a dead letter, and its idempotency key is freed, so that a
-- repeated request is computed anew. Returns 1, or 0 if it had ended or is gone.
local function fail_malformed(id, reason, now, worker, lane, entry)
  local job = job_key(id)
  local s = redis.pcall('HMGET', job, unpack(END_FIELDS))
  if s.err then
    redis.call('DEL', job) -- not a hash
    redis.call('EXPIRE', parked_key(id), LOG_GRACE_S)
    s = {'?'}
  end
  if not s[1] or FINAL[s[1]] then
    if worker then buffer_write('releases', worker, id) end
    return 0
  end
  lane, entry = lane or s[2], entry or s[3]
  local model, priority = parse_lane(lane)
  if not (model and is_entry(entry)) then lane, entry = nil, nil end
  pcall(release_logs, id, s[10])
  free_idempotency_key(s[8], id)
  s[2], s[3], s[8] = lane, entry, nil
  if not s[11] then s[7] = nil end -- an event needs its tenant
  close_job(id, s, 'failed', 'malformed', now)
  let_go(job, id, s, model, priority, 0, 0, 0)
  redis.call('HSETNX', job, 'body', '')
  if entry then leave_lane(model, priority, s[11] or '', entry, id) end
  if worker then buffer_write('releases', worker, id) end
  dead_letter('job', id, 'reason', 'unreadable: ' .. reason)
  return 1
end

-- Find the job of an idempotency key. The key is free if its job is gone or malformed; a malformed job fails here. `pin`:
-- the client gets the job's id instead of waiting, so a disconnect of another client must not cancel the job.
-- Returns: nil | {'joined', id, state, accepted at, attempt, epoch} | {'reused'} (with another body)
local function find_by_idempotency_key(key, tenant, digest, pin, epoch)
  local known = redis.pcall('GET', key)
  if type(known) ~= 'string' then return nil end
  local found = string.sub(known, 1, 36)
  local s = redis.pcall('HMGET', job_key(found), 'tenant', 'state', 'created', 'attempt')
  if not s.err and not s[1] then return nil end
  if not s.err and (s[1] ~= tenant or string.sub(known, 38) ~= digest) then return {'reused'} end
  local created, attempt = string.match(s[3] or '', '^%d+'), string.match(s[4] or '0', '^%d+$')
  if s.err or not STATES[s[2]] or not tonumber(s[3]) or not created or not attempt then
    fail_malformed(found, s.err or 'invalid state, created or attempt', now_ms())
    return nil
  end
  if pin then redis.call('HSET', job_key(found), 'pinned', 1) end
  return {'joined', found, s[2], tonumber(created), tonumber(attempt), epoch}
end

-- Classify an error: returns its text if the job's record caused it, nil if the server refused the command whatever the
-- record holds (recognised by the reply's code, or by these words). An unknown error counts as the record's: then one
-- job fails and becomes a dead letter, and no other job is blocked by it.
local function record_fault(problem)
  local refusals = {
    OOM = true, MISCONF = true, READONLY = true, NOREPLICAS = true, LOADING = true, MASTERDOWN = true, UNBLOCKED = true,
    NOAUTH = true, WRONGPASS = true, NOPERM = true, CLUSTERDOWN = true, MOVED = true, ASK = true, TRYAGAIN = true
  }
  local words = {'ACL failure', 'executing the script', 'nknown Redis command', 'nknown command', 'non local key',
    'cript killed', 'not enough memory'}
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  if refusals[string.match(text, '^%-?(%u+)') or ''] then return nil end
  for _, refusal in ipairs(words) do
    if string.find(text, refusal, 1, true) then return nil end
  end
  return text
end

-- Run step(id, worker) for one job; `worker` holds it, if any does. If its record is malformed, only that job fails.
-- Returns: the result of `step`, or nil if the job has failed
local function run_or_fail(id, worker, step)
  local ran, answer = pcall(step, id, worker)
  if ran then return answer end
  local why = record_fault(answer)
  if not why then error(answer, 0) end
  fail_malformed(id, why, now_ms(), worker)
  return nil
end
