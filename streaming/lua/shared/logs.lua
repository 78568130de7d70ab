-- Logs of workers that are gone, and parked logs: kept while an unfinished job has tokens in them.

-- A dead worker's log is kept while an unfinished job has tokens in it: retain_log registers such jobs, release_logs
-- removes one that has ended. After the last one the log expires within a minute, so that current readers can finish; so
-- does the job's own parked log, which a run of frame 0 names.
local LOG_GRACE_S = 60

local function retain_log(worker, ids, keep)
  if #ids > 0 then
    redis.call('SADD', heirs_key(worker), unpack(ids))
    redis.call('EXPIRE', heirs_key(worker), keep)
  end
end

local function expire_log(worker, keep)
  redis.call('EXPIRE', log_key(worker), redis.call('EXISTS', heirs_key(worker)) == 1 and keep or LOG_GRACE_S)
end

local function release_logs(id, runs)
  redis.call('EXPIRE', parked_key(id), LOG_GRACE_S)
  for worker in string.gmatch(runs or '', '([^:;]+):[^;]*;') do
    if redis.call('SREM', heirs_key(worker), id) == 1 and redis.call('EXISTS', heirs_key(worker)) == 0
      and redis.call('HGET', worker_key(worker), 'state') ~= 'live' then
      redis.call('EXPIRE', log_key(worker), LOG_GRACE_S)
    end
  end
end

local MAX_SCRIPT_ENDS = 10000
local SCRIPT_ENDS_EXPIRY_S = 86400

-- Note that a script ended a job: the process whose sweep takes the id writes the record of the request.
local function note_script_end(id)
  redis.call('RPUSH', script_ends_key(), id)
  redis.call('LTRIM', script_ends_key(), -MAX_SCRIPT_ENDS, -1)
  redis.call('EXPIRE', script_ends_key(), SCRIPT_ENDS_EXPIRY_S)
end
