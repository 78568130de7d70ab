#!lua flags=allow-oom
-- Records when answers were delivered to their clients, at most once per job; a job that is no longer kept is skipped.
-- ARGV: pairs of id, note
-- Returns: how many were new
local new, jobs = 0, {}
for i = 1, #ARGV, 2 do jobs[#jobs + 1] = job_key(ARGV[i]) end
local all = redis.call('EXISTS', unpack(jobs)) == #jobs
for i, job in ipairs(jobs) do
  if all or redis.call('EXISTS', job) == 1 then 
    local noted = redis.pcall('HSETNX', job, 'delivered', ARGV[2 * i])
    new = new + (type(noted) == 'number' and noted or 0) -- skip a key that is not a hash
  end
end
return new
