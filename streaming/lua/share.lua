#!lua flags=allow-oom
-- Assigns one machine its share of a pool's workers where several machines run the pool: the shares add up to the plan,
-- and no worker moves between machines. ARGV: the plan's epoch, pool, machine, workers it has, workers wanted in all,
-- ms after which a machine that does not ask again counts as gone
-- Returns: how many workers this machine shall have | -1 (refused: another leader was elected after that plan)
local epoch, pool, machine, has, want, keep = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
if redis.call('GET', leader_epoch_key()) ~= epoch then return -1 end
local shares, now = shares_key(pool), now_ms()
local mine, others, machines = has, 0, 1
local found = redis.call('HGETALL', shares)
for i = 1, #found, 2 do
  local count, until_ms = string.match(found[i + 1], '^(%d+):(%d+)$')
  if not count or tonumber(until_ms) < now then
    redis.call('HDEL', shares, found[i])
  elseif found[i] == machine then
    mine = tonumber(count)
  else
    others, machines = others + count, machines + 1
  end
end
-- No machine grows beyond, or shrinks below, an equal share, so some machine can always change.
local missing = want - others - mine
if missing > 0 then
  mine = math.max(mine, math.min(mine + missing, math.ceil(want / machines)))
elseif missing < 0 then
  mine = math.min(mine, math.max(mine + missing, math.floor(want / machines)))
end
redis.call('HSET', shares, machine, string.format('%d:%d', mine, now + keep))
redis.call('PEXPIRE', shares, keep)
return mine
