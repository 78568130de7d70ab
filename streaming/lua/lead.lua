#!lua flags=allow-oom
-- Ask to lead, or go on leading: one holder at a time, each new one under a greater epoch.
-- ARGV: holder, ms the lead is kept from now on (0: give it up)
-- Returns: {epoch, holder} of whoever leads now, '' for nobody
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
  -- Seconds of Redis time: greater than every earlier epoch, even if the store has forgotten them.
  epoch = math.max(epoch + 1, math.floor(now_ms() / 1000))
  redis.call('SET', leader_epoch_key(), epoch)
  redis.call('SET', leader_key(), holder, 'PX', keep)
  leader = holder
end
return {epoch, leader or ''}
