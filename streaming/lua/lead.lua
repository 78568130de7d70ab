#!lua flags=allow-oom
-- Leader election: acquires or renews the lead for one holder at a time; each new leader gets a greater epoch.
-- ARGV: holder, ms the lead is kept from now on (0: give it up)
-- Returns: {epoch, holder} of the current leader, '' for none
local holder, keep = ARGV[1], tonumber(ARGV[2])
local leader = redis.call('GET', leader_key())
local epoch = tonumber(redis.call('GET', leader_epoch_key()) or 0) or 0
if leader == holder then
  if keep == 0 then
    redis.call('DEL', leader_key())
    leader = ''
  else
    redis.call('PEXPIRE', leader_key(), keep)
  end
elseif not leader and keep > 0 then
  -- At least Redis time in seconds: greater than every earlier epoch, even if the store has lost them.
  epoch = math.max(epoch + 1, math.floor(now_ms() / 1000))
  redis.call('SET', leader_epoch_key(), epoch)
  redis.call('SET', leader_key(), holder, 'PX', keep)
  leader = holder
end
return {epoch, leader or ''}
