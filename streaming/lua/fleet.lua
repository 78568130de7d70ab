-- Scripts of the fleet's hash slot: store identity, processes, leader, plans, overrides, model cards, audit
-- log and the console's sessions.

#!lua name=identify flags=allow-oom roles=any
-- Reads the store's identity, or writes it if there is none. Processes that start at once get the same answer.
-- ARGV: format, partitions and deployment id to write if the store has none
-- Returns: {format, partitions, deployment}
if redis.call('EXISTS', store_key()) == 0 then
  redis.call('HSET', store_key(), 'format', ARGV[1], 'partitions', ARGV[2], 'deployment', ARGV[3], 'created', now_ms())
end
return redis.call('HMGET', store_key(), 'format', 'partitions', 'deployment')

#!lua name=report flags=allow-oom roles=any
-- Heartbeat of a process: stores its description for a limited time. ARGV: its name, description, seconds to keep it
local name, gone_s = ARGV[1], tonumber(ARGV[3])
local now = exact_ms() / 1000
redis.call('SET', proc_key(name), ARGV[2], 'EX', gone_s)
redis.call('ZADD', procs_key(), now + gone_s, name)
redis.call('ZREMRANGEBYSCORE', procs_key(), '-inf', now - 3600)
return 1

#!lua name=processes flags=no-writes roles=any
-- Lists the processes whose last heartbeat still counts. Returns: name and description of each, one after another
local names = redis.call('ZRANGE', procs_key(), exact_ms() / 1000, '+inf', 'BYSCORE')
local keys, found = {}, {}
for i, name in ipairs(names) do keys[i] = proc_key(name) end
for i, description in ipairs(keys[1] and redis.call('MGET', unpack(keys)) or {}) do
  if description then
    found[#found + 1] = names[i]
    found[#found + 1] = description
  end
end
return found

#!lua name=lead flags=allow-oom roles=scheduler
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

#!lua name=plan flags=allow-oom roles=scheduler
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

#!lua name=act flags=allow-oom roles=scheduler
-- Records an action that a pool is about to take for a plan; fenced by the leader's epoch.
-- ARGV: the plan's epoch, model, record. Returns: 1 | 0 (refused: another leader was elected after that plan)
if redis.call('GET', leader_epoch_key()) ~= ARGV[1] then return 0 end
redis.call('XADD', actions_key(), 'MAXLEN', '~', 1000, '*', 'model', ARGV[2], 'epoch', ARGV[1], 'action', ARGV[3])
return 1

#!lua name=share flags=allow-oom roles=pools
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

#!lua name=override flags=allow-oom roles=api
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

#!lua name=card flags=allow-oom roles=worker
-- Stores the model card that a worker made when it loaded a model. ARGV: model, card
redis.call('HSET', card_key(), ARGV[1], ARGV[2])
return 1

#!lua name=keep_api_key flags=allow-oom roles=api promise
-- Stores a created API key, or changes one that is as its reader saw it. ARGV: id, its record as it was | '' if it is new,
-- its record. Returns: 1 | 0 (it has changed meanwhile: nothing was written)
if (redis.call('HGET', api_keys_key(), ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', api_keys_key(), ARGV[1], ARGV[3])
redis.call('INCR', api_keys_version_key())
return 1

#!lua name=note_audit flags=allow-oom roles=api
-- Stores an entry of the audit log, once however often it is sent. ARGV: kind, how many of it are kept, entry
local log = audit_key(ARGV[1])
for _, row in ipairs(redis.call('XREVRANGE', log, '+', '-', 'COUNT', 100)) do
  if row[2][2] == ARGV[3] then return 1 end
end
redis.call('XADD', log, 'MAXLEN', '~', ARGV[2], '*', 'entry', ARGV[3])
return 1

#!lua name=console flags=allow-oom roles=api
-- Stores a session of the console, or a link that opens one. ARGV: its digest, record, ms it holds
redis.call('SET', console_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
return 1
