#!lua flags=allow-oom
-- One machine's share of a pool that several machines follow: nobody's workers are counted twice, and none are moved
-- from one machine to another. ARGV: the plan's epoch, pool, machine, workers it has, workers wanted on all machines,
-- ms after which a machine that does not ask again counts as gone
-- Returns: how many workers this machine is to have | -1 (refused: another leader has come since that plan)
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
-- A machine grows only up to an equal share, and shrinks only down to one: some machine always can.
local missing = want - others - mine
if missing > 0 then
  mine = math.max(mine, math.min(mine + missing, math.ceil(want / machines)))
elseif missing < 0 then
  mine = math.min(mine, math.max(mine + missing, math.floor(want / machines)))
end
redis.call('HSET', shares, machine, string.format('%d:%d', mine, now + keep))
redis.call('PEXPIRE', shares, keep)
return mine
