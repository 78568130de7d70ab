#!lua flags=allow-oom
-- Gives up a worker's lease at its graceful shutdown. Refused while it still holds jobs. ARGV: worker, seconds to keep
-- its log. Returns: how many jobs it still holds (0: it has left)
local worker, keep = ARGV[1], ARGV[2]
local held = redis.call('SCARD', claims_key(worker))
if held > 0 then return held end
local model = redis.call('HGET', worker_key(worker), 'model')
redis.call('HSET', worker_key(worker), 'state', 'left')
redis.call('EXPIRE', worker_key(worker), 3600)
expire_log(worker, keep)
redis.call('ZREM', leases_key(), worker)
if model then
  for _, key in ipairs({idle_key(model), yielding_key(model), prefetching_key(model)}) do redis.call('ZREM', key, worker) end
  if redis.call('GET', alone_key(model)) == worker then redis.call('DEL', alone_key(model)) end
  delete_consumer(model, worker)
end
return 0
