#!lua flags=allow-oom
-- Claims up to `want` waiting jobs for a live worker, in the order of streaming/order.py. Suspects
-- (jobs that may have killed their workers) run alone: one worker of a model at a time takes them, one by one.
-- ARGV: worker, model, want, lease in ms, '1' to take one suspect instead, most jobs from the lowest lane | '',
--       the number of the worker's last run: the runs that begin here get the following ones, places that are free:
--       jobs beyond them come from the highest lane alone, and the worker preempts others for them | '',
--       how many of these begin at once: for others the worker is not idle, and prefetches them | '',
--       places for jobs of any tenant, and tenants that get none of the further places...
-- Returns: 'fenced' | {now (ms, with decimals), frame number, 1 if this worker must finish its jobs and then take suspects,
--                      {id, body, attempt, deadline | '', reply, runs before this one, accepted at, number of its run}...}
local c = {
  worker = ARGV[1], model = ARGV[2], want = tonumber(ARGV[3]), alone = ARGV[5] == '1', number = tonumber(ARGV[7]),
  begun = 0, taken = {}, lanes = {}, chosen = {}, dropped = 0, crowding = {}, crowds = 0, commit = commit_choices
}
local worker, model, want, lease = c.worker, c.model, c.want, tonumber(ARGV[4])
local mine = redis.call('HMGET', worker_key(worker), 'state', 'frame', 'name', 'closed')
if mine[1] ~= 'live' then return 'fenced' end
c.exact = exact_ms()
c.now, c.frame, c.name = math.floor(c.exact), tonumber(mine[2]), mine[3] or ''
c.shared = tonumber(ARGV[10]) or want
for i = 11, #ARGV do c.crowding[ARGV[i]], c.crowds = true, c.crowds + 1 end
c.spare, c.free, c.out = tonumber(ARGV[6]) or want, tonumber(ARGV[8]) or want, {string.format('%.3f', c.exact), c.frame, 0}
redis.call('ZADD', leases_key(), c.now + lease, worker)

-- Retry and suspects streams exist only while jobs are requeued: one EXISTS usually saves reading them.
local requeue_streams, suspects = {}, 0
for i, priority in ipairs(PRIORITIES) do
  requeue_streams[2 * i - 1], requeue_streams[2 * i] = retry_key(model, priority), suspects_key(model, priority)
end
local any_requeued = redis.call('EXISTS', unpack(requeue_streams)) > 0
for i = 2, any_requeued and #requeue_streams or 0, 2 do suspects = suspects + redis.call('XLEN', requeue_streams[i]) end
local runner = suspects > 0 and redis.call('GET', alone_key(model))
local must_run = suspects > 0 and (not runner or runner == worker)
if must_run then
  redis.call('SET', alone_key(model), worker, 'PX', 3 * lease)
  c.out[3] = 1
end

local function take_suspects()
  for i = 2, #requeue_streams, 2 do
    local more = true
    while more and c.begun < want and c.dropped < MAX_DROPPED do
      local _
      _, more = take_requeued(c, requeue_streams[i])
    end
  end
end

-- A worker that is to run suspects claims nothing else before them.
local ran, problem = true, nil
if c.alone and must_run then
  ran, problem = pcall(take_suspects)
elseif not c.alone and not must_run then
  ran, problem = pcall(take_in_order, c, any_requeued)
end
for first = 1, #c.taken, 1000 do
  redis.call('SADD', claims_key(worker), unpack(c.taken, first, math.min(first + 999, #c.taken)))
end
if not ran then error(problem, 0) end
if c.dropped >= MAX_DROPPED then notify_worker(worker, {'w'}) end
if c.begun < want and c.free < want and not must_run then
  redis.call('ZADD', yielding_key(model), c.now, worker)
  redis.call('EXPIRE', yielding_key(model), YIELDING_EXPIRY_S)
end
local closed = closed_to(c)
if closed ~= (mine[4] or '') then redis.call('HSET', worker_key(worker), 'closed', closed) end
local begins = tonumber(ARGV[9]) or c.free
redis.call('ZREM', idle_key(model), worker)
redis.call('ZREM', prefetching_key(model), worker)
if c.begun < c.free and not must_run then
  local highest, ready = lane_key(model, PRIORITIES[1]), c.begun < begins and idle_key(model) or prefetching_key(model)
  redis.call('ZADD', ready, c.now, worker)
  if c.begun >= begins then redis.call('EXPIRE', ready, YIELDING_EXPIRY_S) end
  run_in_group(highest, function() return redis.pcall('XGROUP', 'CREATECONSUMER', highest, GROUP, worker) end)
end
return c.out
