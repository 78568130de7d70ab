#!lua flags=allow-oom
-- Publishes the leader's decisions: stores them, and notifies workers and pools; fenced by the leader's epoch.
-- ARGV: holder, epoch, then threes of: 'plan', model, record | 'cold', model, seconds | 'act', model, record
--       | 'cordon', worker, reason | 'hold', worker, ms
-- Returns: 1 | 0 (refused: nothing was written or sent)
if redis.call('GET', leader_key()) ~= ARGV[1] or redis.call('GET', leader_epoch_key()) ~= ARGV[2] then return 0 end
local changed = false
for i = 3, #ARGV, 3 do
  local what, name, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if what == 'plan' then
    redis.call('HSET', plan_key(), name, value)
  elseif what == 'cold' then
    redis.call('HSET', cold_key(), name, value)
  elseif what == 'cordon' then
    notify_worker(name, {'d', value})
  elseif what == 'hold' then
    notify_worker(name, {'h', tonumber(value)})
  else
    redis.call('XADD', actions_key(), 'MAXLEN', '~', 1000, '*', 'model', name, 'epoch', ARGV[2], 'action', value)
    changed = true
  end
end
if changed then redis.call('PUBLISH', CHANNEL .. 'pools:plan', ARGV[2]) end
return 1
