#!lua flags=allow-oom
-- Records an action that a pool is about to take for a plan; fenced by the leader's epoch.
-- ARGV: the plan's epoch, model, record. Returns: 1 | 0 (refused: another leader was elected after that plan)
if redis.call('GET', leader_epoch_key()) ~= ARGV[1] then return 0 end
redis.call('XADD', actions_key(), 'MAXLEN', '~', 1000, '*', 'model', ARGV[2], 'epoch', ARGV[1], 'action', ARGV[3])
return 1
