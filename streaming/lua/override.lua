#!lua flags=allow-oom
-- Sets or ends a manual override of one model's pool, and wakes the scheduler.
-- ARGV: model, record | '' to end it, ms it holds | '' until it is ended, record of the action
-- Returns: 1 | 0 (there was nothing to end)
local model, record, keep, action = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if record == '' then
  if redis.call('DEL', override_key(model)) == 0 then return 0 end
elseif keep == '' then
  redis.call('SET', override_key(model), record)
else
  redis.call('SET', override_key(model), record, 'PX', keep)
end
local epoch = redis.call('GET', leader_epoch_key()) or 0
redis.call('XADD', actions_key(), 'MAXLEN', '~', 1000, '*', 'model', model, 'epoch', epoch, 'action', action)
wake_scheduler(model)
return 1
