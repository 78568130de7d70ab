-- A worker ends in good order. Refused while it still holds jobs. ARGV: worker, seconds to keep its log
-- Returns: how many jobs it still holds (0: it has left)
local worker, keep = ARGV[1], ARGV[2]
local held = redis.call('SCARD', claims_key(worker))
if held > 0 then return held end
local model = redis.call('HGET', worker_key(worker), 'model')
redis.call('HSET', worker_key(worker), 'state', 'left')
redis.call('EXPIRE', worker_key(worker), 3600)
redis.call('EXPIRE', log_key(worker), keep)
redis.call('ZREM', leases_key(), worker)
if model then
  redis.call('ZREM', idle_key(model), worker)
  for _, priority in ipairs(PRIORITIES) do
    for _, lane in ipairs({retry_key(model, priority), lane_key(model, priority)}) do
      -- A consumer deleted with pending entries would strand them.
      local pending = redis.pcall('XPENDING', lane, GROUP, '-', '+', 1, worker)
      if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker) end
    end
  end
end
return 0
