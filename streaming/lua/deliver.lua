-- Note when answers were handed on; of a job that is no longer kept nothing is noted, and the first note stands.
-- ARGV: pairs of id, note
-- Returns: how many were new
local new, jobs = 0, {}
for i = 1, #ARGV, 2 do jobs[#jobs + 1] = job_key(ARGV[i]) end
local all = redis.call('EXISTS', unpack(jobs)) == #jobs
for i, job in ipairs(jobs) do
  if all or redis.call('EXISTS', job) == 1 then new = new + redis.call('HSETNX', job, 'delivered', ARGV[2 * i]) end
end
return new
