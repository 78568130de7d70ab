-- Note when answers were handed on; of a job that is no longer kept nothing is noted, and the first note stands.
-- ARGV: pairs of id, note
-- Returns: how many were new
local new = 0
for i = 1, #ARGV, 2 do
  if redis.call('EXISTS', job_key(ARGV[i])) == 1 then
    new = new + redis.call('HSETNX', job_key(ARGV[i]), 'delivered', ARGV[i + 1])
  end
end
return new
