#!lua flags=allow-oom
-- A pool is about to do what a plan asks for: noted, or refused when another leader has come since that plan.
-- ARGV: the plan's epoch, model, record. Returns: 1 | 0 (refused)
if redis.call('GET', leader_epoch_key()) ~= ARGV[1] then return 0 end
redis.call('XADD', actions_key(), 'MAXLEN', '~', 1000, '*', 'model', ARGV[2], 'epoch', ARGV[1], 'action', ARGV[3])
return 1
