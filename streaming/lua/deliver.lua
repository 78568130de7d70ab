#!lua flags=allow-oom
-- Note when answers were handed on; of a job that is no longer kept nothing is noted, and the first note stands.
-- ARGV: pairs of id, note
-- Returns: how many were new
local new, jobs = 0, {}
for i = 1, #ARGV, 2 do jobs[#jobs + 1] = job_key(ARGV[i]) end
local all = redis.call('EXISTS', unpack(jobs)) == #jobs
for i, job in ipairs(jobs) do
  if all or redis.call('EXISTS', job) == 1 then 
    local noted = redis.pcall('HSETNX', job, 'delivered', ARGV[2 * i])
    new = new + (type(noted) == 'number' and noted or 0) -- a key that is no hash keeps no note, and the others go on
  end
end
return new
