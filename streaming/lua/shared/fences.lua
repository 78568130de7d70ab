-- Fences: whether a worker may still write, and write for this job.

-- Fencing check: whether the worker still has its lease. Cached: no call of a batch changes it.
local live_workers = {}

local function is_live(worker)
  if live_workers[worker] == nil then live_workers[worker] = redis.call('HGET', worker_key(worker), 'state') == 'live' end
  return live_workers[worker]
end

-- Fencing check: whether this worker holds the job under this run, by the job's record. If the job has ended or another
-- worker holds it, it is removed from this worker's claims. Raises if the record is inconsistent: an invalid state or
-- run, or a worker that has not claimed the job.
local function holds_job(id, worker, run, state, owner, number)
  if state == 'in_progress' and owner == worker and number == run then return true end
  if state and not STATES[state] then error('invalid state', 0) end
  if state == 'queued' then return false end
  if state == 'in_progress' then
    if owner == worker then
      if not string.find(integer_text(number) or '', '^[1-9]') then error('invalid run', 0) end
      return false
    end
    if redis.call('SISMEMBER', claims_key(worker), id) == 1
      and redis.call('SISMEMBER', claims_key(owner or ''), id) == 0 then
      error('invalid worker', 0)
    end
  end
  buffer_write(buffered_releases, worker, id)
  return false
end
